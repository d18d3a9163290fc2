"""The function mode: edits of variables that it refuses, as something may have used the value already."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import EditError, edit
from tenterhook.changes import add, scale, zero
from tests.inside.models import Number, X, all_of, module_of


def test_where_something_has_used_a_variable_the_error_says_where_to_edit_it():
    def forward(self, x):
        pair = {"first": x}
        one = pair["first"]
        kept = [one]
        two = one * 2
        return two + kept[0]

    model = module_of(forward)
    what = r"one cannot be edited: it is no operation's own result there \(one = pair\[.first.\]"
    with pytest.raises(EditError, match=what), edit(model, {"./one": zero()}):
        model(X)


@pytest.mark.parametrize(
    ("lines", "can_be"),
    [
        (["if self.training:", "    y = d['a']", "else:", "    y = d['b']", "z = x * 2", "return y + z"], True),
        (["if self.training:", "    y = d['a']", "z = x * 2", "return y + z"], True),
        (["y = d['a']", "if d is None: kept = [y]", "z = x * 2", "return y + z"], False),
        (["y = d['a']", "for i in (1, 2):", "    z = x * 2", "return y + z"], True),
        (["y = d['a']", "for i in range(2):", "    z = x * 2", "return y + z"], False),
        (["y = d['a']", "for i in range(2):", "    kept = y", "    z = x * 2", "return y + z"], False),
        (["for i in range(2):", "    y = d['a']", "    z = x * 2", "return y + z"], True),
        (["try:", "    y = d['a']", "    z = x * 2", "finally:", "    x = x", "return y + z"], True),
        (["y = w = d['a']", "z = x * 2", "return y + z"], False),
        (["z = (y := d['a']) + x", "return y + z"], False),
        (["y = d['a']", "use = lambda: y", "z = x * 2", "return y + z"], False),
    ],
    ids=[
        "both branches",
        "one branch",
        "used in one",
        "before a loop",
        "behind a call",
        "used in a loop",
        "in a loop",
        "try",
        "two names",
        "walrus",
        "closure",
    ],
)
def test_whether_nothing_has_used_a_variable_is_read_from_all_ways_to_a_place(lines, can_be):
    known = {}
    start = ["d = {'a': self.a, 'b': self.a}", "y = x + 0"] if "if" in lines[0] else ["d = {'a': self.a}"]
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in [*start, *lines]), known)
    model = module_of(known["forward"], a=torch.full((1,), 5.0))
    number = "#1" if "if" in lines[0] else ""
    plain, how = model(torch.ones(1)), contextlib.nullcontext() if can_be else pytest.raises(EditError)
    with how, edit(model, {f"./y{number}": add(100.0)}):
        assert model(torch.ones(1)) == plain + 100
    assert model(torch.ones(1)) == plain


def test_a_sum_in_an_exception_handler():
    def function(x):
        try:
            raise ValueError
        except ValueError:
            v = sum([x * 2, x + 1])
        return v

    found = all_of(function, X, selector="*")
    assert torch.equal(found["v"], X * 2 + (X + 1)) and "v#0" not in found
    with pytest.raises(EditError, match="edit it where it is made"), edit(function, {"v": scale(10.0)}):
        function(X)


def test_a_sum_that_is_no_operation_is_told_from_one_that_is():
    class Summed(nn.Module):
        def forward(self, x):
            y = Number() + x
            y = y + 5
            return y

    model = Summed()
    with edit(model, {"./y#1": scale(2.0)}):
        torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 16.0))
    with pytest.raises(EditError, match=r"y = Number\(\) \+ x"), edit(model, {"./y#0": scale(2.0)}):
        model(torch.ones(2))


@contextlib.contextmanager
def refused_or(check):
    """Either the edit is refused, or its result is right."""
    try:
        yield
    except EditError as error:
        assert "edit it where it is made" in str(error)
    else:
        check()


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
    body = ["residual = x", *lines]
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in body), known)
    model = module_of(known["forward"])
    model.fc = nn.Linear(1, 1)
    nn.init.ones_(model.fc.weight)
    x = torch.ones(1, requires_grad=True)
    with refused_or(lambda: x.grad.eq(3).all() or pytest.fail(str(x.grad))), edit(model, {address: lambda v: v * 2}):
        model(x * 1).sum().backward()
    torch.set_grad_enabled(True)
    if lines[0] in ("h = self.fc(x)", "h = loud(x)"):
        assert x.grad == 3  # not refused


def test_only_the_calls_that_were_asked_for_are_refused():
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


def test_a_function_that_looks_at_its_own_variables_has_used_them():
    def forward(self, x):
        r = x
        k = locals()
        h = x * 1
        return k["r"] + r

    model = module_of(forward)
    with contextlib.suppress(EditError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with edit(model, {"./r": scale(10.0)}):
            assert model(torch.ones(1)) == 2
