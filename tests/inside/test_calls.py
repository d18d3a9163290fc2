"""Numbers and calls: `#` counts assignments within a call, `@` counts calls."""

import asyncio
import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import AddressError, AmbiguousError, EditError, NotSeenError, capture, edit
from tenterhook.changes import scale, zero
from tests.inside.models import Loop, X, module_of


def test_numbers_count_assignments_and_calls_count_calls():
    model = nn.Sequential(Loop(), Loop())
    with capture(model, "0/x", "grad(0/x#-1)") as seen:
        model(X.clone().requires_grad_()).sum().backward()
        model[0](X, times=1)
    with pytest.raises(AmbiguousError, match="0/x means 4 values:\n  0/x#0@0  3×4 float32\n  0/x#1  "):
        seen["0/x"]
    for k in range(3):
        assert torch.equal(seen[f"0/x#{k}@0"], X * 2 ** (k + 1))
    assert torch.equal(seen["0/x#-1@0"], X * 8) and torch.equal(seen["0/x#2"], X * 8)
    assert [value.tolist() for value in seen.calls("0/x")] == [(X * f).tolist() for f in (2, 4, 8, 2)]
    assert torch.equal(seen["grad(0/x#2)"], torch.full((3, 4), 8.0))
    with edit(model, {"1/x#1": zero()}):
        assert model(X).count_nonzero() == 0
    with edit(model, {"0/x@1": zero()}):
        assert model(X).count_nonzero() == 12
        assert model(X).count_nonzero() == 0
    with pytest.raises(AddressError, match="an edit counts from 0"):
        edit(model, {"1/x#-1": zero()})
    with capture(model, "0/x#7") as seen:
        model(X)
    with pytest.raises(NotSeenError, match="not assigned 8 times within one call"):
        seen["0/x#7"]


def test_a_count_starts_again_with_every_call_also_after_an_exception():
    class Fragile(nn.Module):
        def forward(self, x, fail=False):
            for _ in range(2):
                x = x + 1
                if fail:
                    raise ValueError
            return x

    model = Fragile()
    with capture(model, "./x") as seen:
        for fail in (True, False, True, False):
            with contextlib.suppress(ValueError):
                model(X, fail)
    assert len(seen.calls("./x#0")) == 4 and len(seen.calls("./x#1")) == 2


def test_a_shared_module_has_its_own_names():
    shared = Loop()
    model = nn.Sequential(shared, shared)
    with capture(model, "0/x#0") as seen:
        model(X)
    assert len(seen.calls("0/x#0")) == 2 and torch.equal(seen["0/x#0@1"], X * 16)


def test_numbers_from_the_end_mean_the_last_alone():
    with capture(Loop(), "./x#-1") as seen:
        seen._session.model()(X)
    assert list(seen) == ["./x#2"] and len(seen) == 1 and list(seen.patch()) == ["./x#2"]
    model = Loop()
    with capture(model, "./x#-9") as seen:
        model(X)
    with pytest.raises(NotSeenError, match="not assigned 9 times"):
        seen["./x#-9"]


def test_values_come_in_the_order_of_the_calls_that_made_them():
    class Product(nn.Module):
        def forward(self, x):
            h = x[0] * 1
            for v in x[1:]:
                h = h * v
            return h

    model, short, long = Product(), torch.tensor([2.0], requires_grad=True), torch.tensor([3.0, 5, 7])
    with capture(model, "./h", "grad(./h)") as seen:
        (model(short) + model(long.requires_grad_()) + model(short)).backward()
    assert seen.calls("./h") == [2, 3, 15, 105, 2]
    assert seen.calls("grad(./h)") == [1, 35, 7, 1, 1]
    assert seen["./h#2@1"] == 105 and seen.calls("./h@1") == [3, 15, 105] and seen.calls("./h@2") == [2]
    with edit(model, {"./h#1@1": torch.tensor(100.0)}) as edits:  # of the second call, the first with an #1
        assert [model(short), model(long)] == [2, 700]
    assert not edits.report().silent


def test_a_call_in_which_no_operation_ran_counts():
    class Maybe(nn.Module):
        def forward(self, x, run):
            if run:
                x = x + 1
            return x

    model, x = Maybe(), torch.ones(1)
    with capture(model, "./x") as seen:
        for run in (False, True, False, True):
            model(x, run)
    assert seen["./x@1"] == 2 and seen["./x@3"] == 2
    with capture(model, "./x") as seen:
        model.forward(x, True)  # nobody says when it is called by its name
        model.forward(x, True)
    assert seen["./x@0"] == 2 and seen["./x@1"] == 2


def test_a_call_that_is_not_there_is_told_of_as_it_is():
    def forward(self, x):
        y = x * 2
        return y

    model = module_of(forward)
    with pytest.raises(EditError, match="it came, but not in the call that was asked for"):
        with edit(model, {"./y@5": zero()}):
            model(X)


class InTurn(nn.Module):
    """Its block's y is no operation's own, so it is seen late: before something else happens to it."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def norm(self, x):
        m = x * 3
        _ = m + 1
        return m

    def block(self, x):
        y = self.run(self.norm, x)
        return y

    def forward(self, x):
        h = self.run(self.block, x)
        g = h.clone()
        h.detach().mul_(10)
        k = self.run(self.block, g + 1)
        return k + g


@pytest.mark.parametrize("run", [lambda function, x: function(x), functools.partial(checkpoint, use_reentrant=False)])
@pytest.mark.parametrize(
    "asked", [["./**/block/y"], ["./**/block/y", "./h"], ["./**/block/y", "./k"], ["./**/block/*"], ["./**"]]
)
def test_what_is_seen_late_is_numbered_in_the_order_of_the_calls(run, asked):
    model, x = InTurn(run), torch.ones(1, requires_grad=True)
    with capture(model, *asked, *(f"grad({one})" for one in asked)) as seen:
        model(x).backward()
    values = [(one[-2:], seen[one].item()) for one in seen if "/y#" in one and "grad" not in one]
    grads = {one[-3:-1]: seen[one].item() for one in seen if "/y#" in one and "grad" in one}
    # y0 = 3 x, y1 = 3 (y0 + 1), and the output is y1 + y0.
    assert values == [("#0", 3), ("#1", 12)] and grads == {"#0": 4, "#1": 1}


class Awaited(nn.Module):
    async def forward(self, x):
        y = x * 2
        await asyncio.sleep(0)
        z = y + 1
        return z


class Yielding(nn.Module):
    def forward(self, x):
        y = x * 2
        yield y
        z = y + 1
        yield z


def awaited(model, inputs):
    async def run():
        return await asyncio.gather(*map(model, inputs))

    return [out.item() for out in asyncio.run(run())]


def last_first(model, inputs):
    runs = [model(x) for x in inputs]
    return [list(run)[-1].item() for run in reversed(runs)][::-1]


@pytest.mark.parametrize(("model", "run"), [(Awaited(), awaited), (Yielding(), last_first)])
@pytest.mark.parametrize("asked", [["./y", "./z"], ["./**"]])
def test_a_forward_that_runs_after_its_call_is_that_call(model, run, asked):
    inputs = [torch.tensor([k]) for k in (1.0, 2.0, 3.0)]
    with capture(model, *asked) as seen:
        assert run(model, inputs) == [3, 5, 7]
    step = 1 if run is awaited else -1  # a generator's call counts when it begins
    assert [seen[f"./y@{k}"] for k in range(3)] == [2, 4, 6][::step]
    assert [seen[f"./z@{k}"] for k in range(3)] == [3, 5, 7][::step]
    with edit(model, {"./y@1": scale(10.0)}):
        assert run(model, inputs) == [3, 41, 7]


def test_the_same_code_that_runs_within_itself_is_looked_at_apart():
    def kept(value):
        return value

    class Twice(nn.Module):
        def forward(self, x, depth=2):
            for _ in range(3):
                x = x + 1
            y = kept(x)
            for _ in range(3):
                x = x + 1
            if depth:
                x = x + self.forward(x * 10, depth - 1)
            for _ in range(3):
                x = x + y
            return x

    told = []

    def truth(x, depth=2):
        y = x + 3
        told.append((depth, y))
        x = x + 6
        if depth:
            x = x + truth(x * 10, depth - 1)
        return x + 3 * y

    truth(0.0)
    model = Twice()
    for _ in range(3):
        with capture(model, "./y") as seen:
            model(torch.zeros(1))
        values = [float(value) for address in seen for value in seen.calls(address)]
        assert sorted(values) == sorted(y for _, y in told)
