# ruff: noqa: F841
"""Threads: a session sees its own and says what it did not look into."""

import asyncio
import threading

import torch

from tenterhook import capture, edit
from tenterhook.changes import scale
from tests.inside.models import Residual, X, module_of


def test_threads_see_their_own():
    model, found = Residual(), {}

    def work(k):
        with capture(model, "./y") as seen:
            barrier.wait()
            model(X + k)
        found[k] = seen["./y"]

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[k], X + k + 2) for k in range(3))
    with capture(model, "./y") as seen:
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
    assert "./y" not in seen


def test_a_thread_beside_does_not_hide_the_last_variable():
    def forward(self, x, beside=False):
        y = x + 1
        z = self.store["k"]
        if beside:
            thread = threading.Thread(target=self, args=(x,))
            thread.start()
            thread.join()
        return z

    model = module_of(forward, store={"k": torch.ones(4)})
    with capture(model, "./z") as seen:
        model(X, beside=True)
    assert torch.equal(seen["./z"], torch.ones(4))


def test_a_call_in_another_thread_is_not_looked_into_and_does_not_count():
    def forward(self, x):
        y = x + 2
        z = y * 2
        return z

    model, one = module_of(forward), torch.ones(1)

    async def in_a_task(x):
        await asyncio.to_thread(model, x)

    def in_a_thread(x):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()

    with capture(model, ".:in[0]", "./y") as seen, edit(model, {"./z": scale(1.0)}) as edits:
        model(one)
        in_a_thread(one * 10)
        model(one * 100)
    assert seen.calls("./y") == [3, 102] and seen["./y@1"] == 102
    for report in (seen.report(), edits.report()):
        assert "what ran in other threads was not looked into" in str(report)
    with capture(model, "./y") as seen:
        asyncio.run(in_a_task(one))  # it has our context
    assert seen["./y"] == 3
    with capture(model, "./y") as seen:
        model(one)
    assert not any("threads" in note for note in seen.report().notes)
