"""Edits under checkpoints within checkpoints, and backwards within changes."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit
from tenterhook.changes import scale
from tests.verbs.checkpointed import Takes, X, same


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch says so of the inner one
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_within_a_checkpoint(outer, inner, inside):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())

    def part(x):
        return model[3](model[2](model[1](model[0](x))))

    def whole(x, kind=None):
        half = part if kind is None else lambda x: checkpoint(part, x, use_reentrant=kind)
        return half(half(x) * 2).sin() + half(x)

    def go(function):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"0@1": scale(3.0), "2": lambda v, site: v * (site.address.call + 1)}):
            loss = function(x).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    truth = go(whole)
    same(go(lambda x: checkpoint(whole, x, inner, use_reentrant=outer)), truth)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch says so of the inner one
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradients_within_a_checkpoint_within_a_checkpoint(outer, inner):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def whole(x, kind=None):
        half = model if kind is None else lambda x: checkpoint(model, x, use_reentrant=kind)
        return half(half(x) * 2).sin()

    def go(function):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"grad(0@0)": scale(3.0)}), capture(model, "0", "grad(0)") as seen:
            function(x).sum().backward()
        return seen, x.grad, model[0].weight.grad

    truth = go(whole)
    mine = go(lambda x: checkpoint(whole, x, inner, use_reentrant=outer))
    torch.testing.assert_close(mine[1:], truth[1:])
    for address in ("0", "grad(0)"):
        torch.testing.assert_close(mine[0].calls(address), truth[0].calls(address))


class Wrapped(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kinds", [*itertools.product([None, True, False], repeat=3)])
@pytest.mark.parametrize("inside", [True, False])
def test_three_checkpoints_within_each_other(kinds, inside):
    def go(kinds):
        torch.manual_seed(0)
        layer, rest = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nested = nn.Sequential(Wrapped(Wrapped(layer, kinds[2]), kinds[1]), rest)
        model = Wrapped(nested, kinds[0])
        x = X.clone().requires_grad_()
        with edit(model, {"inner.0.inner.inner": lambda v: v * 2, "inner.1.0:in": scale(3.0)}):
            loss = model(x).pow(2).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    same(go(kinds), go((None,) * 3))


def test_a_backward_inside_a_change_runs_a_checkpoint_again_with_its_edits():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Takes()

        def forward(self, x):
            y = checkpoint(self.inner, x, use_reentrant=False)
            loss = y.pow(2).sum()
            return loss

    model, found = Outer(), []

    def look(v):
        found.append(torch.autograd.grad(v, model.inner.fc.weight, retain_graph=True)[0])
        return v

    for site in (".", "./loss"):
        with edit(model, {"inner/h": scale(3.0), site: look}):
            model(X)
    torch.testing.assert_close(*found)
