# ruff: noqa: F841
"""An edit inside a forward is the same edit written into its source; so is one of a gradient."""

import types

import pytest
import torch
from torch import nn

from tenterhook import EditError, capture, edit, observe
from tenterhook.changes import add, scale, zero
from tests.inside.models import Late, Residual, Steps, X, helper, module_of


def edited_in_source(where, change):
    """The forward of Steps with a change written into it."""

    def at(name, value):
        return change(value.clone()) if name == where else value

    def forward(self, x):
        y = at("y", x + 2)
        h = at("h#0", self.fc(y))
        h = at("h#1", h.relu())
        p, q = at("p", h[:, :2]), at("q", h[:, 2:])
        q = at("q#1", q * at("cos", p.cos()))
        acc = at("acc#0", torch.zeros_like(p))
        acc = at("acc#1", acc + q)
        acc = at("acc#2", acc * 2)
        acc = at("acc#3", acc * torch.tensor([0.0, 1.0]))
        acc = at("acc#4", acc + p)
        return at("sigmoid", at("side", acc * 3).sigmoid())

    return forward


PLACES = ["y", "h#0", "h#1", "p", "q#0", "q#1", "cos", "acc#0", "acc#1", "acc#2", "acc#3", "acc#4", "side", "sigmoid"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("change", [scale(0.5), lambda v: v.sin(), lambda v: v.mul_(3), add(1.0)])
def test_an_edit_is_the_same_edit_written_into_the_source(where, change):
    model, twin = Steps(), Steps()
    twin.forward = types.MethodType(edited_in_source("q" if where == "q#0" else where, change), twin)
    x, x2 = X.clone().requires_grad_(), X.clone().requires_grad_()
    with edit(model, {f"./{where}": change}) as edits:
        out = model(x)
        out.sum().backward()
    truth = twin(x2)
    truth.sum().backward()
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(model.fc.weight.grad, twin.fc.weight.grad)
    ((address, applied, *_),) = edits.report()
    assert (address, applied) == (f"./{where}", "1×")


@pytest.mark.parametrize("where", [place for place in PLACES if place != "acc#0"])
def test_a_gradient_edit_is_a_tensor_hook_in_the_source(where):
    def hooked(value):
        value = value * 1.0  # a tensor of its own, so that the hook changes the gradient at this place alone
        value.register_hook(lambda g: g * 3 + 1)
        return value

    model, twin = Steps(), Steps()
    twin.forward = types.MethodType(edited_in_source("q" if where == "q#0" else where, hooked), twin)
    x, x2 = X.clone().requires_grad_(), X.clone().requires_grad_()
    with edit(model, {f"grad(./{where})": lambda g: g * 3 + 1}):
        model(x).sum().backward()
    twin(x2).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(model.fc.weight.grad, twin.fc.weight.grad)


def test_a_gradient_edit_does_not_leak_to_the_tensor_that_an_operation_hands_on():
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            same = y.contiguous()
            return (same + 10 * y).sum()

    x = X.clone().requires_grad_()
    with edit(Model(), {"grad(./same)": zero()}) as edits:
        edits._model(x).backward()
    assert torch.equal(x.grad, torch.full((3, 4), 20.0))


def test_a_variable_that_no_operation_made_can_be_edited_before_anything_uses_it():
    def truth(x, change):
        residual = change("residual", x)
        one, two = x + 1, change("two", x + 2)
        fetched = change("fetched", torch.ones(4))
        return (one + 100) + two + fetched + helper(helper(x)) + residual

    for name in ("residual", "two", "fetched"):
        model, x, other = Late(), X.clone().requires_grad_(), X.clone().requires_grad_()
        with edit(model, {f"./{name}": scale(3.0)}) as edits:
            model(x).pow(2).sum().backward()
        out = truth(other, lambda which, v, name=name: v * 3 if which == name else v)
        out.pow(2).sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
        assert edits.report().silent == [] and torch.equal(model.store["k"], torch.ones(4))
        x.grad = other.grad = None
        if name != "fetched":
            with edit(model, {f"grad(./{name})": scale(3.0)}):
                model(x).pow(2).sum().backward()
            truth(other, lambda which, v, name=name: v * 3 - v.detach() * 2 if which == name else v).pow(
                2
            ).sum().backward()
            torch.testing.assert_close(x.grad, other.grad)
    with edit(Late(), {"./pair/second": zero()}) as edits:
        edits._model(X)
    assert edits.report().silent == []


def test_an_error_in_a_change_or_an_observer_carries_the_address():
    with (
        pytest.raises(ZeroDivisionError, match=r"in the change at \./h#1@0"),
        edit(Residual(), {"./h#1": lambda v: 1 / 0}) as e,
    ):
        e._model(X)
    with pytest.raises(EditError, match=r"the change at \./y@0 made 3×1 float32 of 3×4 float32"):
        with edit(Residual(), {"./y": lambda v: v[:, :1]}) as e:
            e._model(X)


def test_a_gradient_edit_at_a_variable_that_a_module_handed_on():
    def forward(self, x):
        y = x * 2
        h = self.dropout(y)
        return (h * 3 + y * 5).sum()

    model = module_of(forward, dropout=nn.Dropout(0.5)).eval()
    for address in ("grad(dropout)", "grad(./h)"):
        x = X.clone().requires_grad_()
        with edit(model, {address: scale(10.0)}):
            model(x).backward()
        assert torch.equal(x.grad, torch.full((3, 4), 70.0))


def test_what_a_change_or_an_observer_computes_is_not_looked_at():
    def forward(self, x, y):
        a = x
        b = y
        h = self.fc(x)
        return a + b

    model, one = module_of(forward), torch.ones(1)
    model.fc = nn.Identity()
    with edit(model, {"./a": lambda v: v * 2, "./b": lambda v: v * 2}):
        assert model(one, one * 5) == 12
    got = []
    with observe(model, {"./*": lambda v, site: got.append((str(site), float(v * 1)))}):
        model(one, one * 5)
    assert got == [("./a@0", 1), ("./b@0", 5), ("./h@0", 1), ("./add@0", 6)]
    with edit(model, {"./a#0": lambda v: v * 2 + 1}), edit(model, {"./a#0": lambda v: v * 3 - 1}):
        assert model(one, one * 5) == 13
    with edit(model, {"./a": lambda v: v * 2 + 1}), edit(model, {"./a": lambda v: v * 3 - 1}) as inner:
        with capture(model, "./a") as seen:
            assert model(one, one * 5) == 13
    assert seen.calls("./a") == [8] and [row[1] for row in inner.report()] == ["1×"]


def test_a_type_error_in_a_change_stays_one():
    def forward(self, x):
        r = x
        y = x * self.w
        return y + r

    def fails(v):
        raise TypeError("a mistake of mine")

    model = module_of(forward, w=torch.ones(1))
    for name in ("r", "y"):
        with pytest.raises(TypeError, match="a mistake of mine"), edit(model, {f"./{name}": fails}):
            model(torch.ones(1))


def test_a_session_that_a_change_opens_looks_inside_as_ever():
    def forward(self, x):
        h = x * 2
        return h + 1

    model, other, one = module_of(forward), module_of(forward), torch.ones(1)

    def zeroed(v):
        with edit(other, {"./h": zero()}):
            return other(v)

    with edit(model, {"./h": zeroed}):
        assert model(one) == 2

    def patched(v):
        with capture(model, "./h") as seen:
            model(one * 10)
        return seen["./h"]

    with edit(model, {"./h": patched}):
        assert model(one) == 21
