# ruff: noqa: F841
"""The function mode pauses where nobody wants anything of many operations in a row."""

import contextlib
import gc
import signal
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import scale
from tenterhook.inside import pause
from tenterhook.inside.engine import Inside
from tenterhook.inside.pause import Pause
from tests.inside.models import module_of, values_of


def looped(self, x):
    for _ in range(100):
        x = x + 1
        x = x * 1
    y = x.relu()
    for _ in range(100):
        x = x + 1
    return x + y


def unlooped(self, x):
    for _ in range(30):
        x = x + 1
    y = x + 1
    for _ in range(30):
        x = x + 1
    return x + y


@pytest.fixture
def pauses(monkeypatch):
    """How the mode paused: the numbers of the first lines, and of those before which each ended."""
    found = []
    begin, end = Pause.begin, Pause.end
    monkeypatch.setattr(pause, "_WORTH_IT", 0.0)
    monkeypatch.setattr(Pause, "begin", lambda self: found.append([self.frame.f_lineno]) or begin(self))
    monkeypatch.setattr(Pause, "end", lambda self: found[-1].append(self.frame.f_lineno) or end(self))
    return found


@pytest.mark.parametrize("forward", [looped, unlooped])
def test_the_mode_pauses_and_nothing_is_missed(pauses, forward):
    model, x = module_of(forward), torch.zeros(1, requires_grad=True)
    first = forward.__code__.co_firstlineno
    for _ in range(3):
        with capture(model, "./y", "grad(./y)") as seen:
            model(x).backward()
            assert sys.gettrace() is None
        assert seen["./y"] == (100 if forward is looped else 31) and seen["grad(./y)"] == 1
    at_y = first + (4 if forward is looped else 3)
    assert [at_y] in [one[1:] for one in pauses]
    assert len([one for one in pauses if len(one) == 2]) == len(pauses) >= 4


def test_a_change_after_a_pause_is_made(pauses):
    model = module_of(looped)
    for _ in range(2):
        with edit(model, {"./y": scale(2.0)}):
            assert model(torch.zeros(1)) == 400
    assert pauses


def test_a_pause_ends_with_whatever_leaves_the_loop(pauses):
    def forward(self, x, how):
        for k in range(100):
            x = x + 1
            if k == 50 and how == "return":
                return x
            if k == 50 and how == "raise":
                raise ValueError
            if k == 50 and how == "divide":
                1 / 0  # no function is called for it
            if k == 50 and how == "break":
                break
        y = x + 1
        return y

    model, x = module_of(forward), torch.zeros(1)
    with capture(model, "./y") as seen:
        model(x, "")
        for how in ("return", "raise", "divide", "break"):
            with contextlib.suppress(ValueError, ZeroDivisionError):
                model(x, how)
            assert sys.gettrace() is None
            assert [type(mode) for mode in torch.overrides._get_current_function_mode_stack()] == [Inside]
        model(x, "")
    assert torch.overrides._get_current_function_mode_stack() == []
    assert [float(value) for value in seen.calls("./y")] == [101, 52, 101]
    assert len(pauses) >= 5


def test_no_pause_where_an_exception_may_be_caught(pauses):
    """A signal's exception in the tracer itself would end the tracing, and nobody would switch the mode on again."""

    class Timeout(Exception):
        pass

    def handler(*args):
        raise Timeout

    class Waiting(nn.Module):
        def forward(self, x):
            start = x
            try:
                while True:
                    x = x + 1
            except self.timeout:
                y = start * 2
            return y

    model = Waiting()
    model.timeout = Timeout
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert values_of(model, "./y", torch.ones(1)) == [2]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not pauses


def test_a_pause_that_an_exception_in_the_tracer_ends_is_over_with_the_next_call(pauses, monkeypatch):
    first = Pause._at_first

    def interrupted(self, frame, event, argument):
        first(self, frame, event, argument)
        raise KeyboardInterrupt

    model = module_of(looped)
    with capture(model, "./y") as seen:
        model(torch.zeros(1))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Pause, "_at_first", interrupted)
            model(torch.zeros(1))
        assert torch.overrides._get_current_function_mode_stack() == [] and sys.gettrace() is None
        model(torch.ones(1))
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch.overrides._get_current_function_mode_stack() == []
    assert [float(value) for value in seen.calls("./y")] == [100, 101]


def test_the_frame_of_a_pause_goes_when_it_ends(pauses):
    def forward(self, x, fails):
        big = x * 2
        self.big = weakref.ref(big)
        y = x * 3
        for _ in range(60):
            x = x + 1
        if fails:
            raise ValueError
        return x

    model = module_of(forward)
    with capture(model, "./y"):
        model(torch.zeros(1), False)
        assert model.big() is None
        with contextlib.suppress(ValueError):
            model(torch.zeros(1), True)
        assert model.big() is None
    assert len(pauses) == 2


def test_operations_that_a_loop_runs_by_itself_are_seen_after_a_long_one(pauses):
    def forward(self, x):
        later = map(torch.relu, [x, x])
        for _ in range(60):
            x = x + 1
        for h in later:
            x = x + h
        return x

    model = module_of(forward)
    for _ in range(2):
        with capture(model, "./relu") as seen:
            model(torch.ones(1))
        assert len(list(seen)) == 2


def positive(value):
    return value.relu()


def test_a_function_that_is_called_ends_a_pause_before_its_first_operation(pauses):
    class Inner(nn.Module):
        def forward(self, x):
            y = x * 2
            return y

    def forward(self, x):
        for k in range(100):
            x = x + 1
            if k % 40 == 39:
                x = self.inner(x) - positive(x)
        y = x + 1
        return y

    model = module_of(forward)
    model.inner = Inner()
    for _ in range(2):
        with capture(model, "./y", "inner/y") as seen:
            model(torch.zeros(1))
        assert seen["./y"] == 101
        assert [float(value) for value in seen.calls("inner/y")] == [80, 160]
    assert len(pauses) >= 4


def test_no_pause_where_somebody_else_traces(pauses):
    told = []

    def tracer(frame, event, argument):
        told.append(event)
        return tracer

    model = module_of(unlooped)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert values_of(model, "./y", torch.zeros(1)) == [31]
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert told and not pauses


def test_a_tracer_that_begins_during_a_pause_stays(pauses):
    def tracer(frame, event, argument):
        return tracer

    def forward(self, x):
        for k in range(60):
            x = x + 1
            if k == 30:
                _ = self.trace(self.tracer)  # as another thread might have it
        y = x + 1
        return y

    model = module_of(forward)
    model.trace, model.tracer = sys.settrace, tracer
    before = sys.gettrace()
    try:
        assert values_of(model, "./y", torch.zeros(1)) == [61]
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert pauses


def test_no_pause_in_code_that_shares_its_variables(pauses):
    """A tracer writes variables back, maybe over what another thread has assigned meanwhile."""

    def closes(self, x):
        count = 0

        def more():
            nonlocal count
            count += 1

        more()
        for _ in range(60):
            x = x + count
        y = x + 1
        return y

    def looks(self, x):
        for _ in range(60):
            x = x + 1
        y = x + 1
        assert "y" in locals()
        return y

    for forward in (closes, looks):
        assert values_of(module_of(forward), "./y", torch.zeros(1)) == [61]
    assert not pauses


def test_no_pause_under_another_mode(pauses):
    model = module_of(looped)
    with torch.device("cpu"):
        assert values_of(model, "./y", torch.zeros(1)) == [100]
    pauses.clear()
    stack = torch.overrides._get_current_function_mode_stack
    with capture(model, "./y") as seen, torch.device("cpu"):
        model(torch.zeros(1))
        assert [type(mode).__name__ for mode in stack()] == ["Inside", "DeviceContext"]
    assert seen["./y"] == 100
    assert stack() == [] and not pauses


def test_a_mode_that_begins_in_the_forward_is_where_it_would_be(pauses):
    seen_by = []

    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen_by.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def forward(self, x):
        for _ in range(60):
            x = x + 1
        self.other.__enter__()
        for _ in range(60):
            x = x + 1
        y = x.relu()
        self.other.__exit__(None, None, None)
        return y

    model = module_of(forward)
    model.other = Other()
    assert values_of(model, "./y", torch.zeros(1)) == [120]
    assert len(pauses) == 1 and seen_by == ["add"] * 60 + ["relu"]


def test_nothing_lives_longer_for_a_pause(pauses):
    def forward(self, x):
        big = x * 2
        self.big = weakref.ref(big)
        for _ in range(60):
            x = x + 1
        is_kept = self.big() is not None
        del big
        y = x + 1
        torch.relu(x)
        self.alive = is_kept, self.big() is not None
        return y

    model = module_of(forward)
    values_of(model, "./y", torch.zeros(1))
    assert pauses and model.alive == (True, False)
    gone = weakref.ref(model)
    pauses.clear()
    del model
    gc.collect()
    assert gone() is None


def test_sessions_in_one_another_do_not_pause(pauses):
    model = module_of(looped)
    with capture(model, "./y") as outer, capture(model, "./y") as inner:
        model(torch.zeros(1))
    assert outer["./y"] == inner["./y"] == 100
    assert not pauses


def test_pauses_in_threads_are_apart(pauses):
    def run(start):
        model = module_of(looped)
        got = []
        for k in range(20):
            got += values_of(model, "./y", torch.full((1,), float(start + k)))
        results[start] = got

    results = {}
    threads = [threading.Thread(target=run, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {start: [start + k + 100.0 for k in range(20)] for start in (0, 1000, 2000, 3000)}
    assert pauses


def test_short_pauses_become_rare(pauses, monkeypatch):
    monkeypatch.setattr(pause, "_WORTH_IT", 1.0)

    def forward(self, x):
        for _ in range(200):
            for _ in range(20):
                x = x + 1
            positive(x)
        y = x + 1
        return y

    assert values_of(module_of(forward), "./y", torch.zeros(1)) == [4001]
    assert 1 <= len(pauses) < 20


def test_a_statement_over_several_lines_is_seen_after_a_pause(pauses):
    # fmt: off
    def forward(self, x):
        for _ in range(60):
            x = x + 1
        y = (
            x
            +
            1
        )
        for _ in range(60):
            x = x + 1
        z, y = (
            x,
            y
            * 2,
        )
        return y
    # fmt: on

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            model(torch.zeros(1))
        assert [float(seen[address]) for address in seen] == [61, 122]
    assert pauses
