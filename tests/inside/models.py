# ruff: noqa: F841
"""Models, helpers that they call, and ways to run them: shared by the tests of what is inside a forward."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenterhook import capture

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def names(model, *inputs, selector="./**"):
    with capture(model, selector) as seen:
        model(*inputs)
    return list(seen)


def helper(t):
    q = t * 5
    return q + 1


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@decorated
def dressed(t):
    inner = t - 1
    return inner


class Residual(nn.Module):
    """With a log of its own: the truth."""

    def __init__(self):
        super().__init__()
        self.fc, self.log = nn.Linear(4, 4), {}

    def helped(self, h):
        scaled = h * 0.5
        self.log["helped/scaled"] = scaled
        return scaled

    def forward(self, x):
        y = x + 2
        self.log["y"] = y
        h = self.fc(y)
        self.log["h"] = h
        h = F.gelu(h)
        self.log["h#1"] = h
        s = self.helped(h)
        self.log["s"] = s
        a, b = s.chunk(2, -1)
        self.log["a"], self.log["b"] = a, b
        z = (a * b).cumsum(-1)
        self.log["mul"] = None
        self.log["z"] = z
        kept = z
        self.log["kept"] = kept
        z = z.sin().add_(1)
        self.log["z#1"] = z
        z[:, 0] = 0
        self.log["z#2"] = z.clone()
        out = torch.cat([y, z], -1)
        self.log["out"] = out
        return out.tanh()


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = x + 2
        h = self.fc(y)
        h = h.relu()
        p, q = h.split(2, -1)
        q = q * p.cos()
        acc = torch.zeros_like(p)
        acc += q
        acc.mul_(2)
        acc[:, 0] = 0
        acc.add_(p)
        side = acc * 3
        return side.sigmoid()


class Loop(nn.Module):
    def forward(self, x, times=3):
        for _ in range(times):
            x = x * 2
        return x


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.store = {"k": torch.ones(4)}

    def pair(self, x):
        first, second = x + 1, x + 2
        return first, second

    def forward(self, x):
        residual = x
        one, two = self.pair(x)
        fetched = self.store["k"]
        x = helper(x)
        x = helper(x)
        one.add_(100)
        return one + two + fetched + x + residual


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.reentrant = nn.Linear(4, 4), reentrant

    def segment(self, x):
        y = x.sin()
        z = self.fc(y)
        w = z * y
        return w.tanh()

    def forward(self, x):
        if self.reentrant is None:
            return self.segment(x)
        return checkpoint(self.segment, x, use_reentrant=self.reentrant)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def forward(self, x):
        h = self.layers(x)
        h = h[:, :4] + F.dropout(x, 0.3)
        h[:, 0] = h[:, 1]
        return {"loss": (h * torch.randn_like(h)).sum()}


def five(t):
    q = t * 5
    return q


def module_of(forward, **attributes):
    """A module with a forward, and something on it."""
    model = nn.Module()
    for name, value in attributes.items():
        setattr(model, name, value)
    cls = type("Model", (nn.Module,), {"forward": forward})
    model.__class__ = cls
    return model


def all_of(model, *inputs, selector="./**"):
    """Every value, by address."""
    with capture(model, selector) as seen:
        model(*inputs)
    return {address.removeprefix("./"): seen[address] for address in seen}


class Number:
    """An object of Python's, to which arithmetic with a tensor is code like any other."""

    def __add__(self, other):
        return other * 3

    def __radd__(self, other):
        made = other * 2
        made + 1
        return made

    def __neg__(self):
        return torch.full((4,), 7.0)

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def values_of(model, address, *inputs):
    with capture(model, address) as seen:
        model(*inputs)
    return [float(value) for value in seen.calls(address)]


def used(v):
    r = v * 2
    s = r + 1
    return r


def doubled(v):
    r = v * 2
    s = r + 1
    assert s is not r
    return r


class Rebinding(nn.Module):
    def forward(self, x):
        a = doubled(x)
        a = doubled(a)
        w = x + 1
        return a * a * (w - x)

    def encode(self, x):
        a = doubled(x)
        a = doubled(a)
        w = x + 1
        return a * (w - x)

    def probed(self, x):
        probabilities = doubled(x)
        probabilities = doubled(probabilities)
        w = x + 1
        return probabilities * (w - x)


class Around(nn.Module):
    def __init__(self, method="__call__", kind=None):
        super().__init__()
        self.b, self.method, self.kind = Rebinding(), method, kind

    def forward(self, x):
        run = getattr(self.b, self.method)
        return run(x) if self.kind is None else checkpoint(run, x, use_reentrant=self.kind)


def told_of(model, address, *inputs):
    """What comes to an address in the second of two sessions, each value by its full address."""
    for _ in range(2):
        with capture(model, address) as seen:
            model(*inputs)
    return {str(one): float(value.sum()) for one in seen for value in seen.calls(one)}
