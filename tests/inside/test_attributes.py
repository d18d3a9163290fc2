"""Attributes that a forward assigns: `./self.h` and its like."""

import pytest
import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import zero
from tests.inside.models import module_of, values_of


class Slotted:
    __slots__ = ("value",)


def test_slots_setters_stars_and_attributes_that_are_added_to():
    def slotted(self, x):
        held = Slotted()
        held.value = x
        y = held.value + 1
        held.value = y * 10
        return held.value

    def added(self, x):
        self.h = x * 2
        self.h += 1
        self.h = self.h * 10
        return self.h

    def starred(self, x, *rest):
        y = x + 1
        rest = rest[0] if rest else y
        rest = rest * 10
        return rest

    one = torch.ones(1)
    assert values_of(module_of(slotted), "./held.value", one) == [1, 20]
    assert values_of(module_of(added), "./self.h", one) == [2, 3, 30]
    assert values_of(module_of(starred), "./rest", one) == [2, 20]
    assert values_of(module_of(starred), "./rest", one, one * 5) == [5, 50]

    def set_h(self, value):
        doubled = value * 2
        self._h = doubled

    def setting(self, x):
        self.h = x
        y = self.h + 1
        self.h = y * 10
        return self.h

    model = type("Model", (nn.Module,), {"forward": setting, "h": property(lambda self: self._h, set_h)})()
    assert values_of(model, "./set_h/doubled", one) == [2, 60]
    with edit(model, {"./set_h/doubled#0": zero()}):
        assert model(one) == 20


def test_attributes_have_the_same_numbers_however_they_are_asked_for():
    class Kept(nn.Module):
        def forward(self, x, mask=None):
            self.h = x
            for _ in range(2):
                self.h = self.h * 2
            if mask is not None:
                x = x * mask
            self.h = self.h + x
            return self.h

    for address in ("./self.h", "./*", "./**"):
        model = Kept()
        for _ in range(2):  # the second time it has one before
            with capture(model, address) as seen:
                model(torch.ones(1))
            assert seen.calls("./self.h") == [1, 2, 4, 5]


class Attribute(nn.Module):
    """Its helper assigns what its forward does, in a loop."""

    def helper(self, x):
        self.h = x.tanh()
        return self.h + 1

    def forward(self, x):
        self.h = x.relu()
        for i in range(2):
            x = self.helper(x)
            y = x * 2
            self.h = y.exp() if i else y * 3
            x = self.h + 1
        return y


class ThroughModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.h = nn.Identity(), None

    def inner(self, x):
        a = self.fc(x + 1)
        self.h = self.fc(a)
        return a

    def forward(self, x):
        b = self.inner(x)
        for _ in range(2):
            self.h = x.tanh()
        return b


class NoOperation(nn.Module):
    """A function of Python's gives its helper's, and a `with` is in its forward."""

    def __init__(self):
        super().__init__()
        self.h = None

    def helper(self, x):
        self.h = sum([x.exp() for _ in range(2)])

    def forward(self, x):
        f = x * 2
        with torch.enable_grad():
            b = f.exp()
        self.helper(b)
        self.h = f + f
        return self.h


@pytest.mark.parametrize(
    ("kind", "asked", "calls"),
    [
        (Attribute, ["./self.h"], 3),
        (Attribute, ["./**"], 3),
        (Attribute, ["./self.h", "./helper/self.h"], 3),
        (ThroughModules, ["./self.h"], 2),
        (ThroughModules, ["./**"], 2),
        (NoOperation, ["./self.h"], 1),
        (NoOperation, ["./**"], 1),
    ],
)
def test_an_attribute_that_a_helper_assigns_is_the_helpers(kind, asked, calls):
    known = []
    for _ in range(2):  # the first time less is known of the code
        model = kind()
        with capture(model, *asked) as seen:
            model(torch.ones(1))
        known.append(list(seen))
        names = [name for name in seen if name.startswith("./self.h")]
        assert names == (["./self.h"] if calls == 1 else [f"./self.h#{k}" for k in range(calls)])
        assert torch.equal(seen[names[-1]], model.h)
    assert known[0] == known[1]
