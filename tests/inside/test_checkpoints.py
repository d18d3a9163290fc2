"""Values, numbers, gradients and edits inside checkpointed code."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit
from tests.hooks.models import BOTH
from tests.inside.models import Around, Checkpointed, X


@BOTH
def test_a_checkpoint_is_captured_once_and_its_gradients_are_right(reentrant):
    model, plain = Checkpointed(reentrant), Checkpointed(None)
    wanted = ("./segment/y", "./segment/z", "./segment/w")
    found = []
    for one in (model, plain):
        with capture(one, *wanted, grad=True) as seen:
            for _ in range(2):
                one(X.clone().requires_grad_()).sum().backward()
        found.append([seen.calls(address) for name in wanted for address in (name, f"grad({name})")])
    for ours, theirs in zip(*found, strict=True):
        assert len(ours) == len(theirs) == 2
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@BOTH
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("where", ["y", "z", "w", "tanh", "grad(y)", "grad(w)"])
def test_edits_are_made_again_in_the_recomputation_also_when_the_session_is_over(reentrant, inside, where):
    results = []
    for model in (Checkpointed(reentrant), Checkpointed(None)):
        x = X.clone().requires_grad_()
        address = where.replace("(", "(./segment/") if "(" in where else f"./segment/{where}"
        must_be_inside = "(" in where or model.reentrant is None
        with edit(model, {address: lambda v: v * 2 + 0.1}) as edits:
            out = model(x).sum()
            if inside or must_be_inside:
                out.backward()
        if not (inside or must_be_inside):
            out.backward()
        assert edits.report().silent == []
        results.append((out.detach(), x.grad, model.fc.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def part(t):
    q = t * 2
    q = q.sin()
    return q.tanh()


class Twice(nn.Module):
    """The same function in two checkpoints of one forward, and once outside."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def own(self, t):
        q = t.cos()
        return q * t

    def run(self, function, t):
        return function(t) if self.reentrant is None else checkpoint(function, t, use_reentrant=self.reentrant)

    def forward(self, x):
        x = part(x)
        x = self.run(part, x)
        x = self.run(self.own, x)
        x = self.run(part, x)
        x = self.run(self.own, x)
        return x.sum()


@BOTH
@pytest.mark.parametrize("where", ["run/part/q#0", "run/part/q#3", "run/own/q#0", "run/own/q#1", "part/q#1"])
def test_numbers_in_a_recomputation_are_those_of_the_first_time(reentrant, where):
    model, plain = Twice(reentrant), Twice(None)
    address, x = f"./{where}", X.clone().requires_grad_()

    def gradient(model, edits, late=False):
        with edit(model, edits):
            loss = model(x)
            if not late:
                return torch.autograd.grad(loss, x)[0] if not reentrant else backward(loss)
        return backward(loss)

    def backward(loss):  # a reentrant checkpoint does not work with autograd.grad
        x.grad = None
        loss.backward()
        return x.grad

    found = []
    for one in (model, plain):
        with capture(one, address, grad=True) as seen:
            backward(one(x))
        found.append((seen[address], seen[f"grad({address})"]))
    torch.testing.assert_close(*found)
    for change in ({address: lambda v: v * 3 + 1}, {f"grad({address})": lambda g: g * 5}):
        truth = gradient(plain, change)
        torch.testing.assert_close(gradient(model, change), truth)
        if address in change:
            torch.testing.assert_close(gradient(model, change, late=True), truth)


def test_nested_checkpoints_are_captured_once():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            h = self.fc(x)
            h = h.tanh()
            r = h
            return (r + x).sin()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.i, self.j = Inner(), Inner()

        def two(self, x):
            t = checkpoint(self.i, x, use_reentrant=False)
            u = self.j(t)
            u = u * t
            return u

        def forward(self, x):
            w = checkpoint(self.two, x * 2, use_reentrant=False)
            return w.sum()

    model = Outer()
    with capture(model, "i/h", "i/r", "grad(i/h#1)") as seen:
        model(torch.tensor([0.1, 0.2], requires_grad=True)).backward()
    assert [len(seen.calls(address)) for address in ("i/h#0", "i/h#1", "i/r", "grad(i/h#1)")] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [None, True, False])
def test_a_checkpoint_that_runs_again_has_the_same_numbers_and_is_no_call(kind):
    model = Around(kind=kind)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        with edit(model, {"b/a#1": lambda v: v * v}), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x).sum().backward()
        torch.testing.assert_close(x.grad, 4 * (4 * x.detach()) ** 3 * 4)
    with capture(model, "b/a", grad=True) as seen:
        for k in (1.0, 2.0, 3.0):
            model(torch.tensor([k], requires_grad=True)).sum().backward()
    for k in range(3):
        x = k + 1.0
        assert [v.item() for v in seen.calls(f"b/a@{k}")] == [2 * x, 4 * x]
        assert [v.item() for v in seen.calls(f"grad(b/a@{k})")] == [16 * x, 8 * x]
    with edit(model, {"b/w@2": 100.0}), capture(model, "b") as seen:
        for k in (1.0, 2.0, 3.0):
            model(torch.tensor([k], requires_grad=True)).sum().backward()
    assert [v.item() for v in seen.calls("b")] == [16, 64, 144 * 97]
