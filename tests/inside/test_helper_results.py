# ruff: noqa: F841
"""What a helper returned and a variable took: seen and edited in the variable of the caller."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit
from tenterhook.changes import scale, zero
from tests.inside.models import X, module_of


def tripled(t):
    return t.sin() * 3


def stored(t):
    out = t.cos()
    return out


def in_turn(t):
    return tripled(t)


def either(t):
    if t.dim() == 1:
        return t
    if t.numel() > 1e9:
        out = t + 1
        out = out.sin()
    else:
        out = t * 2
    return out


def both_of(t):
    first = t.exp()
    return first.tanh(), t - 1


def wearing(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@wearing
def worn(t):
    return t + 7


@functools.lru_cache
def remembered(t):
    return t + 9


def chosen(t):
    if t.dim() == 2:
        half = t / 2
        out = half * 4
    else:
        out = t + 1
    return out


def within(t):
    with contextlib.nullcontext():
        out = t.sigmoid()
    return out


def out_of(t):
    with contextlib.nullcontext(), contextlib.nullcontext():
        return t.atan()


class Helped(nn.Module):
    """Each helper's result is used twice; `change` says by what one of them is multiplied, as if written there."""

    def __init__(self, reentrant=None, name="", by=1.0):
        super().__init__()
        self.fc, self.reentrant, self.name, self.by = nn.Linear(4, 4), reentrant, name, by

    def change(self, name, value):
        return value * self.by if name == self.name else value

    def through(self, t):
        return self.fc(t)

    @staticmethod
    def static(t):
        return t.mul(4)

    def inner(self, x):
        a = self.change("a", tripled(x))
        b = self.change("b", stored(a))
        c = self.change("c", in_turn(b))
        d = self.change("d", either(c))
        both = both_of(d)
        e, f = self.change("e", both[0]), self.change("f", both[1])
        g = self.change("g", worn(e))
        h = self.change("h", self.through(g))
        i = self.change("i", self.static(h))
        j = self.change("j", chosen(i))
        k = self.change("k", within(j))
        m = self.change("m", out_of(k))
        return a + b * c + d * e + f * g + h * i + j * k + m * m

    def forward(self, x):
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


class HelpedPlainly(Helped):
    """The same without a place for a change."""

    def inner(self, x):
        a = tripled(x)
        b = stored(a)
        c = in_turn(b)
        d = either(c)
        e, f = both_of(d)
        g = worn(e)
        h = self.through(g)
        i = self.static(h)
        j = chosen(i)
        k = within(j)
        m = out_of(k)
        return a + b * c + d * e + f * g + h * i + j * k + m * m


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("name", "abcdefghijkm")
def test_what_a_helper_returns_can_be_changed(reentrant, name):
    model, twin = HelpedPlainly(reentrant), Helped(None, name, by=3.0)
    twin.load_state_dict(model.state_dict())
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    for late in (False, True):
        x.grad = y.grad = None
        with edit(model, {f"./inner/{name}": scale(3.0)}) as edits:
            out = model(x)
            None if late else out.sum().backward()
        out.sum().backward() if late else None
        truth = twin(y)
        truth.sum().backward()
        assert torch.equal(out, truth)
        torch.testing.assert_close(x.grad, y.grad)
        assert [row[1] for row in edits.report()] == ["1×"]
    with capture(model, f"./inner/{name}", grad=True) as seen:
        model(x).sum().backward()
    with capture(twin, f"./inner/{name}", grad=True) as own:
        twin.by = 1.0
        twin(y).sum().backward()
    for address in (f"./inner/{name}", f"grad(./inner/{name})"):
        torch.testing.assert_close(seen[address], own[address])


def test_what_a_helper_keeps_or_has_used_is_not_changed_behind_its_back():
    def used(t):
        out = t.exp()
        return out + 1, out

    def forward(self, x):
        a, b = used(x)
        same = x + 0
        c = remembered(x)
        same = x + 0
        (d,) = map(tripled, [x])
        same = x + 0
        e = functools.partial(tripled)(x)
        return a + b + c + d + e

    model = module_of(forward)
    truth = model(X)
    values = {"b": X.exp(), "c": remembered(X), "d": tripled(X), "e": tripled(X)}
    for name, value in values.items():  # the caller's variable only
        with edit(model, {f"./{name}": zero()}):
            torch.testing.assert_close(model(X), truth - value)
    remembered.cache_clear()
    with edit(model, {"./c": zero()}):
        model(X)
    assert torch.equal(model(X), truth)  # what was remembered is what was made
    with edit(model, {"./a": zero()}):
        torch.testing.assert_close(model(X), truth - (X.exp() + 1))
