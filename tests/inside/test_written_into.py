# ruff: noqa: F841
"""A value is seen as it was assigned, before anybody writes into it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit, sites
from tenterhook.changes import scale
from tests.inside.models import Late, X, helper, module_of, values_of


def test_what_a_helper_returned_and_other_names_are_seen_before_anybody_writes_into_them():
    model, x = Late(), X.clone().requires_grad_()
    with capture(model, "./residual", "./one", "./two", "./fetched", "./x", grad=True) as seen:
        model(x).sum().backward()
    assert torch.equal(seen["./residual"], X) and torch.equal(seen["./fetched"], torch.ones(4))
    assert torch.equal(seen["./one#0"], X + 1) and torch.equal(seen["./one#1"], X + 1 + 100)
    assert torch.equal(seen["./two"], X + 2)
    assert torch.equal(seen["./x#-1"], (X * 5 + 1) * 5 + 1)
    assert torch.equal(seen["grad(./two)"], torch.ones(3, 4))
    assert torch.equal(seen["grad(./residual)"], torch.full((3, 4), 28.0))  # of all its uses


def test_a_helper_that_writes_into_what_it_was_given_does_not_change_what_was_seen():
    def write(t):
        t.zero_()
        return t

    class Model(nn.Module):
        def forward(self, x):
            got = helper(x)
            return write(got)

    with capture(Model(), "./got") as seen:
        seen._session.model()(X)
    assert torch.equal(seen.calls("./got")[0], X * 5 + 1)


def test_an_argument_that_is_written_into_counts_from_the_first_write():
    def function(x):
        x.mul_(2)
        x.add_(1)
        return x * 2

    assert [str(site) for site in sites(function, torch.ones(2))] == ["x#0", "x#1", "mul"]
    with capture(function, "x") as seen:
        function(torch.ones(2))
    assert [value[0].item() for value in seen.calls("x")] == [2, 3]
    with edit(function, {"x#1": 10.0}):
        assert function(torch.ones(2))[0] == 20


def same(t):
    return t


def write(t):
    t.add_(1)


def test_a_forward_that_is_called_by_its_name_is_looked_after_too():
    def forward(self, x):
        y = x * 2
        r = same(y)
        write(y)
        write(y)
        q = same(y)
        with torch.no_grad():
            write(y)
        k = same(y.sum())
        return k

    model = module_of(forward)
    for run in (model, model.forward):
        x = torch.ones(2, requires_grad=True)
        with capture(model, "./r", "./q", "./k", "grad(./k)") as seen:
            out = run(x)
            out.backward()
            with torch.no_grad():
                out.add_(100)
        assert [seen[f"./{name}"].flatten()[0].item() for name in "rqk"] == [2, 4, 10]
        assert seen["grad(./k)"] == 1


def test_a_generator_is_looked_after_between_its_turns():
    def turns(x):
        for i in range(3):
            y = x * i
            k = same(y)
            yield k

    def forward(self, x):
        out = x * 1
        for v in turns(x):
            write(v)
            out = out + v
        return out

    model = module_of(forward)
    with capture(model, "./turns/k") as seen:
        model(torch.ones(2))
    assert [value[0].item() for value in seen.calls("./turns/k")] == [0, 1, 2]


def test_a_helper_that_begins_with_a_module():
    class Helped(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.act = act

        def helper(self, x):
            residual = x
            h = self.act(x)
            return h + residual

        def forward(self, x):
            return self.helper(x)

    one = torch.ones(1)
    model = Helped(nn.ReLU(inplace=True))
    with capture(model, "./helper/residual") as seen:
        model(-one.clone())
        model(-one.clone())
    assert seen.calls("./helper/residual") == [-1, -1]
    with edit(model := Helped(nn.Identity()), {"./helper/residual": scale(2.0)}):
        assert model(one) == 3


def test_what_is_written_in_place_after_a_loop_is_kept_as_it_was():
    def kept(value):
        return value

    def forward(self, x):
        for _ in range(5):
            x = x + 1
        y = kept(x)
        x.zero_()
        for _ in range(5):
            x = x + 1
        y.add_(7)
        return x + y

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            model(torch.zeros(1))
        assert [float(seen[address]) for address in seen] == [5, 7]


def test_what_a_generators_helper_writes_into_is_seen_before():
    def kept(value):
        return value

    def wipe(value):
        value.zero_()

    def parts(value, held):
        yield value * 1
        wipe(held[0])
        yield value * 2

    def forward(self, x):
        held = []
        more = parts(x, held)
        z = next(more)
        y = kept(z)
        held.append(y)
        return next(more) + y

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            assert model(torch.ones(1)) == 2
        assert seen["./y"] == 1


def test_an_attribute_that_a_callee_assigns_is_seen_before_it_is_written_into():
    class Inner(nn.Module):
        def forward(self, outer, x):
            x = x * 2
            outer.h = x
            x.add_(1)
            return x * 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            self.h = x * 3
            y = self.inner(self, x)
            self.h = y
            y.add_(5)
            return y * 1

    model = Model()
    for _ in range(3):
        with capture(model, "./self.h") as seen:
            model(torch.ones(1))
        assert [float(seen[address]) for address in seen] == [3, 3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_waits_for_a_checkpoint_is_seen_before_it_writes(reentrant):
    class Inner(nn.Module):
        def forward(self, x):
            y = x.detach().add_(1)
            return x * 2 + y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Inner()

        def forward(self, x):
            residual = x
            x = checkpoint(self.a, x, use_reentrant=reentrant)
            return x * 1

    model = Model()
    for address in ("**/residual", "./residual"):
        for _ in range(2):
            with capture(model, address, "a/y") as seen:
                model(torch.ones(1, requires_grad=True) * 1)
            assert seen["./residual"] == 1 and seen["a/y"] == 2


def test_what_waits_for_a_module_that_runs_no_python_is_seen_before():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(torch.jit.script(nn.ReLU(inplace=True)))

        def forward(self, x):
            residual = x
            x = self.inner(x)
            return residual + x

    for _ in range(2):
        assert values_of(Model(), "./residual", -torch.ones(1)) == [-1]


def test_a_forward_in_a_decorator_with_variables_of_the_same_name():
    def decorated(forward):
        def inner(self, *args):
            residual = args[0]
            out = forward(self, *args)
            return out + residual * 0

        return inner

    class Inner(nn.Module):
        def forward(self, x):
            return x.add_(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        @decorated
        def forward(self, x):
            residual = x
            z = self.inner(x)
            return z + residual * 0

    for _ in range(3):
        with capture(Model(), "./residual") as seen:
            seen._session.model()(torch.ones(1))
        assert [float(seen[one]) for one in seen][-1] == 1
