"""Calls of a module whose methods are called back or from outside."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit
from tenterhook.changes import add, scale
from tests.inside.models import Around, X


@pytest.mark.parametrize(("method", "address"), [("encode", "b/encode/a"), ("probed", "b/probed/probabilities")])
def test_a_method_that_is_called_from_outside_is_the_same_at_every_call(method, address):
    model, x = Around(method), torch.ones(1)
    with capture(model, address) as seen:
        for _ in range(3):
            model(x)
    assert [[v.item() for v in seen.calls(f"{address}@{k}")] for k in range(3)] == [[2, 4]] * 3
    with edit(model, {f"{address}#1": 100.0}):
        assert model(x).item() == model(x).item() == 100


class Calling(nn.Module):
    def pre(self, x):
        p = x * 2
        return p

    def forward(self, x, back=None):
        y = x + 1
        return y if back is None else back(y)


class CalledBack(nn.Module):
    """Its block calls its norm, twice in a call."""

    def __init__(self, kind=None):
        super().__init__()
        self.block, self.kind = Calling(), kind

    def norm(self, t):
        n = t * t
        return n

    def forward(self, x):
        for _ in range(2):
            if self.kind is None:
                x = self.block(x, self.norm)
            else:
                x = checkpoint(self.block, x, self.norm, use_reentrant=self.kind)
        z = x * 2
        return z


@pytest.mark.parametrize("kind", [None, True, False])
@pytest.mark.parametrize("asked", [["./z"], ["./z", "./norm/n"], ["./**"], ["**/**"]])
def test_a_method_that_a_submodule_calls_back_is_part_of_the_call_that_runs(kind, asked):
    model, inputs = CalledBack(kind), [torch.tensor([k], requires_grad=True) for k in (1.0, 2.0, 3.0)]
    with capture(model, *asked) as seen:
        outputs = [model(x).item() for x in inputs]
    assert [seen[f"./z@{k}"].item() for k in range(3)] == outputs
    if len(asked) > 1 or "**" in asked[0]:
        assert [v.item() for v in seen.calls("./norm/n@1")] == [9, 100]
    with edit(model, {"./norm/n#1@1": scale(10.0), "./z": add(0.0)}):
        sum(model(x) for x in inputs).backward()
    grads = [8 * (x.item() + 1) * ((x.item() + 1) ** 2 + 1) for x in inputs]
    assert [x.grad.item() for x in inputs] == [grads[0], 10 * grads[1], grads[2]]


class FromOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Calling()

    def forward(self, x):
        return self.block(self.block.pre(x))


@pytest.mark.parametrize("asked", [["block/y"], ["block/y", "block/pre/p"], ["block/**", "block"], ["block/pre/p"]])
def test_a_method_that_is_called_from_outside_is_no_call_of_the_module(asked):
    model, inputs = FromOutside(), [torch.tensor([k]) for k in (1.0, 2.0, 3.0)]
    with capture(model, *asked) as seen:
        outputs = [model(x) for x in inputs]
    if asked != ["block/pre/p"]:
        assert [seen[f"block/y@{k}"] for k in range(3)] == outputs
    if asked != ["block/y"]:
        assert [seen[f"block/pre/p@{k}"] for k in range(3)] == [2 * x for x in inputs]
    with edit(model, {one + "@1": scale(100.0) for one in asked if "*" not in one and "/" in one}):
        changed = [model(x) for x in inputs]
    assert [a == b for a, b in zip(outputs, changed, strict=True)] == [True, "**" in asked[0], True]


class _Body(nn.Module):
    def features(self, x):
        y = x * 2
        w = y
        return w


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = _Body(), nn.Linear(4, 4)

    def encode(self, x):
        h = self.body.features(x)
        return h

    def forward(self, x):
        return self.last(self.encode(x))


class _Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = _Encoder(), nn.Linear(4, 2)

    def forward(self, x):
        z = self.enc.encode(x)
        return self.head(self.enc(z))


@pytest.mark.parametrize(
    "asked", [("enc/**",), ("enc/encode/h",), ("enc/**", "head"), ("enc/encode/*", "./z"), ("**/**",)]
)
def test_a_method_called_from_outside_is_seen_where_another_module_does_its_operations(asked):
    model = _Asking()
    with capture(model, *asked) as seen:
        model(X)
    first, second = seen.calls("enc/encode/h")
    assert torch.equal(first, X * 2) and torch.equal(second, X * 4)


def test_each_call_of_a_method_from_outside_counts():
    def kept(value):
        return value

    class Model(nn.Module):
        def inner(self, x):
            h = kept(x)
            return h * 2

        def helper(self, x, more):
            x = x * 1
            return self.inner(x) if more else x

        def forward(self, x):
            return self.helper(x, True)

    model = Model()
    for number, expected in ((1, [1]), (2, []), (3, [1])):
        with warnings.catch_warnings(), capture(model, f"./helper/inner/h@{number}") as seen:
            warnings.simplefilter("ignore")
            for more in (False, True, False, True, False):
                model.helper(torch.ones(1), more)
        assert [float(value) for one in seen for value in seen.calls(one)] == expected
