"""A model with checkpoints, edits of it, and how to compare a run of it with one of its twin without them."""

import pytest
import torch
from torch import nn

from tenterhook import edit
from tenterhook.changes import add, at, noise, ones, replace, reverse, scale, zero
from tests.hooks.models import Segments

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
X = torch.randn(3, 4)


class Net(Segments):
    """Three segments; `shared` runs in all of them, twice in each; `through` hands its input on."""

    def __init__(self, reentrant=None):
        super().__init__(reentrant)
        self.through = nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def segment(self, layer, x):
        h = self.shared(layer(x)).tanh()
        h = self.relu(self.shared(h)) * h
        return self.through(h).sin() * h


EDITS = {
    "output": {"layers.1": scale(2.0)},
    "function": {"layers.1": lambda v: v.mul_(2)},
    "input": {"shared:in": add(0.5)},
    "one call": {"shared@3": zero()},
    "by call": {"shared": lambda v, site: v * (1 + site.address.call)},
    "pass-through": {"through": scale(3.0)},
    "constant": {"layers.0": replace(torch.ones(3, 4))},
    "noise": {"layers.1": noise(0.5)},
    "own generator": {"layers.1": noise(0.5, seed=3)},
    "part": {"shared@1": at((..., 0), ones())},
    "several": {"layers.*": scale(0.5), "shared@2": add(1.0), "relu:in": lambda v: v + 1},
    "gradient": {"grad(shared)": scale(2.0)},
    "gradient of one call": {"grad(shared@4)": reverse()},
    "gradient of an input": {"grad(relu:in)": scale(0.5)},
    "gradient of a pass-through": {"grad(through)": zero()},
    "gradient and value": {"layers.1": scale(2.0), "grad(layers.1)": scale(3.0)},
    "parameter": {"shared.weight": scale(2.0)},
}


def run(model, edits, inside=True, backwards=1):
    torch.manual_seed(3)
    model.zero_grad()
    x = X.clone().requires_grad_()
    with edit(model, edits, strict=inside) as session:
        loss = model(x).pow(2).sum()
        if inside:
            for _ in range(backwards):
                loss.backward(retain_graph=backwards > 1)
    if not inside:
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)
    return loss.detach(), x.grad, [p.grad for p in model.parameters()], session


def pair(reentrant):
    plain, wrapped = Net(), Net(reentrant)
    wrapped.load_state_dict(plain.state_dict())
    return plain, wrapped


def same(a, b):
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1], b[1])
    for p, q in zip(a[2], b[2], strict=True):
        torch.testing.assert_close(p, q)


class Takes(nn.Module):
    """A variable takes what a module returns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return torch.tanh(h) * h
