"""Models that several tests of verbs use."""

import dataclasses
from collections import namedtuple

import torch
from torch import nn

X = torch.randn(3, 4)


class Net(nn.Module):
    """A residual net whose output is easy to write down again with an edit in it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, after_a=lambda v: v, into_b=lambda v: v, after_drop=lambda v: v):
        h = after_a(self.a(x))
        r = h + self.b(into_b(h)).tanh()
        return self.c(self.act(after_drop(self.drop(r)))) + h.sum(-1, keepdim=True)


def raises(value):
    raise ValueError("boom")


class Gate(torch.autograd.Function):
    """Hands a value on, and changes its gradient: what an edit of a gradient is, written into the source."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    extra: dict


class Shapes(nn.Module):
    """Returns every kind of structure."""

    def forward(self, x, kind="tensor", *, scale=1.0, mask=None):
        y = x * scale
        return {
            "tensor": y,
            "tuple": (y, (y + 1, None)),
            "list": [y, y + 1],
            "dict": {"a": y, "b": y + 1},
            "named": Pair(y, y + 1),
            "data": Out(y, {"b": y + 1}),
            "none": None,
            "text": "no tensor",
        }[kind]


class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Shapes()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
