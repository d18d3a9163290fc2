# ruff: noqa: F841
"""Which assignments count as values of a variable, and in what order."""

import pytest
import torch
from torch import nn

from tenterhook import capture, edit, sites
from tenterhook.changes import add, scale
from tests.inside.models import Number, module_of, told_of, values_of

GIVEN = [
    "number + x",
    "x + number",
    "-number",
    "number + x + 1",
    "number[2]",
    "x",
    "pair[0]",
    "self.p",
    "x + 2",
    "Held(x * 2).value",
    "x if flag else x + 1",
]
AROUND = [
    "{}",
    "if flag:\n    {}",
    "if not flag:\n    {}",
    "for _ in range(2):\n    {}",
    "try:\n    {}\nfinally:\n    pass",
]


class Held:
    def __init__(self, value):
        self.value = value


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.arange(4.0))
        self.h = torch.zeros(4)


def given(source):
    known = {"torch": torch, "number": Number(), "Held": Held, "told": []}
    exec(source, known)
    return type("Model", (Given,), {"forward": known["forward"]})(), known["told"]


@pytest.mark.parametrize("variable", ["y", "new", "self.h"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("value", GIVEN)
def test_an_assignment_counts_whatever_gives_the_value(value, around, variable):
    """`y` is an argument that is assigned anew, `new` is a variable, `self.h` was something before."""
    first, second = around.format(f"{variable} = {value}"), f"{variable} = x * 5"
    start = "def forward(self, x, y, pair, flag):\n"
    lines = [*first.splitlines(), "torch.relu(x)", second, "return x + 1"]
    tell = f"told.append({variable})"
    told_lines = [*around.format(f"{variable} = {value}; {tell}").splitlines(), second, tell, "return x + 1"]
    inputs = torch.ones(4), torch.ones(4) * 9, (torch.ones(4) * 4, torch.ones(4)), True
    twin, told = given(start + "\n".join("    " + line for line in told_lines))
    twin(*inputs)
    model, _ = given(start + "\n".join("    " + line for line in lines))
    for _ in range(2):
        with capture(model, f"./{variable}") as seen:
            model(*inputs)
        assert len(list(seen)) == len(told)
        for address, expected in zip(seen, told, strict=True):
            torch.testing.assert_close(seen[address], expected)


def test_a_variable_that_gets_the_same_tensor_again():
    def again(self, x):
        for by in (10, 100, 1000):
            h = x
            h = h * by
        return h

    def swapped(self, x):
        prev = x
        for _ in range(3):
            h = prev * 10
            prev, h = h, prev
        return h + prev

    def last(self, x):
        for is_last in (False, True):
            if is_last:
                h = x
                continue
            h = x * 2
        return h + 1

    def kept(self, x):
        self.h = x
        y = self.h * 2
        self.h = y
        z = y + 1
        self.h = x
        return z * self.h

    for forward, name, truth in (
        (again, "h", [1, 10, 1, 100, 1, 1000]),
        (swapped, "h", [10, 1, 100, 10, 1000, 100]),
        (last, "h", [2, 1]),
        (kept, "self.h", [1, 2, 1]),
    ):
        for _ in range(2):
            assert values_of(module_of(forward), f"./{name}", torch.ones(1)) == truth
    model = module_of(again)
    with edit(model, {"./h#5": scale(0.0)}):
        assert model(torch.ones(1)) == 0


@pytest.mark.parametrize("between", ["y = None", "y = 3", "del y", "y = w.sum().item()"])
def test_the_same_tensor_after_something_else_is_another_assignment(between):
    known = {}
    lines = ["y = x + 1", "z = y", "w = z * 1", between, "w = w + 1", "y = z", "w = w + 1", "y = y * 2", "return w + y"]
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in lines), known)
    model = module_of(known["forward"])
    assert values_of(model, "./y", torch.ones(1)) == [2, 2, 4]
    plain = model(torch.ones(1))
    with edit(model, {"./y#1": add(100.0)}):
        assert model(torch.ones(1)) == plain + 200


def test_all_names_of_a_chained_assignment_count_each_time():
    def forward(self, x):
        c = x * 7
        b = c = x
        h = x.abs()
        c = c + b
        d = e = f = x + 1
        return c + d + e + f

    model, one = module_of(forward), torch.ones(1)
    for _ in range(3):
        assert values_of(model, "./c", one) == [7, 1, 2]
        assert values_of(model, "./e", one) == values_of(model, "./f", one) == [2]
    with edit(model, {"./f": scale(10.0)}):  # it alone
        assert model(one) == 2 + 2 + 2 + 20
    with edit(model, {"./d": scale(10.0)}):
        assert model(one) == 2 + 20 + 2 + 2


def test_what_goes_to_one_name_may_be_assigned_to_another():
    class Inner(nn.Module):
        def forward(self, x):
            self.h = x * 2
            return x + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            self.new = x * 2
            x.sum()
            self.old = self.new
            x.sum()
            self.old = self.old + 100
            y = self.inner(x)
            self.h = self.inner.h
            x.sum()
            self.h = self.h + 10
            return self.old + self.h

    def enclosing(self, x):
        peek = lambda: y.sum()  # noqa: E731
        y = x + 1
        self.state = x * 3
        y = self.state
        x.sum()
        y = y + 100
        return y + peek()

    one, model, other = torch.ones(1), Model(), module_of(enclosing)
    for _ in range(2):
        assert values_of(model, "./self.old", one) == [2, 102]
        assert values_of(model, "./self.h", one) == [2, 12]
        assert values_of(other, "./y", one) == [2, 3, 103]
    with edit(model, {"./self.old#1": scale(2.0)}):
        assert model(one) == 204 + 12
    with edit(other, {"./y#2": scale(2.0)}):
        assert other(one) == 206 + 206
    with edit(model, {"./self.old#0": scale(2.0)}):
        assert model(one) == 104 + 12


def test_a_loop_gives_a_variable_another_value_each_time():
    def kept(value):
        return value

    def forward(self, x):
        for k in range(6):
            x = x + 1
            x = x * 1
            if k % 2:
                y = kept(x)  # no operation makes it
            x = x + 1
        return x + y

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            model(torch.zeros(1))
        assert [float(seen[address]) for address in seen] == [3, 7, 11]


def test_a_list_that_a_loop_fills_is_seen_with_its_first_tensor():
    def forward(self, x):
        outs, named = [], {}
        for k in range(3):
            s = x * k
            outs.append(s)
            named[k] = s
        return torch.stack(outs) + named[0]

    model = module_of(forward)
    for _ in range(2):
        with capture(model, "./outs") as seen:
            model(torch.ones(1))
        assert len(seen["./outs"]) == 1
        with capture(model, "./named") as seen:
            model(torch.ones(1))
        assert list(seen["./named"]) == [0]


def test_a_variable_that_gets_tensors_that_are_there_already():
    def forward(self, x):
        a, b = x * 2, x * 3
        y = x
        self.same(a)
        y = b
        self.same(a)
        y = a
        self.same(b)
        return y

    model = module_of(forward)
    model.same = nn.Identity()
    assert list(told_of(model, "./y", torch.ones(1)).values()) == [1, 3, 2]


def fill(found, x):
    w = x + 1
    for _ in range(3):
        found.append(w)
        w = w * 0.5


def test_containers_are_seen_with_their_first_tensor_whatever_was_asked_before():
    class Named(nn.Module):
        def forward(self, x):
            out = {}
            h = x * 2
            out["first"] = h
            h = h + 1
            return h.norm()

    class Listed(nn.Module):
        def forward(self, x):
            found = []
            z = x * 2
            found.append(z)
            k = x
            found.append(k * 1)
            return found[0] + k

    class Filled(nn.Module):
        def forward(self, x):
            found = []
            fill(found, x)
            found.append(x)
            return found[0] + found[-1]

    x = torch.ones(1)
    for kind, asked, size in ((Named, "./out", 1), (Listed, "./found", 1), (Filled, "./found", 4)):
        for addresses in ([asked], [asked, "./k"], ["./*"], ["./**"], [asked]):
            model = kind()
            if "./k" in addresses and kind is not Listed:
                continue
            for _ in range(2):
                with capture(model, *addresses) as seen:
                    model(x)
                assert len(seen[asked]) == size
        assert [str(site) for site in sites(kind(), x)] == [str(site) for site in sites(kind(), x)]
