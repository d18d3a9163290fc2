# ruff: noqa: F841
"""Variables of helpers, methods, decorators and parents' forwards have addresses of their own."""

import functools

import pytest
import torch
from torch import nn

from tenterhook import capture, edit, sites
from tenterhook.changes import zero
from tests.inside.models import Loop, X, doubled, five, module_of, names, used, values_of


class Recursive(nn.Module):
    def forward(self, x, depth=2):
        y = x + depth
        return self(y, depth - 1) if depth else y


class Child(Recursive):
    def forward(self, x):
        before = x * 2
        return super().forward(before, 0)


def test_modules_that_call_themselves_their_parents_class_or_a_forward_by_name():
    with capture(Recursive(), "./y") as seen:
        seen._session.model()(X)
    assert [torch.allclose(y, X + k) for y, k in zip(seen.calls("./y"), (2, 3, 3), strict=True)] == [True] * 3
    assert names(Child(), X) == ["./before", "./y"]

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Loop()

        def embed(self, x):
            table = x * 4
            return table

        def forward(self, x):
            return self.child.forward(x, 1)

    assert names(Direct(), X, selector="**/**") == ["child/x"]
    model = Direct()
    with capture(model, "./embed/table") as seen:
        model.embed(X)
    assert torch.equal(seen["./embed/table"], X * 4)


def test_a_parents_forward_and_what_is_returned_at_once():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            hh = self.fc(x)
            return hh

    class Heir(Parent):
        def forward(self, x):
            return super().forward(x) * 2

    model = Heir()
    with capture(model, "./hh") as seen:
        model(X)
    assert torch.equal(seen["./hh"], model.fc(X))

    def function(x):
        y = five(x)
        return y

    with capture(function, "y") as seen:
        function(X).add_(1)
        function(X)
    assert [torch.equal(value, X * 5) for value in seen.calls("y")] == [True, True]


def test_what_another_function_assigns_is_not_this_ones():
    def put(self, value):
        self.h = value * 0.5

    def forward(self, x):
        self.h = x * 2
        self.put(x)
        y = x + 1
        self.h = y * 3
        for _ in range(1):
            y = y + self.h
        return y

    model = type("Model", (nn.Module,), {"forward": forward, "put": put})()
    for _ in range(2):
        assert values_of(model, "./self.h", torch.ones(1)) == [2, 6]
        assert values_of(model, "./put/self.h", torch.ones(1)) == [0.5]

    def enclosing(self, x):
        total = x

        def add(value):
            nonlocal total
            total = total + value
            return total * 2

        y = add(x)
        total = total + 100
        return total + y

    for name, truth in (("total", [1, 102]), ("add/total", [2])):
        model = module_of(enclosing)
        for address in (f"./{name}", "./**"):
            with capture(model, address) as seen:
                model(torch.ones(1))
            assert [float(value) for value in seen.calls(f"./{name}")] == truth


def test_what_a_decorator_computes_goes_by_its_own_name():
    def scaled(function):
        @functools.wraps(function)
        def wrapper(self, *args):
            x = args[0] * 2
            return function(self, x)

        return wrapper

    @scaled
    def forward(self, x):
        y = x + 1
        x = y * 10
        x = x + 100
        return x

    model = module_of(forward)
    for address in ("./x", "./**"):
        with capture(model, address) as seen:
            model(torch.ones(1))
        assert [float(value) for value in seen.calls("./x")] == [30, 130]
    assert values_of(model, "./wrapper/x", torch.ones(1)) == [2]
    assert [site for site in map(str, sites(model, torch.ones(1))) if site.startswith("./x")] == ["./x#0", "./x#1"]


def times(k):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, x):
            x = x * k
            return function(self, x)

        return wrapper

    return decorate


def test_the_same_decorator_twice():
    class Twice(nn.Module):
        @times(2)
        @times(3)
        def forward(self, x):
            x = x + 1
            return x * 1

    model, x = Twice(), torch.ones(1)
    for asked in (["./x"], ["./x", "./wrapper/x"], ["./*"], ["./x", "./wrapper/wrapper/x"], ["./**"]):
        with capture(model, *asked) as seen:
            model(x)
        assert seen["./x"] == 7
    assert seen["./wrapper/x"] == 2 and seen["./wrapper/wrapper/x"] == 6
    for also in ({}, {"./wrapper/x": lambda v: v}):
        with edit(model, {"./x#0": 100.0, **also}):
            assert model(x) == 100


@pytest.mark.parametrize("how", ["attribute", "nonlocal"])
@pytest.mark.parametrize("by", ["operation", "module", "helper"])
def test_what_another_function_assigns_is_not_taken_for_a_branch_that_did_not_run(how, by):
    give = {"operation": "{} * 3", "module": "self.triple({})", "helper": "self.times({})"}[by]
    h, bump = ("self.h", "self.bump()") if how == "attribute" else ("a", "bump()")
    lines = [f"{h} = x + 1", bump, f"if self.training: {h} = x", f"y = {h} * 2", f"{h} = y"]
    if how == "nonlocal":
        lines = ["def bump():", "    nonlocal a", f"    a = {give.format('a')}", *lines]
    known = {}
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in [*lines, "return y + 1"]), known)
    exec(f"def bump(self):\n    self.h = {give.format('self.h')}", known)

    class Triple(nn.Module):
        def forward(self, x):
            return x * 3

    class Bumps(nn.Module):
        forward, bump = known["forward"], known["bump"]

        def __init__(self):
            super().__init__()
            self.triple = Triple()

        def times(self, x):
            return x * 3

    address = "./self.h" if how == "attribute" else "./a"
    model = Bumps().eval()
    with capture(model, address) as seen:
        model(torch.ones(1))
    assert seen.calls(address) == [2, 12]


def run_twice(x):
    y = used(x)
    y = used(y)
    w = x * 1
    return y + w


@pytest.mark.parametrize("address", ["./run_twice/y", "./method/y", "./outer/run_twice/y"])
def test_variables_before_the_first_operation_of_the_function_itself(address):
    def outer(x):
        z = run_twice(x)
        return z

    class Model(nn.Module):
        def method(self, x):
            y = used(x)
            y = used(y)
            w = x * 1
            return y + w

        def forward(self, x):
            y = used(x)  # its operations are known by now, and of no interest
            by = {"method": self.method, "outer": outer, "run_twice": run_twice}
            return by[address.replace("./", "").split("/")[0]](x)

    model, one = Model(), torch.ones(1)
    for asked in (address, "**/**"):
        with capture(model, asked) as seen:
            assert model(one) == model(one) == 5
        for call in (0, 1):
            assert seen.calls(f"{address}@{call}") == [2, 4]
    with edit(model, {f"{address}#0": zero()}):
        assert model(one) == 1 + used(torch.zeros(1))


def test_a_helper_without_an_operation_of_its_own():
    class Model(nn.Module):
        def encode(self, x):
            h = used(x)
            k = used(h)
            return self.mix(h, k)

        def mix(self, a, b):
            return a + b

        def forward(self, x):
            return self.encode(x) + 1

    model, one = Model(), torch.ones(1)
    for name, truth in (("h", [2]), ("k", [4])):
        assert values_of(model, f"./encode/{name}", one) == truth
        assert f"./encode/{name}" in names(model, one)


class Adds:
    def helper(self, v):
        return v.add(1)


class Doubles:
    def helper(self, v):
        a = doubled(v)
        a = doubled(a)
        w = v.add(1)
        return a.mul(2) + 0 * w


def test_two_helpers_of_one_name():
    class Both(nn.Module):
        def forward(self, x):
            for one in (Adds(), Doubles()):
                x = one.helper(x)
            return x

    model, x = Both(), torch.ones(2)
    with edit(model, {"./helper/a#1": 100.0}):
        assert model(x).tolist() == model(x).tolist() == [200, 200]


def leaf(v):
    return v.abs()


def outer(v):
    a = leaf(v)
    a = leaf(a)
    return a.sum()


def test_a_helper_that_runs_in_a_later_call_only():
    class Later(nn.Module):
        def forward(self, x, more):
            y = x + 1
            return outer(y) if more else y

    model, x = Later(), torch.zeros(1)
    with capture(model, "./**") as seen:
        model(x, False)
        model(x, True)
    assert [address for address in seen if "/outer/a" in address] == ["./outer/a#0@1", "./outer/a#1@1"]
