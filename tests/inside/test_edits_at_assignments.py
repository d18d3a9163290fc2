"""Edits at an assignment are those that the source would make, whatever gives the value and whatever else has it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import edit
from tenterhook.changes import add, scale
from tests.inside.models import Number, X, all_of, module_of


def made_of(lines, **known):
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in lines), known)
    return known["forward"]


@pytest.mark.parametrize(
    ("lines", "edited"),
    [
        (["if self.training:", "    y = d['a']", "else:", "    y = d['b']", "z = x * 2", "return y + z"], 107),
        (["y = d['a']", "kept = [y]", "z = x * 2", "return y + z + kept[0]"], 212),
        (["y = d['a']", "for i in range(2):", "    kept = y", "    z = x * 2", "return y + z + kept"], 212),
        (["try:", "    y = d['a']", "    z = x * 2", "finally:", "    x = x", "return y + z"], 107),
        (["y = w = d['a']", "return y + w"], 110),
        (["w = y = d['a']", "return y + w"], 110),
        (["z = (y := d['a']) + x", "return y + z"], 211),
        (["y = d['a']", "use = lambda: y", "return use() + y"], 210),
        (["y, w = d['a'], d['b']", "return y + w"], 110),
        (["for y in [d['a']]:", "    return y * 2"], 210),
        (["y = d['a'] if x.sum() else x", "return y * 2"], 210),
        (["y = d['a'] and x * 3", "return y * 2"], 206),
        (["k = [y := d['a'], y]", "return sum(k)"], 210),
    ],
)
def test_an_edit_is_made_at_the_assignment(lines, edited):
    model = module_of(made_of(["d = {'a': self.a, 'b': self.a}", *lines]), a=torch.full((1,), 5.0))
    plain = model(torch.ones(1))
    with edit(model, {"./y": add(100.0)}):
        assert model(torch.ones(1)) == edited
    assert model(torch.ones(1)) == plain


def test_in_an_exception_handler():
    def function(x):
        try:
            raise ValueError
        except ValueError:
            v = sum([x * 2, x + 1])
        return v

    found = all_of(function, X, selector="*")
    assert torch.equal(found["v"], X * 2 + (X + 1)) and "v#0" not in found
    with edit(function, {"v": scale(10.0)}):
        torch.testing.assert_close(function(X), (X * 2 + (X + 1)) * 10)


def test_a_sum_that_is_no_operation():
    class Summed(nn.Module):
        def forward(self, x):
            y = Number() + x
            y = y + 5
            return y

    model = Summed()
    with edit(model, {"./y#1": scale(2.0)}):
        torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 16.0))
    with edit(model, {"./y#0": scale(2.0)}):
        torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 11.0))


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    "lines",
    [
        ["with torch.no_grad():", "    m = x.mean()", "return x * 1 + residual"],
        ["with torch.inference_mode():", "    m = x.mean()", "return x * 1 + residual"],
        ["with torch.autocast('cpu', torch.bfloat16):", "    m = x.mean()", "return x * 1 + residual"],
        ["h = checkpoint(self.fc, x, use_reentrant=True)", "return h + residual"],
        ["h = checkpoint(self.fc, x, use_reentrant=False)", "return h + residual"],
        ["h = Squares.apply(x)", "return h + residual"],
        ["h = silent(x)", "return x * 1 + residual"],
        ["torch.set_grad_enabled(False)", "m = x.mean()", "torch.set_grad_enabled(True)", "return x * 1 + residual"],
        ["h = self.fc(x)", "return h + residual"],
        ["h = loud(x)", "return h + residual"],
    ],
    ids=["no_grad", "inference", "autocast", "reentrant", "checkpoint", "function", "helper", "set", "module", "plain"],
)
@pytest.mark.parametrize("address", ["./residual", "grad(./residual)"])
def test_what_is_edited_is_computed_as_it_would_be_where_it_was_assigned(lines, address):
    @torch.no_grad()
    def silent(x):
        return x.mean()

    known = {"torch": torch, "checkpoint": checkpoint, "Squares": Squares, "silent": silent, "loud": lambda x: x * 1}
    model = module_of(made_of(["residual = x", *lines], **known))
    model.fc = nn.Linear(1, 1)
    nn.init.ones_(model.fc.weight)
    x = torch.ones(1, requires_grad=True)
    with edit(model, {address: lambda v: v * 2}):
        model(x * 1).sum().backward()
    assert x.grad == 3


def test_one_call_of_several():
    def forward(self, x, alias):
        if alias:
            y = x
            z = y * 1
        else:
            y = x * 3
            z = y * 1
        return z

    model = module_of(forward)
    with edit(model, {"./y@1": scale(100.0)}):
        assert model(torch.ones(1), True) == 1 and model(torch.ones(1), False) == 300


def test_in_a_function_that_looks_at_its_own_variables():
    def forward(self, x):
        r = x
        k = locals()
        told.append((sorted(k), sorted(vars()), dir()))
        return k["r"] + r

    told, model = [], module_of(forward)
    with edit(model, {"./r": scale(10.0)}):
        assert model(torch.ones(1)) == 20
    model(torch.ones(1))
    assert told[0] == told[1]
