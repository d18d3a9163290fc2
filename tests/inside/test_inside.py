# ruff: noqa: F841, RUF059
"""Values inside a forward: names, values, gradients and edits, against twins that are written out by hand."""

import asyncio
import contextlib
import functools
import gc
import math
import signal
import sys
import threading
import types
import warnings
import weakref
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tenterhook import (
    AddressError,
    AmbiguousError,
    EditError,
    NotSeenError,
    TenterhookWarning,
    capture,
    edit,
    observe,
    sites,
    sweep,
)
from tenterhook.changes import add, scale, zero
from tenterhook.inside import pause
from tenterhook.inside.engine import Inside
from tenterhook.inside.pause import Pause
from tests.hooks.test_checkpoint import BOTH

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def names(model, *inputs, selector="./**"):
    with capture(model, selector) as seen:
        model(*inputs)
    return list(seen)


# Names


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


class Constructs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.cache = nn.Linear(4, 4), {}
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        a = x + 1
        b = (x * 2).relu() + a
        a += b
        a.add_(1)
        F.relu(a, inplace=True)
        self.total.add_(1)
        c = d = x * 3
        u, (v, w) = x.chunk(2, -1)[0], x.split([1, 3], -1)
        (p, q), r = (x * 1, x * 2), x * 3
        e, f, g, h = x + 1, x * 2, x - 1, x / 2
        self.cache["k"] = x - 1
        self.last = x - 2
        many = [t * 2 for t in (x, x)]
        mapped = list(map(torch.neg, (x, x)))
        if (mean := x.mean()) > -1e9:
            x = x.abs()
        by_lambda = (lambda t: t * 9)(x)
        helped = helper(x)
        undressed = dressed(x)
        part = x[:, :2]
        chosen = x / 2 if x.sum() > -1e9 else x
        normed = F.layer_norm(
            x,
            (4,),
        )
        typed: torch.Tensor = x * 11
        for _ in range(2):
            x = x * 1.5
        one, two, three = x
        x[:, 0] = 0
        largest, index = x.max(-1)
        s = x.sigmoid()
        out = self.fc(s)
        weight = self.fc.weight.T
        return x.mean()


EXPECTED = """
a#0 mul#0 relu b a#1 a#2 a#3 self.total c d chunk v w u p q r e f g h sub self.last mul#1 mul#2 many neg#0 neg#1 mapped
mean#0 gt#0 x#0 lambda/mul by_lambda helper/q helper/add helped wrapper/dressed/inner undressed part sum gt#1 chosen
normed typed x#1 x#2 one two three x#3 largest index s out weight mean#1"""


def test_every_construct_has_its_name_on_every_python():
    model = Constructs()
    found = [address.removeprefix("./") for address in names(model, X.clone()) if not address.startswith("fc/")]
    assert found == EXPECTED.split()
    for _ in range(20):  # Python rewrites code that is warm
        again = [address.removeprefix("./") for address in names(model, X.clone()) if not address.startswith("fc/")]
        assert again == found


def test_the_names_inside_a_list_of_modules_are_the_modules_own():
    model = nn.Sequential(Constructs(), nn.Identity())
    model[0].forward = types.MethodType(lambda self, x: torch.relu(x), model[0])
    assert names(model, X, selector="**/**") == ["0/relu", "./input#0", "./input#1"]


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


def test_values_and_gradients_are_those_of_the_twin():
    torch.manual_seed(0)
    model, x = Residual(), X.clone().requires_grad_()
    wanted = ["y", "h#0", "h#1", "helped/scaled", "s", "a", "b", "mul", "z#0", "kept", "z#1", "z#2", "out"]
    with capture(model, *(f"./{name}" for name in wanted), grad=True) as seen:
        loss = model(x).square().sum()
        loss.backward()
    truth = dict(model.log, **{"h#0": model.log["h"], "z#0": model.log["z"]})
    truth["mul"] = truth["a"] * truth["b"]
    with torch.no_grad():
        for name in wanted:
            if name != "z#1":  # written into afterwards, so the log has lost it
                torch.testing.assert_close(seen[f"./{name}"], truth[name], rtol=0, atol=0)
    assert not torch.equal(seen["./z#1"], seen["./z#2"])
    loss = model(x).square().sum()
    log = model.log
    named = {"y": log["y"], "h#0": log["h"], "h#1": log["h#1"], "s": log["s"], "out": log["out"], "z#0": log["z"]}
    named |= {"helped/scaled": log["helped/scaled"], "a": log["a"], "b": log["b"], "kept": log["kept"]}
    for (name, _), grad in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(seen[f"grad(./{name})"], grad)
    assert torch.equal(seen["grad(./z#1)"][:, 0], torch.zeros(3))  # overwritten, so nothing flows into it


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


PLACES = ["y", "h#0", "h#1", "p", "q#0", "q#1", "cos", "acc#0", "acc#1", "acc#2", "acc#3", "acc#4", "side", "sigmoid"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("change", [scale(0.5), lambda v: v.sin(), lambda v: v.mul_(3), add(1.0)])
def test_an_edit_is_the_same_edit_written_into_the_source(where, change):
    model, twin = Steps(), Steps()
    twin.forward = types.MethodType(
        edited_in_source(where.removesuffix("#0") if where == "q#0" else where, change), twin
    )
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


# Numbers and calls


class Loop(nn.Module):
    def forward(self, x, times=3):
        for _ in range(times):
            x = x * 2
        return x


def test_numbers_count_assignments_and_calls_count_calls():
    model = nn.Sequential(Loop(), Loop())
    with capture(model, "0/x", "grad(0/x#-1)") as seen:
        model(X.clone().requires_grad_()).sum().backward()
        model[0](X, times=1)
    with pytest.raises(AmbiguousError, match="0/x means 4 values:\n  0/x#0@0  3×4 float32\n  0/x#1@0"):
        seen["0/x"]
    for k in range(3):
        assert torch.equal(seen[f"0/x#{k}@0"], X * 2 ** (k + 1))
    assert torch.equal(seen["0/x#-1@0"], X * 8) and torch.equal(seen["0/x#2"], X * 8)
    assert [value.tolist() for value in seen.calls("0/x")] == [(X * f).tolist() for f in (2, 4, 8, 2)]
    assert torch.equal(seen["grad(0/x#2)"], torch.full((3, 4), 8.0))
    with edit(model, {"1/x#1": zero()}):
        assert model(X).count_nonzero() == 0
    with edit(model, {"0/x@1": zero()}):
        assert model(X).count_nonzero() == 12
        assert model(X).count_nonzero() == 0
    with pytest.raises(AddressError, match="an edit counts from 0"):
        edit(model, {"1/x#-1": zero()})
    with capture(model, "0/x#7") as seen:
        model(X)
    with pytest.raises(NotSeenError, match="not assigned 8 times within one call"):
        seen["0/x#7"]


def test_a_count_starts_again_with_every_call_also_after_an_exception():
    class Fragile(nn.Module):
        def forward(self, x, fail=False):
            for _ in range(2):
                x = x + 1
                if fail:
                    raise ValueError
            return x

    model = Fragile()
    with capture(model, "./x") as seen:
        for fail in (True, False, True, False):
            with contextlib.suppress(ValueError):
                model(X, fail)
    assert len(seen.calls("./x#0")) == 4 and len(seen.calls("./x#1")) == 2


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


def test_a_shared_module_has_its_own_names():
    shared = Loop()
    model = nn.Sequential(shared, shared)
    with capture(model, "0/x#0") as seen:
        model(X)
    assert len(seen.calls("0/x#0")) == 2 and torch.equal(seen["0/x#0@1"], X * 16)


# Variables that no operation gives their value


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


def test_such_a_value_can_be_edited_before_anything_uses_it():
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


def test_where_something_has_used_it_the_error_says_where_to_edit_it():
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


def test_edits_of_such_values_in_sessions_within_each_other():
    model = Late()
    plain = model(X)
    with capture(model, "./residual") as before, edit(model, {"./residual": scale(3.0)}):
        with capture(model, "./residual") as between, edit(model, {"./residual": add(1.0)}):
            with capture(model, "./residual") as after:
                out = model(X)
    torch.testing.assert_close(out, plain + 2 * X + 1)
    for seen, value in ((before, X), (between, X * 3), (after, X * 3 + 1)):
        assert torch.equal(seen["./residual"], value)


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


# Functions


def test_s1_the_gradient_of_an_intermediate():
    def function(x):
        y = x + 2
        z = torch.mean(y**2)
        return z

    x = torch.tensor([1.0, 5.0], requires_grad=True)
    with capture(function, "y", "grad(y)") as seen:
        function(x).backward()
    assert torch.equal(seen["grad(y)"], seen["y"]) and torch.equal(seen["y"], torch.tensor([3.0, 7.0]))


def test_s2_and_s4_gradients_arrive_from_the_end_and_can_be_doubled():
    def function():
        a = torch.ones(5, requires_grad=True)
        b = 2 * a
        c = b.mean()
        c.backward()
        return a.grad

    came = []
    with observe(function, {"grad(*)": lambda site, grad: came.append((str(site), grad.tolist()))}):
        function()
    shown = [(name, grad) for name, grad in came if name != "grad(c@0)"]
    assert shown[0] == ("grad(b@0)", pytest.approx([0.2] * 5)) and shown[1] == ("grad(a@0)", pytest.approx([0.4] * 5))
    with edit(function, {"grad(b)": scale(2.0)}):
        torch.testing.assert_close(function(), torch.full((5,), 0.8))


def test_functions_of_all_kinds():
    class Callable:
        def __call__(self, x):
            y = x + 1
            return y

        def method(self, x):
            y = x + 1
            return y

    with capture(dressed, "inner") as seen:
        dressed(X)
    assert torch.equal(seen["inner"], X - 1)
    for function in (Callable(), Callable().method, functools.partial(Callable().method)):
        with capture(function, "y", "x") as seen:
            function(X)
        assert torch.equal(seen["y"], X + 1) and torch.equal(seen["x"], X)
    square = lambda x: (x * x).sum()  # noqa: E731
    with capture(square, "mul", "grad(mul)") as seen:
        square(X.clone().requires_grad_()).backward()
    assert torch.equal(seen["mul"], X * X) and torch.equal(seen["grad(mul)"], torch.ones(3, 4))
    with capture(helper, "yy") as seen:
        helper(X)
    with pytest.raises(
        NotSeenError, match="yy never came: no value of that name came while it ran; its variables are q"
    ):
        seen["yy"]
    with pytest.raises(AddressError, match="':in' belongs to modules"):
        capture(helper, "q:in")
    with pytest.raises(TypeError, match="known when it runs: sites"):
        sites(helper)


# torch.nn.functional, fused attention


def test_the_inside_of_multi_head_attention():
    torch.manual_seed(0)
    mha, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    plain = mha(x, x, x, average_attn_weights=False)
    with capture(mha, "./multi_head_attention_forward/attn_output_weights", "./multi_head_attention_forward/q") as seen:
        out = mha(x, x, x, average_attn_weights=False)
    assert torch.equal(out[0], plain[0]) and torch.equal(out[1], plain[1])
    assert torch.equal(seen.calls("./**/attn_output_weights")[-1], plain[1])
    with edit(mha, {"./multi_head_attention_forward/attn_output_weights#1": zero()}):
        assert torch.equal(mha(x, x, x)[0], mha.out_proj.bias.expand(2, 5, 8))
    unopened = names(mha, x, x, x)
    assert "./attn_output_weights" in unopened and not any("forward" in name for name in unopened)


class Attention(nn.Module):
    def forward(self, q, k, v, **options):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return out


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(5, 5) > 0.3},
    "float": {"attn_mask": torch.randn(5, 5)},
    "scale": {"scale": 0.3},
    "groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_probabilities_beside_the_fused_kernel(kind):
    options = dict(MASKS[kind])
    q, k, v = (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 2 if kind == "groups" else 4, 5, 8),
        torch.eye(5).expand(2, 4, 5, 5),
    )
    v = v[:, :2] if kind == "groups" else v
    model = Attention()
    plain = model(q, k, v, **options)
    with capture(model, "./**/probabilities", "./out") as seen:
        out = model(q, k, v, **options)
    assert torch.equal(out, plain) and torch.equal(seen["./out"], plain)
    # With the identity as values, what attention gives is its probabilities.
    torch.testing.assert_close(seen["./scaled_dot_product_attention/probabilities"], plain)
    assert "a second attention in time and memory" in str(seen.report())


def test_what_is_computed_beside_the_kernel_cannot_be_changed_and_has_no_gradient():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    with pytest.raises(EditError, match="computed beside the fused kernel"):
        with edit(Attention(), {"./scaled_dot_product_attention/probabilities": zero()}) as edits:
            edits._model(q, q, q)
    with capture(Attention(), "grad(./scaled_dot_product_attention/probabilities)") as seen:
        seen._session.model()(q, q, q).sum().backward()
    assert "it can be looked at, and no more" in str(seen.report())


# Checkpoints


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


@BOTH
def test_a_checkpoint_is_captured_once_and_its_gradients_are_right(reentrant):
    model, plain = Checkpointed(reentrant), Checkpointed(None)
    wanted = ("./segment/y", "./segment/z", "./segment/w")
    found = []
    for one in (model, plain):
        with capture(one, *wanted, grad=True) as seen:
            for _ in range(2):
                one(X.clone().requires_grad_()).sum().backward()
        found.append([seen.calls(address) for name in wanted for address in (name, f"grad({name})")])
    for ours, theirs in zip(*found, strict=True):
        assert len(ours) == len(theirs) == 2
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@BOTH
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("where", ["y", "z", "w", "tanh", "grad(y)", "grad(w)"])
def test_edits_are_made_again_in_the_recomputation_also_when_the_session_is_over(reentrant, inside, where):
    results = []
    for model in (Checkpointed(reentrant), Checkpointed(None)):
        x = X.clone().requires_grad_()
        address = where.replace("(", "(./segment/") if "(" in where else f"./segment/{where}"
        must_be_inside = "(" in where or model.reentrant is None
        with edit(model, {address: lambda v: v * 2 + 0.1}) as edits:
            out = model(x).sum()
            if inside or must_be_inside:
                out.backward()
        if not (inside or must_be_inside):
            out.backward()
        assert edits.report().silent == []
        results.append((out.detach(), x.grad, model.fc.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


# What a mode must not disturb


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def forward(self, x):
        h = self.layers(x)
        h = h[:, :4] + F.dropout(x, 0.3)
        h[:, 0] = h[:, 1]
        return {"loss": (h * torch.randn_like(h)).sum()}


def test_observing_changes_nothing():
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, x = Noisy(), X.clone().requires_grad_()
        session = capture(model, "**/**", grad=True) if watched else torch.enable_grad()
        with session:
            for _ in range(2):
                model(x)["loss"].backward()
        grads = [p.grad for p in model.parameters()]
        results.append([x.grad, *grads, *model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_mode_is_on_where_no_inner_address_is_asked_for():
    model = Residual()
    with capture(model, "fc", "grad(fc)"), observe(model, {"fc": print}):
        model(X)
        assert torch._C._len_torch_function_stack() == 0
    with capture(model, "./y"):
        assert torch._C._len_torch_function_stack() == 1
        assert not model.fc._forward_hooks  # nothing but operations gives y its value
    with capture(model, "./h"):
        assert model.fc._forward_hooks
    assert torch._C._len_torch_function_stack() == 0


def test_modes_may_end_in_another_order_than_they_began():
    class Mine(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, mine = Residual(), Mine()
    first, second = capture(model, "./y"), edit(model, {"./y": zero()})
    a = first.__enter__()
    second.__enter__()
    with mine:
        model(X)
        first.__exit__(None, None, None)
        model(X)
        assert torch._C._len_torch_function_stack() == 2
    second.__exit__(None)
    assert torch._C._len_torch_function_stack() == 0
    assert len(a.calls("./y")) == 1 and torch.equal(a["./y"], X + 2)  # the outer session sees it as the model made it


def test_sessions_nest_and_a_capture_inside_sees_what_the_model_used():
    model = Residual()
    with edit(model, {"./y": zero()}), capture(model, "./y", "./h#0") as seen:
        model(X)
    assert torch.equal(seen["./y"], torch.zeros(3, 4)) and torch.equal(seen["./h#0"], model.fc.bias.expand(3, 4))
    with (
        capture(model, "./**") as outer,
        edit(model, {"./y": lambda v: v.cos() + 1}),
        observe(model, {"./z#0": lambda site, v: v.abs().max()}),
    ):
        model(X)
    assert not any("lambda" in address or "abs" in address or "cos" in address for address in outer)


def test_threads_see_their_own():
    model, found = Residual(), {}

    def work(k):
        with capture(model, "./y") as seen:
            barrier.wait()
            model(X + k)
        found[k] = seen["./y"]

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[k], X + k + 2) for k in range(3))
    with capture(model, "./y") as seen:
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
    assert "./y" not in seen


def test_nothing_is_kept_that_was_not_asked_for():
    alive = []

    class Model(nn.Module):
        def forward(self, x):
            big = x + 1
            marker = weakref.ref(big)
            big = big.sum()
            alive.append(marker() is not None)
            tail = helper(big)
            return tail * 2

    for selector in ("./tail", "./**"):
        alive.clear()
        with capture(Model(), selector, reduce=lambda t: t.sum()) as seen:
            seen._session.model()(X)
        assert alive == [False]


def test_frames_keep_no_mark_and_modules_no_hook():
    model = Residual()
    ref = []

    class Counting(nn.Module):
        def forward(self, x):
            y = x + 1
            ref.append(weakref.ref(sys._getframe().f_trace))
            return y

    with capture(Counting(), "./y") as seen:
        seen._session.model()(X)
    gc.collect()
    assert ref[0]() is None
    with pytest.raises(ZeroDivisionError), edit(model, {"./y": lambda v: v / (1 // 0)}):
        model(X)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_in_a_change_or_an_observer_carries_the_address():
    with (
        pytest.raises(ZeroDivisionError, match=r"in the change at \./h#1@0"),
        edit(Residual(), {"./h#1": lambda v: 1 / 0}) as e,
    ):
        e._model(X)
    with pytest.raises(EditError, match=r"the change at \./y@0 made 3×1 float32 of 3×4 float32"):
        with edit(Residual(), {"./y": lambda v: v[:, :1]}) as e:
            e._model(X)


def test_a_debugger_or_a_coverage_tool_that_traces_is_left_alone():
    lines = []

    def trace(frame, event, arg):
        lines.append(event)
        return trace

    model, before = Residual(), sys.gettrace()
    sys.settrace(trace)
    try:
        with capture(model, "./y", "./h#1") as seen:
            model(X)
            model(X)
    finally:
        sys.settrace(before)
    assert len(seen.calls("./y")) == 2 and len(seen.calls("./h#1")) == 2 and "line" in lines


def test_the_report_says_where_torch_takes_another_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), capture(model, "./_ff_block/x") as seen:
        model(torch.randn(1, 3, 8))
    assert "turn off PyTorch's fused transformer kernel" in str(seen.report())


# Code of all kinds


def test_code_without_source():
    place = {"nn": nn, "torch": torch}
    exec("class M(nn.Module):\n def forward(self, x):\n  y = x + 1\n  z = (y * 2).relu()\n  return z", place)
    model = place["M"]()
    assert names(model, X) == ["./y", "./mul", "./z"]
    with edit(model, {"./y": zero()}):
        assert model(X).count_nonzero() == 0
    graph = torch.fx.symbolic_trace(model)
    assert names(graph, X)[-1] == "./relu"


def test_code_in_a_zip_file(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as file:
        file.writestr(
            "zipped_model.py",
            "from torch import nn\nclass M(nn.Module):\n def forward(self, x):\n  y = x + 1\n  return y\n",
        )
    monkeypatch.syspath_prepend(str(tmp_path / "code.zip"))
    import zipped_model

    assert names(zipped_model.M(), X) == ["./y"]


def test_generators_decorators_and_autograd_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            twice = x * 2
            return twice

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def pieces(x):
        for k in range(2):
            piece = x + k
            yield piece

    class Model(nn.Module):
        @torch.no_grad()
        def frozen(self, x):
            fixed = x * 7
            return fixed

        def forward(self, x):
            total = sum(piece * 1 for piece in pieces(x))
            doubled = Double.apply(total)
            return self.frozen(x) + doubled

    model, x = Model(), X.clone().requires_grad_()
    with capture(model, "./pieces/piece", "./Double/twice", "./frozen/fixed", "./doubled", "grad(./doubled)") as seen:
        model(x).sum().backward()
    assert [torch.equal(v, X + k) for k, v in enumerate(seen.calls("./pieces/piece"))] == [True, True]
    assert torch.equal(seen["./Double/twice"], seen["./doubled"]) and torch.equal(seen["./frozen/fixed"], X * 7)
    assert torch.equal(seen["grad(./doubled)"], torch.ones(3, 4))


def test_a_user_with_modes_and_tensor_classes_of_their_own():
    class Mine(torch.Tensor):
        pass

    model = Residual()
    with torch.device("cpu"), capture(model, "./y") as seen, torch.device("cpu"):
        model(X.as_subclass(Mine))
    assert type(seen["./y"]) is Mine and torch.equal(seen["./y"].as_subclass(torch.Tensor), X + 2)


# The other verbs


def test_observe_patch_save_and_sweep_inside(tmp_path):
    from tenterhook import load_edits

    model, came = Residual(), []
    with observe(model, {"./h": lambda site, v: came.append((str(site), site.text))}):
        model(X)
    assert came == [("./h@0", "h = self.fc(y)"), ("./h#1@0", "h = F.gelu(h)")]
    with pytest.warns(TenterhookWarning, match=r"\./nothing was never observed: no value of that name came"):
        with observe(model, {"./nothing": print}):
            model(X)
    with capture(model, "./h#1") as seen:
        clean = model(X)
    with edit(model, seen.patch("./h#1")):
        torch.testing.assert_close(model(X * 3)[:, 4:], clean[:, 4:])
    edits = edit(model, {"./h#1": scale(0.5)})
    edits.save(tmp_path / "e.safetensors")
    with edit(model, {"./h#1": scale(0.5)}):
        truth = model(X)
    with edit(model, load_edits(tmp_path / "e.safetensors")):
        assert torch.equal(model(X), truth)
    swept = sweep(model, X, [{"./h#1": scale(0.5)}, {"./y": zero()}, {}])
    torch.testing.assert_close(swept[0], truth)
    torch.testing.assert_close(swept[2], clean)


def test_globs_inside():
    model = nn.Sequential(Residual(), Residual())
    with capture(model, "*/h", "0/helped/*") as seen:
        model[0](X)
    assert list(seen) == ["0/h#0", "0/h#1", "0/helped/scaled"]
    with capture(model, "**<Residual>/y") as seen:
        model[1](X)
    assert list(seen) == ["1/y"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("./y:in", "':in' belongs to modules"),
        ("./helped#1/scaled", "a number belongs to the last name"),
        ("fcc/y", "did you mean fc"),
        ("fc.weight/y", "is a parameter, which has no forward"),
    ],
)
def test_addresses_that_cannot_be(address, words):
    with pytest.raises(AddressError, match=words):
        capture(Residual(), address)


# Listing


def test_sites_with_inputs_lists_what_is_inside(capsys):
    model = Residual()
    model.train()
    rng, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    table = sites(model, X)
    rows = {str(site): site for site in table}
    inside = "y h#0 h#1 helped/scaled s a b mul z#0 kept sin z#1 z#2 clone out tanh"
    assert list(rows) == [".", *(f"./{name}" for name in inside.split()), "fc", "fc/linear"]
    assert rows["./y"].seen == "3×4 float32" and rows["./y"].text == "y = x + 2"
    file, _, line = rows["./y"].source.rpartition(":")
    assert file == __file__ and "y = x + 2" in Path(file).read_text().splitlines()[int(line) - 1]
    assert rows["./s"].text == "s = self.helped(h)" and rows["./kept"].text == "kept = z"
    text = str(table)
    assert "test_inside.py" in text and "y = x + 2" in text
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert [str(s) for s in sites(model, X, match="./h")] == ["./h#0", "./h#1"]
    for site in table:  # what is listed can be asked for
        if site.kind == "inner":
            assert str(site) in capture_once(model, str(site))
    assert [str(s) for s in sites(helper, X)] == ["q", "add"]


def capture_once(model, address):
    with capture(model, address) as seen:
        model(X)
    return seen


def test_sites_leaves_batch_norm_and_random_states_alone():
    model = Noisy()
    before = [b.clone() for b in model.buffers()]
    rng = torch.get_rng_state()
    assert len(sites(model, X)) > 8
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())


def part(t):
    q = t * 2
    q = q.sin()
    return q.tanh()


class Twice(nn.Module):
    """The same function in two checkpoints of one forward, and once outside."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def own(self, t):
        q = t.cos()
        return q * t

    def run(self, function, t):
        return function(t) if self.reentrant is None else checkpoint(function, t, use_reentrant=self.reentrant)

    def forward(self, x):
        x = part(x)
        x = self.run(part, x)
        x = self.run(self.own, x)
        x = self.run(part, x)
        x = self.run(self.own, x)
        return x.sum()


@BOTH
@pytest.mark.parametrize("where", ["run/part/q#0", "run/part/q#3", "run/own/q#0", "run/own/q#1", "part/q#1"])
def test_numbers_in_a_recomputation_are_those_of_the_first_time(reentrant, where):
    model, plain = Twice(reentrant), Twice(None)
    address, x = f"./{where}", X.clone().requires_grad_()

    def gradient(model, edits, late=False):
        with edit(model, edits):
            loss = model(x)
            if not late:
                return torch.autograd.grad(loss, x)[0] if not reentrant else backward(loss)
        return backward(loss)

    def backward(loss):  # a reentrant checkpoint does not work with autograd.grad
        x.grad = None
        loss.backward()
        return x.grad

    found = []
    for one in (model, plain):
        with capture(one, address, grad=True) as seen:
            backward(one(x))
        found.append((seen[address], seen[f"grad({address})"]))
    torch.testing.assert_close(*found)
    for change in ({address: lambda v: v * 3 + 1}, {f"grad({address})": lambda g: g * 5}):
        truth = gradient(plain, change)
        torch.testing.assert_close(gradient(model, change), truth)
        if address in change:
            torch.testing.assert_close(gradient(model, change, late=True), truth)


# What a helper returns, and nobody else has


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


# Found by trying to break it


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


def test_a_variable_keeps_its_old_value_until_the_whole_statement_is_done():
    def forward(self, x):
        q, k = five(x), five(x + 1)
        q, k = q.sin(), k.cos()
        for _ in range(2):
            a, b, c, d = x + 1, x + 2, x + 3, x + 4
            x = a + d
        return q + k + b + c

    found = all_of(module_of(forward), X)
    first, second = X, (X + 1) + (X + 4)
    truth = {"q#0": X * 5, "q#1": (X * 5).sin(), "k#0": (X + 1) * 5, "k#1": ((X + 1) * 5).cos()}
    truth |= {"a#0": first + 1, "a#1": second + 1, "b#0": first + 2, "b#1": second + 2}
    assert [name for name in found if name[0] in "qkab" and name[1] == "#"] == [
        "q#0", "k#0", "q#1", "k#1", "a#0", "b#0", "a#1", "b#1"
    ]  # fmt: skip
    assert all(torch.equal(found[name], value) for name, value in truth.items())


def test_a_call_that_does_more_than_call_the_module():
    class Block:
        def __init__(self):
            self.fc = nn.Linear(4, 4)

        def __call__(self, t):
            r = self.fc(t)
            return r + 100

    class Scaled(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    def forward(self, x):
        y = self.block(x)
        z = self.scaled(x)
        return y * 1 + z

    model = module_of(forward, block=Block(), scaled=Scaled(4, 4))
    found = all_of(model, X)
    assert torch.equal(found["y"], model.block(X)) and torch.equal(found["z"], model.scaled(X))
    for name, other in (("y", model.scaled(X)), ("z", model.block(X))):
        with edit(model, {f"./{name}": zero()}):
            assert torch.equal(model(X), other)


def test_what_one_model_taught_does_not_hide_values_of_another():
    def forward(self, x):
        y = self.act(x)
        return y * 1

    for act in (torch.relu, five, nn.ReLU(), five, torch.relu):
        model = module_of(forward, act=act)
        assert torch.equal(all_of(model, X)["y"], act(X))


def test_results_of_functions_that_call_operations_for_themselves():
    def forward(self, x, c=True):
        loss = sum([t * 2 for t in (x, x, x)])
        chosen = sum([x, x * 2 if c else x])
        added = torch.add(*map(self.fc, (x, x)))
        parts = [x, *x]
        again = [*map(self.fc, (x, x))]
        product = math.prod([x, x, x])
        either = (x * 0).sum() or x.mean()
        return loss, chosen, added, parts, again, product, either

    model = module_of(forward, fc=nn.Linear(4, 4))
    found = all_of(model, X)
    assert torch.equal(found["loss"], X * 2 + X * 2 + X * 2) and torch.equal(found["chosen"], X + X * 2)
    assert torch.equal(found["added"], model.fc(X) + model.fc(X)) and len(found["parts"]) == 4
    assert len(found["again"]) == 2 and torch.equal(found["product"], X * X * X)
    assert torch.equal(found["either"], X.mean())


TABLE = torch.zeros(4)


def test_a_statement_is_named_by_what_it_writes_into():
    def forward(self, x):
        a, b = x + 1, x + 2
        torch.mul(a, 2, out=b)
        a.view(-1).mul_(2)
        TABLE.add_(a[0])
        F.relu(a[0], inplace=True)
        a[1:] = 0
        a[0] += 1
        a.add_(b if b.sum() > -1e9 else a)
        self.scale.mul_(1.0)
        return a

    found = all_of(module_of(forward, scale=torch.ones(())), X)
    names = [name for name in found if not name.startswith(("getitem", "sum", "gt"))]
    assert names == ["a#0", "b#0", "b#1", "view", "mul_", "TABLE", "relu", "a#1", "add_", "a#2", "a#3", "self.scale"]
    assert torch.equal(found["b#1"], (X + 1) * 2) and torch.equal(found["a#1"][1:], torch.zeros(2, 4))


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


def test_stars_nested_targets_dicts_and_dataclasses():
    class Pair(nn.Module):
        def forward(self, x):
            return x * 1, (x * 2, x * 3)

    class Named(nn.Module):
        def forward(self, x):
            return {"a": x * 4, "b": None}

    def forward(self, x):
        first, *rest = x.unbind(0)
        out, (h, c) = self.pair(x)
        named = self.named(x)
        made = dict(p=x * 5)
        return first + named["a"][0] + h[0] + c[0] + out[0] + made["p"][0] + rest[0]

    model = module_of(forward, pair=Pair(), named=Named())
    found = all_of(model, X)
    assert torch.equal(found["first"], X[0]) and len(found["rest"]) == 2 and torch.equal(found["rest"][1], X[2])
    assert torch.equal(found["h"], X * 2) and torch.equal(found["c"], X * 3) and torch.equal(found["named"]["a"], X * 4)
    assert torch.equal(found["made"]["p"], X * 5)
    with edit(model, {"./h": zero(), "./named[a]": zero(), "./first": zero()}):
        expected = X[0] * 9 + X[1]  # out, c and made of the first row, and the rest's first
        torch.testing.assert_close(model(X), expected)


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


def test_a_method_is_that_of_its_own_object():
    class Thing:
        def run(self, x):
            y = x + 1
            return y

    mine, other = Thing(), Thing()
    with capture(mine.run, "y") as seen:
        other.run(X)
        mine.run(X * 2)
    assert torch.equal(seen["y"], X * 2 + 1)


def test_debuggers_and_locals_keep_their_variables():
    def asking(self, x):
        here = locals()
        y = five(x)
        x = x * 2
        return here["x"] + x + y

    def traced(self, x):
        y = five(x)
        x = x * 2
        z = x + y
        return z

    def looking(frame, event, argument):
        if frame.f_code is traced.__code__ and "x" in frame.f_locals:
            frame.f_locals["x"].sum()
        return looking

    for forward, tracer in ((asking, None), (traced, looking)):
        model, before = module_of(forward), sys.gettrace()
        truth = model(X)
        with capture(model, "./x", "./y") as seen:
            sys.settrace(tracer or before)
            try:
                assert torch.equal(model(X), truth)
            finally:
                sys.settrace(before)
        assert torch.equal(seen["./x"], X * 2)
        assert torch.equal(seen["./y"], X * 5)


def test_deep_stacks_long_functions_and_many_variables():
    def deep(t, n):
        return t * 2 if n == 0 else deep(t, n - 1)

    def forward(self, x):
        y = deep(x, 400)
        return y

    assert torch.equal(all_of(module_of(forward), X)["y"], X * 2)
    lines = "".join(f"    v{k} = x + {k}\n" for k in range(600))
    place = {}
    exec(f"def long(x, c=True):\n{lines}    w = (x * 2 if c else x * 3)\n    return w", place)
    found = all_of(place["long"], X, selector="*")
    assert len(found) == 601 and torch.equal(found["w"], X * 2) and torch.equal(found["v599"], X + 599)


def test_a_thread_beside_does_not_hide_the_last_variable():
    def forward(self, x, beside=False):
        y = x + 1
        z = self.store["k"]
        if beside:
            thread = threading.Thread(target=self, args=(x,))
            thread.start()
            thread.join()
        return z

    model = module_of(forward, store={"k": torch.ones(4)})
    with capture(model, "./z") as seen:
        model(X, beside=True)
    assert torch.equal(seen["./z"], torch.ones(4))


def test_stop_waits_for_what_is_inside():
    def forward(self, x):
        a = self.fc(x)
        y = a + 1
        return y

    model = module_of(forward, fc=nn.Linear(4, 4))
    seen = capture.once(model, X, "fc", "./y")
    assert torch.equal(seen["./y"], seen["fc"] + 1)
    assert torch.equal(capture.once(five, X, "q"), X * 5)


def test_numbers_from_the_end_mean_the_last_alone():
    with capture(Loop(), "./x#-1") as seen:
        seen._session.model()(X)
    assert list(seen) == ["./x#2"] and len(seen) == 1 and list(seen.patch()) == ["./x#2"]
    model = Loop()
    with capture(model, "./x#-9") as seen:
        model(X)
    with pytest.raises(NotSeenError, match="not assigned 9 times"):
        seen["./x#-9"]


def test_patches_of_functions_and_overlapping_requests():
    def function(x):
        y = x + 1
        y = y * 2
        return y

    with capture(function, "y", "y#1", "*") as seen:
        clean = function(X)
    assert list(seen) == ["y#0", "y#1"] and len(seen.report().rows) == 2
    with edit(function, seen.patch("y#1")):
        assert torch.equal(function(X * 7), clean)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: None, "it was not called inside this session"),
        (lambda: five(X), "no value of that name came while it ran; its variables are q"),
    ],
)
def test_why_a_variable_of_a_function_did_not_come(run, words):
    with capture(five, "nothing") as seen:
        run()
    with pytest.raises(NotSeenError, match=words):
        seen["nothing"]


def test_why_a_variable_did_not_come():
    def forward(self, x, skip=True):
        size = len(x)
        if not skip:
            y = x + size
        return x * 1

    model = module_of(forward)
    with capture(model, "./y", "./size") as seen:
        model(X)
    assert all("that line did not run, or it holds something else" in row[2] for row in seen.report())
    with capture(model, "./y") as seen:
        thread = threading.Thread(target=model, args=(X,), kwargs={"skip": False})
        thread.start()
        thread.join()
    assert "it ran in another thread" in str(seen.report())
    with pytest.raises(AddressError, match=r"did you mean \./y"):
        capture(model, "y")
    with pytest.raises(AddressError, match="written module/name"):
        capture(model, "a//y")
    with pytest.raises(EditError, match="was never edited"):
        with pytest.warns(TenterhookWarning):
            sweep(model, X, [{"./nothing": zero()}])


def same(t):
    return t


def write(t):
    t.add_(1)


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


def test_what_another_session_changes_is_no_further_assignment():
    def forward(self, x):
        h = self.fc(x)
        h = h * 2
        return h + 1

    model = module_of(forward, fc=nn.Linear(4, 4))
    for inner in ({"fc": add(100.0)}, {"./h#0": add(100.0)}):
        with capture(model, "./h") as seen, edit(model, inner):
            model(X)
        assert torch.equal(seen["./h#0"], model.fc(X)) and torch.equal(seen["./h#1"], (model.fc(X) + 100) * 2)
        assert len(seen.calls("./h")) == 2
        with edit(model, {"./h#1": scale(3.0)}), edit(model, inner):
            out = model(X)
        torch.testing.assert_close(out, (model.fc(X) + 100) * 6 + 1)


def test_nested_checkpoints_are_captured_once():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            h = self.fc(x)
            h = h.tanh()
            r = h
            return (r + x).sin()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.i, self.j = Inner(), Inner()

        def two(self, x):
            t = checkpoint(self.i, x, use_reentrant=False)
            u = self.j(t)
            u = u * t
            return u

        def forward(self, x):
            w = checkpoint(self.two, x * 2, use_reentrant=False)
            return w.sum()

    model = Outer()
    with capture(model, "i/h", "i/r", "grad(i/h#1)") as seen:
        model(torch.tensor([0.1, 0.2], requires_grad=True)).backward()
    assert [len(seen.calls(address)) for address in ("i/h#0", "i/h#1", "i/r", "grad(i/h#1)")] == [1, 1, 1, 1]


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
    told = [one for i, one in enumerate(told) if i == 0 or one is not told[i - 1]]  # the same again is no other value
    model, _ = given(start + "\n".join("    " + line for line in lines))
    for _ in range(2):  # the second time it is known which sums are operations
        with capture(model, f"./{variable}") as seen:
            model(*inputs)
        assert len(list(seen)) == len(told)
        for address, expected in zip(seen, told, strict=True):
            torch.testing.assert_close(seen[address], expected)


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


def values_of(model, address, *inputs):
    with capture(model, address) as seen:
        model(*inputs)
    return [float(value) for value in seen.calls(address)]


def test_looking_runs_no_code_of_the_models():
    class Lazy(dict):
        def values(self):
            raise AssertionError("asked for its values")

    def forward(self, x):
        y = x * 2
        lazy = Lazy(y=y)
        self.buffer.add_(y)
        self.buffer.mul_(3)
        return y + self.buffers_[0] * 10 + self.buffers_[1] * 100 + lazy["y"]

    def buffer(self):
        self.asked += 1
        return self.buffers_[self.asked % 2]

    def made():
        cls = type("Model", (nn.Module,), {"forward": forward, "buffer": property(buffer)})
        model = cls()
        model.asked, model.buffers_ = 0, [torch.zeros(1), torch.zeros(1)]
        return model

    truth = made()(torch.ones(1))
    for address in ("./y", "./lazy"):
        with capture(made(), address) as seen:
            assert torch.equal(seen._session.model()(torch.ones(1)), truth)


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


def test_an_exception_lets_go_of_the_frame():
    class Failing(nn.Module):
        def forward(self, x):
            big = x * 2
            refs.append(weakref.ref(big))
            q = x
            w = q + 1
            raise ValueError

    model, refs = Failing(), []
    with contextlib.suppress(ValueError), capture(model, "./q") as seen:
        model(torch.ones(1))
    gc.collect()
    assert refs[0]() is None and seen["./q"] == 1


def test_what_is_changed_after_us_in_a_loop_is_no_further_assignment():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(3))

        def forward(self, x):
            y = torch.add(x, 1)
            for layer in self.layers:
                y = layer(y)
            for _ in range(2):
                y = torch.mul(y, 2)
            return torch.mul(y, 1)

    one, up = torch.ones(1), add(10.0)
    for change, truth in (
        ({"./y#0": up}, [2, 12, 12, 12, 24, 48]),
        ({"layers.1": up}, [2, 2, 2, 12, 24, 48]),
        ({"./y#4": up}, [2, 2, 2, 2, 4, 28]),
    ):
        model = Looped()
        with capture(model, "./y") as seen, edit(model, change):
            model(one)
        assert [float(value) for value in seen.calls("./y")] == truth
        with edit(model, {"./y#5": scale(0.0)}), edit(model, change):
            assert model(one) == 0
    model = Looped()
    with capture(model, "./y") as seen:
        handle = model.layers[1].register_forward_hook(lambda module, args, output: output + 10)
        model(one)
        handle.remove()
    assert [float(value) for value in seen.calls("./y")] == [2, 2, 12, 12, 24, 48]


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


def test_values_come_in_the_order_of_the_calls_that_made_them():
    class Product(nn.Module):
        def forward(self, x):
            h = x[0] * 1
            for v in x[1:]:
                h = h * v
            return h

    model, short, long = Product(), torch.tensor([2.0], requires_grad=True), torch.tensor([3.0, 5, 7])
    with capture(model, "./h", "grad(./h)") as seen:
        (model(short) + model(long.requires_grad_()) + model(short)).backward()
    assert seen.calls("./h") == [2, 3, 15, 105, 2]
    assert seen.calls("grad(./h)") == [1, 35, 7, 1, 1]
    assert seen["./h#2@1"] == 105 and seen.calls("./h@1") == [3, 15, 105] and seen.calls("./h@2") == [2]
    with edit(model, {"./h#1@1": torch.tensor(100.0)}) as edits:  # of the second call, the first with an #1
        assert [model(short), model(long)] == [2, 700]
    assert not edits.report().silent


def test_a_call_in_which_no_operation_ran_counts():
    class Maybe(nn.Module):
        def forward(self, x, run):
            if run:
                x = x + 1
            return x

    model, x = Maybe(), torch.ones(1)
    with capture(model, "./x") as seen:
        for run in (False, True, False, True):
            model(x, run)
    assert seen["./x@1"] == 2 and seen["./x@3"] == 2
    with capture(model, "./x") as seen:
        model.forward(x, True)  # nobody says when it is called by its name
        model.forward(x, True)
    assert seen["./x@0"] == 2 and seen["./x@1"] == 2


@pytest.mark.parametrize(
    "lines",
    [
        ["for y in g(x): kept.append(y)"],
        ["for y in g(x):", "    z = y", "    kept.append(z)"],
        ["it = g(x)", "y = next(it)", "y = next(it)", "y = next(it)", "kept.append(y)"],
    ],
    ids=["for", "another name", "next"],
)
@pytest.mark.parametrize("address", ["./y", "./**"])
def test_what_a_generator_gives_to_a_variable(lines, address):
    known = {"torch": torch}
    body = [
        "def g(v):",
        "    for i in range(2, 5): yield v * i",
        "kept = []",
        *lines,
        "return torch.stack(kept).sum(0)",
    ]
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in body), known)
    with capture(module_of(known["forward"]), address) as seen:
        seen._session.model()(torch.ones(1))
    assert seen.calls("./y") == [2, 3, 4]
    if "z = y" in str(lines) and address == "./**":
        assert seen.calls("./z") == [2, 3, 4]


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


def test_a_hook_that_is_newer_than_the_session_comes_before_the_variable():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            y = self.inner(x * 2)
            return y + 1

    model = Takes()
    with capture(model, "./y") as seen, edit(model, {"./y": add(100.0)}), capture(model, "./y") as after:
        handle = model.inner.register_forward_hook(lambda module, args, output: output * 3)
        assert model(torch.ones(1)) == 107
        handle.remove()
    assert seen["./y"] == 6 and after["./y"] == 106


# Edits of variables that nothing has used yet: found by trying to break it


def test_an_edit_of_an_inner_session_is_no_further_assignment_whatever_branch_lies_between():
    def forward(self, x, k=None):
        if k is None:  # noqa: SIM108
            b = x + 1
        else:
            b = k
        h = x * 1
        return b * 1

    model, one = module_of(forward), torch.ones(1)
    with edit(model, {"./b": scale(3.0)}), edit(model, {"./b": scale(10.0)}):
        assert model(one) == 60
    with capture(model, "./b") as seen, edit(model, {"./b": scale(10.0)}):
        model(one)
    assert seen.calls("./b") == [2]


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
    with observe(model, {"./*": lambda site, v: got.append((str(site), float(v * 1)))}):
        model(one, one * 5)
    assert got == [("./a@0", 1), ("./b@0", 5), ("./h@0", 1), ("./add@0", 6)]
    with edit(model, {"./a#0": lambda v: v * 2 + 1}), edit(model, {"./a#0": lambda v: v * 3 - 1}):
        assert model(one, one * 5) == 13
    with edit(model, {"./a": lambda v: v * 2 + 1}), edit(model, {"./a": lambda v: v * 3 - 1}) as inner:
        with capture(model, "./a") as seen:
            assert model(one, one * 5) == 13
    assert seen.calls("./a") == [8] and [row[1] for row in inner.report()] == ["1×"]


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
    with edit(model, {"./d": scale(10.0)}):  # what all three take
        assert model(one) == 2 + 20 + 20 + 20


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


def test_a_type_error_in_a_change_is_not_taken_for_one_of_torchs():
    def forward(self, x):
        r = x
        y = x * self.w
        return y + r

    def fails(v):
        raise TypeError("a mistake of mine")

    model = module_of(forward, w=torch.ones(1))
    for name in ("r", "y"):
        with pytest.raises(RuntimeError, match="TypeError: a mistake of mine"), edit(model, {f"./{name}": fails}):
            model(torch.ones(1))


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


def test_a_forward_without_arguments():
    model = nn.Module()
    model.forward = lambda: torch.ones(1) * 2
    with capture(model, "./**") as seen:
        model()
    assert seen["./mul"] == 2


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
    with pytest.raises(EditError, match="edit it where it is made"), edit(model, {"./self.old#0": scale(2.0)}):
        model(one)


def used(v):
    r = v * 2
    s = r + 1
    return r


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
    with pytest.raises(EditError, match="edit it where it is made"), edit(model, {f"{address}#0": zero()}):
        model(one)


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


def test_an_operation_with_the_name_of_a_function_of_torchs_stays_one():
    def softmax(x):
        ret = torch.softmax(x, -1)
        return ret

    def functional(self, x):
        return F.softmax(x, -1)

    def method(self, x):
        return x.softmax(-1)

    def own(self, x):
        return softmax(x)

    def pooled(self, x):
        return F.max_pool1d(x, 2)

    for forward in (functional, own):
        with capture(model := module_of(forward), "./softmax/ret") as seen:
            model(X)
        assert all(torch.equal(value, X.softmax(-1)) for value in seen.calls("./softmax/ret"))
    for forward, address in ((method, "./softmax/ret"), (pooled, "./max_pool1d/y")):
        with capture(model := module_of(forward), address) as seen:
            model(X)
        assert address not in seen


def evaluate(text):
    variables = sys._getframe(1).f_locals  # as numexpr and pandas.eval do
    return variables[text[0]].cos() + variables[text[-1]].sin()


def test_who_looks_at_the_variables_of_a_caller_keeps_them():
    def compute(x):
        a = x
        b = used(x)
        c = evaluate("a+b")
        return c + a

    def forward(self, x):
        y = x
        out = compute(x)
        return out + y

    model = module_of(forward)
    for address in ("./compute/a", "./compute/b", "./y", "./**"):
        with capture(model, address) as seen:
            assert torch.equal(model(X), X.cos() + (X * 2).sin() + X + X)
        assert seen.report().silent == []


def test_looking_at_variables_lets_go_of_them():
    alive = []

    def forward(self, x):
        y = used(x)
        alive.append(weakref.ref(y))
        z = x * 2
        del y
        alive.append(alive[0]())
        return z

    model = module_of(forward)
    for session in (observe(model, {"./y": lambda site, value: None}), edit(model, {"./y@9": zero()})):
        alive.clear()
        with contextlib.suppress(TenterhookWarning), session:
            model(X)
        assert alive[1] is None


def test_a_call_in_another_thread_is_not_looked_into_and_counts_as_it_does_for_the_module():
    def forward(self, x):
        y = x + 2
        z = y * 2
        return z

    model, one = module_of(forward), torch.ones(1)

    async def in_a_task(x):
        await asyncio.to_thread(model, x)

    def in_a_thread(x):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()

    for elsewhere in (lambda x: asyncio.run(in_a_task(x)), in_a_thread):
        with capture(model, ".:in[0]", "./y") as seen, edit(model, {"./z": scale(1.0)}) as edits:
            model(one)
            elsewhere(one * 10)
            model(one * 100)
        numbers = {float(seen[f".:in[0]@{k}"]): k for k in range(len(seen.calls(".:in[0]")))}
        assert seen.calls("./y") == [3, 102]
        if len(numbers) == 3:
            with pytest.raises(NotSeenError, match="no such value came in that call; one came in @0, @2"):
                seen["./y@1"]
        assert seen[f"./y@{numbers[1]}"] == 3 and seen[f"./y@{numbers[100]}"] == 102
        for report in (seen.report(), edits.report()):
            assert "what ran in other threads was not looked into" in str(report)
    with capture(model, "./y") as seen:
        model(one)
    assert seen.report().notes == []


def test_a_call_that_is_not_there_is_told_of_as_it_is():
    def forward(self, x):
        y = x * 2
        return y

    model = module_of(forward)
    with pytest.warns(TenterhookWarning, match="it came, but not in the call that was asked for"):
        with edit(model, {"./y@5": zero()}):
            model(X)


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


@pytest.mark.parametrize("kind", [None, True, False])
def test_a_checkpoint_that_runs_again_has_the_same_numbers_and_is_no_call(kind):
    model = Around(kind=kind)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        with edit(model, {"b/a#1": lambda v: v * v}), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x).sum().backward()
        torch.testing.assert_close(x.grad, 4 * (4 * x.detach()) ** 3 * 4)
    with capture(model, "b/a", grad=True) as seen:
        for k in (1.0, 2.0, 3.0):
            model(torch.tensor([k], requires_grad=True)).sum().backward()
    for k in range(3):
        x = k + 1.0
        assert [v.item() for v in seen.calls(f"b/a@{k}")] == [2 * x, 4 * x]
        assert [v.item() for v in seen.calls(f"grad(b/a@{k})")] == [16 * x, 8 * x]
    with edit(model, {"b/w@2": 100.0}), capture(model, "b") as seen:
        for k in (1.0, 2.0, 3.0):
            model(torch.tensor([k], requires_grad=True)).sum().backward()
    assert [v.item() for v in seen.calls("b")] == [16, 64, 144 * 97]


@pytest.mark.parametrize(("method", "address"), [("encode", "b/encode/a"), ("probed", "b/probed/probabilities")])
def test_a_method_that_is_called_from_outside_is_the_same_at_every_call(method, address):
    model, x = Around(method), torch.ones(1)
    with capture(model, address) as seen:
        for _ in range(3):
            model(x)
    assert [[v.item() for v in seen.calls(f"{address}@{k}")] for k in range(3)] == [[2, 4]] * 3
    with edit(model, {f"{address}#1": 100.0}):
        assert model(x).item() == model(x).item() == 100


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
    assert [address for address in seen if "/outer/a" in address] == ["./outer/a#0", "./outer/a#1"]


class InTurn(nn.Module):
    """Its block's y is no operation's own, so it is seen late: before something else happens to it."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def norm(self, x):
        m = x * 3
        _ = m + 1
        return m

    def block(self, x):
        y = self.run(self.norm, x)
        return y

    def forward(self, x):
        h = self.run(self.block, x)
        g = h.clone()
        h.detach().mul_(10)
        k = self.run(self.block, g + 1)
        return k + g


@pytest.mark.parametrize("run", [lambda function, x: function(x), functools.partial(checkpoint, use_reentrant=False)])
@pytest.mark.parametrize(
    "asked", [["./**/block/y"], ["./**/block/y", "./h"], ["./**/block/y", "./k"], ["./**/block/*"], ["./**"]]
)
def test_what_is_seen_late_is_numbered_in_the_order_of_the_calls(run, asked):
    model, x = InTurn(run), torch.ones(1, requires_grad=True)
    with capture(model, *asked, *(f"grad({one})" for one in asked)) as seen:
        model(x).backward()
    values = [(one[-2:], seen[one].item()) for one in seen if "/y#" in one and "grad" not in one]
    grads = {one[-3:-1]: seen[one].item() for one in seen if "/y#" in one and "grad" in one}
    # y0 = 3 x, y1 = 3 (y0 + 1), and the output is y1 + y0.
    assert values == [("#0", 3), ("#1", 12)] and grads == {"#0": 4, "#1": 1}


class Calling(nn.Module):
    def pre(self, x):
        p = x * 2
        return p

    def forward(self, x, back=None):
        y = x + 1
        return y if back is None else back(y)


class CalledBack(nn.Module):
    """Its block calls its norm, twice in a call."""

    def __init__(self, kind=None):
        super().__init__()
        self.block, self.kind = Calling(), kind

    def norm(self, t):
        n = t * t
        return n

    def forward(self, x):
        for _ in range(2):
            if self.kind is None:
                x = self.block(x, self.norm)
            else:
                x = checkpoint(self.block, x, self.norm, use_reentrant=self.kind)
        z = x * 2
        return z


@pytest.mark.parametrize("kind", [None, True, False])
@pytest.mark.parametrize("asked", [["./z"], ["./z", "./norm/n"], ["./**"], ["**/**"]])
def test_a_method_that_a_submodule_calls_back_is_part_of_the_call_that_runs(kind, asked):
    model, inputs = CalledBack(kind), [torch.tensor([k], requires_grad=True) for k in (1.0, 2.0, 3.0)]
    with capture(model, *asked) as seen:
        outputs = [model(x).item() for x in inputs]
    assert [seen[f"./z@{k}"].item() for k in range(3)] == outputs
    if len(asked) > 1 or "**" in asked[0]:
        assert [v.item() for v in seen.calls("./norm/n@1")] == [9, 100]
    with edit(model, {"./norm/n#1@1": scale(10.0), "./z": add(0.0)}):
        sum(model(x) for x in inputs).backward()
    grads = [8 * (x.item() + 1) * ((x.item() + 1) ** 2 + 1) for x in inputs]
    assert [x.grad.item() for x in inputs] == [grads[0], 10 * grads[1], grads[2]]


class FromOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Calling()

    def forward(self, x):
        return self.block(self.block.pre(x))


@pytest.mark.parametrize("asked", [["block/y"], ["block/y", "block/pre/p"], ["block/**", "block"], ["block/pre/p"]])
def test_a_method_that_is_called_from_outside_is_no_call_of_the_module(asked):
    model, inputs = FromOutside(), [torch.tensor([k]) for k in (1.0, 2.0, 3.0)]
    with capture(model, *asked) as seen:
        outputs = [model(x) for x in inputs]
    if asked != ["block/pre/p"]:
        assert [seen[f"block/y@{k}"] for k in range(3)] == outputs
    if asked != ["block/y"]:
        assert [seen[f"block/pre/p@{k}"] for k in range(3)] == [2 * x for x in inputs]
    with edit(model, {one + "@1": scale(100.0) for one in asked if "*" not in one and "/" in one}):
        changed = [model(x) for x in inputs]
    assert [a == b for a, b in zip(outputs, changed, strict=True)] == [True, "**" in asked[0], True]


class Awaited(nn.Module):
    async def forward(self, x):
        y = x * 2
        await asyncio.sleep(0)
        z = y + 1
        return z


class Yielding(nn.Module):
    def forward(self, x):
        y = x * 2
        yield y
        z = y + 1
        yield z


def awaited(model, inputs):
    async def run():
        return await asyncio.gather(*map(model, inputs))

    return [out.item() for out in asyncio.run(run())]


def last_first(model, inputs):
    runs = [model(x) for x in inputs]
    return [list(run)[-1].item() for run in reversed(runs)][::-1]


@pytest.mark.parametrize(("model", "run"), [(Awaited(), awaited), (Yielding(), last_first)])
@pytest.mark.parametrize("asked", [["./y", "./z"], ["./**"]])
def test_a_forward_that_runs_after_its_call_is_that_call(model, run, asked):
    inputs = [torch.tensor([k]) for k in (1.0, 2.0, 3.0)]
    with capture(model, *asked) as seen:
        assert run(model, inputs) == [3, 5, 7]
    assert [seen[f"./y@{k}"] for k in range(3)] == [2, 4, 6] and [seen[f"./z@{k}"] for k in range(3)] == [3, 5, 7]
    with edit(model, {"./y@1": scale(10.0)}):
        assert run(model, inputs) == [3, 41, 7]


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


class DoublesAll(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, torch.Tensor) else out


class DoublesSome(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        with contextlib.nullcontext():
            out = func(*args, **(kwargs or {}))
            if func is torch.add:
                out = out * 2
            return out


class Logs(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            return func(*args)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            out.abs() + 1
            norm = out.norm()
            self.bad = norm.isnan().any()
        return out


class Times(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.calls = getattr(self, "calls", 0) + 1


class Keeps(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.out, number = func(*args, **(kwargs or {})), 1
        result = self.out
        self.log = lambda: (result, number)
        return result


class Inherits(Logs):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        result = out
        return result


class UnderMode(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        with self.mode():
            y = torch.add(x, 1)
            y += 1
            y[0] = 5
        z = y - 1
        return z


@contextlib.contextmanager
def two_modes():
    with Times(), Logs():
        yield


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Logs, Times, Keeps, Inherits, two_modes])
@pytest.mark.parametrize("asked", [("./y", "./z"), ("./**",)])
def test_a_mode_of_the_users_that_changes_nothing_is_not_in_the_way(mode, asked):
    model, x = UnderMode(mode), torch.ones(2)
    with capture(model, *asked) as seen:
        model(x)
    values = {name: seen[name].tolist() for name in seen if name != "./x"}
    assert values == {"./y#0": [2, 2], "./y#1": [3, 3], "./y#2": [5, 3], "./z": [4, 2]}
    with edit(model, {"./y#0": add(10.0)}):
        assert model(x).tolist() == [4, 12]


@pytest.mark.parametrize("mode", [DoublesAll, DoublesSome])
def test_what_a_mode_of_the_users_makes_of_a_result_is_another_value_of_the_variable(mode):
    model, x = UnderMode(mode), torch.ones(2)
    with capture(model, "./y") as seen:
        model(x)
    assert seen["./y#0"].tolist() == [2, 2] and seen["./y#1"].tolist() == [4, 4]


class _Body(nn.Module):
    def features(self, x):
        y = x * 2
        w = y
        return w


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = _Body(), nn.Linear(4, 4)

    def encode(self, x):
        h = self.body.features(x)
        return h

    def forward(self, x):
        return self.last(self.encode(x))


class _Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = _Encoder(), nn.Linear(4, 2)

    def forward(self, x):
        z = self.enc.encode(x)
        return self.head(self.enc(z))


@pytest.mark.parametrize(
    "asked", [("enc/**",), ("enc/encode/h",), ("enc/**", "head"), ("enc/encode/*", "./z"), ("**/**",)]
)
def test_a_method_called_from_outside_is_seen_where_another_module_does_its_operations(asked):
    model = _Asking()
    with capture(model, *asked) as seen:
        model(X)
    first, second = seen.calls("enc/encode/h")
    assert torch.equal(first, X * 2) and torch.equal(second, X * 4)


def looks_at(monkeypatch, model, address, *inputs):
    """How often variables were looked at in the second forward, and what was seen."""
    looks = []
    look = Inside._look_at_variables
    with capture(model, address) as seen:
        model(*inputs)
        monkeypatch.setattr(Inside, "_look_at_variables", lambda *args, **how: looks.append(1) or look(*args, **how))
        model(*inputs)
        monkeypatch.undo()
    return len(looks), [float(value) for value in seen.calls(f"{address}#0" if f"{address}#0" in seen else address)]


def test_variables_are_looked_at_where_they_may_have_changed_and_not_at_every_operation(monkeypatch):
    def given_by_a_call(self, x):
        for _ in range(100):
            x = x + 1
        y = x.relu()
        for _ in range(100):
            x = x + 1
        return x + y

    def taken_over(self, x):
        for _ in range(100):
            x = x + 1
        y = x
        for _ in range(100):
            x = x + 1
        return x + y

    for forward in (given_by_a_call, taken_over):
        looks, values = looks_at(monkeypatch, module_of(forward), "./y", torch.zeros(1))
        assert looks < 12
        assert values == [100, 100]


def test_a_loop_gives_a_variable_another_value_each_time(monkeypatch):
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


def test_the_same_code_that_runs_within_itself_is_looked_at_apart():
    def kept(value):
        return value

    class Twice(nn.Module):
        def forward(self, x, depth=2):
            for _ in range(3):
                x = x + 1
            y = kept(x)
            for _ in range(3):
                x = x + 1
            if depth:
                x = x + self.forward(x * 10, depth - 1)
            for _ in range(3):
                x = x + y
            return x

    told = []

    def truth(x, depth=2):
        y = x + 3
        told.append((depth, y))
        x = x + 6
        if depth:
            x = x + truth(x * 10, depth - 1)
        return x + 3 * y

    truth(0.0)
    model = Twice()
    for _ in range(3):
        with capture(model, "./y") as seen:
            model(torch.zeros(1))
        values = [float(value) for address in seen for value in seen.calls(address)]
        assert sorted(values) == sorted(y for _, y in told)


# The mode pauses where nobody wants anything of many operations in a row.


def looped(self, x):
    for _ in range(100):
        x = x + 1
        x = x * 1
    y = x.relu()
    for _ in range(100):
        x = x + 1
    return x + y


def unlooped(self, x):
    for _ in range(30):
        x = x + 1
    y = x + 1
    for _ in range(30):
        x = x + 1
    return x + y


@pytest.fixture
def pauses(monkeypatch):
    """How the mode paused: the numbers of the first lines, and of those before which each ended."""
    found = []
    begin, end = Pause.begin, Pause.end
    monkeypatch.setattr(pause, "_WORTH_IT", 0.0)
    monkeypatch.setattr(Pause, "begin", lambda self: found.append([self.frame.f_lineno]) or begin(self))
    monkeypatch.setattr(Pause, "end", lambda self: found[-1].append(self.frame.f_lineno) or end(self))
    return found


@pytest.mark.parametrize("forward", [looped, unlooped])
def test_the_mode_pauses_and_nothing_is_missed(pauses, forward):
    model, x = module_of(forward), torch.zeros(1, requires_grad=True)
    first = forward.__code__.co_firstlineno
    for _ in range(3):
        with capture(model, "./y", "grad(./y)") as seen:
            model(x).backward()
            assert sys.gettrace() is None
        assert seen["./y"] == (100 if forward is looped else 31) and seen["grad(./y)"] == 1
    at_y = first + (4 if forward is looped else 3)
    assert [at_y] in [one[1:] for one in pauses]
    assert len([one for one in pauses if len(one) == 2]) == len(pauses) >= 4


def test_a_change_after_a_pause_is_made(pauses):
    model = module_of(looped)
    for _ in range(2):
        with edit(model, {"./y": scale(2.0)}):
            assert model(torch.zeros(1)) == 400
    assert pauses


def test_a_pause_ends_with_whatever_leaves_the_loop(pauses):
    def forward(self, x, how):
        for k in range(100):
            x = x + 1
            if k == 50 and how == "return":
                return x
            if k == 50 and how == "raise":
                raise ValueError
            if k == 50 and how == "divide":
                1 / 0  # no function is called for it
            if k == 50 and how == "break":
                break
        y = x + 1
        return y

    model, x = module_of(forward), torch.zeros(1)
    with capture(model, "./y") as seen:
        model(x, "")
        for how in ("return", "raise", "divide", "break"):
            with contextlib.suppress(ValueError, ZeroDivisionError):
                model(x, how)
            assert sys.gettrace() is None
            assert [type(mode) for mode in torch.overrides._get_current_function_mode_stack()] == [Inside]
        model(x, "")
    assert torch.overrides._get_current_function_mode_stack() == []
    assert [float(value) for value in seen.calls("./y")] == [101, 52, 101]
    assert len(pauses) >= 5


def test_no_pause_where_an_exception_may_be_caught(pauses):
    """A signal's exception in the tracer itself would end the tracing, and nobody would switch the mode on again."""

    class Timeout(Exception):
        pass

    def handler(*args):
        raise Timeout

    class Waiting(nn.Module):
        def forward(self, x):
            start = x
            try:
                while True:
                    x = x + 1
            except self.timeout:
                y = start * 2
            return y

    model = Waiting()
    model.timeout = Timeout
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert values_of(model, "./y", torch.ones(1)) == [2]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not pauses


def test_a_pause_that_an_exception_in_the_tracer_ends_is_over_with_the_next_call(pauses, monkeypatch):
    first = Pause._at_first

    def interrupted(self, frame, event, argument):
        first(self, frame, event, argument)
        raise KeyboardInterrupt

    model = module_of(looped)
    with capture(model, "./y") as seen:
        model(torch.zeros(1))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Pause, "_at_first", interrupted)
            model(torch.zeros(1))
        assert torch.overrides._get_current_function_mode_stack() == [] and sys.gettrace() is None
        model(torch.ones(1))
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch.overrides._get_current_function_mode_stack() == []
    assert [float(value) for value in seen.calls("./y")] == [100, 101]


def test_the_frame_of_a_pause_goes_when_it_ends(pauses):
    def forward(self, x, fails):
        big = x * 2
        self.big = weakref.ref(big)
        y = x * 3
        for _ in range(60):
            x = x + 1
        if fails:
            raise ValueError
        return x

    model = module_of(forward)
    with capture(model, "./y"):
        model(torch.zeros(1), False)
        assert model.big() is None
        with contextlib.suppress(ValueError):
            model(torch.zeros(1), True)
        assert model.big() is None
    assert len(pauses) == 2


def test_operations_that_a_loop_runs_by_itself_are_seen_after_a_long_one(pauses):
    def forward(self, x):
        later = map(torch.relu, [x, x])
        for _ in range(60):
            x = x + 1
        for h in later:
            x = x + h
        return x

    model = module_of(forward)
    for _ in range(2):
        with capture(model, "./relu") as seen:
            model(torch.ones(1))
        assert len(list(seen)) == 2


def positive(value):
    return value.relu()


def test_a_function_that_is_called_ends_a_pause_before_its_first_operation(pauses):
    class Inner(nn.Module):
        def forward(self, x):
            y = x * 2
            return y

    def forward(self, x):
        for k in range(100):
            x = x + 1
            if k % 40 == 39:
                x = self.inner(x) - positive(x)
        y = x + 1
        return y

    model = module_of(forward)
    model.inner = Inner()
    for _ in range(2):
        with capture(model, "./y", "inner/y") as seen:
            model(torch.zeros(1))
        assert seen["./y"] == 101
        assert [float(value) for value in seen.calls("inner/y")] == [80, 160]
    assert len(pauses) >= 4


def test_no_pause_where_somebody_else_traces(pauses):
    told = []

    def tracer(frame, event, argument):
        told.append(event)
        return tracer

    model = module_of(unlooped)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert values_of(model, "./y", torch.zeros(1)) == [31]
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert told and not pauses


def test_a_tracer_that_begins_during_a_pause_stays(pauses):
    def tracer(frame, event, argument):
        return tracer

    def forward(self, x):
        for k in range(60):
            x = x + 1
            if k == 30:
                _ = self.trace(self.tracer)  # as another thread might have it
        y = x + 1
        return y

    model = module_of(forward)
    model.trace, model.tracer = sys.settrace, tracer
    before = sys.gettrace()
    try:
        assert values_of(model, "./y", torch.zeros(1)) == [61]
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert pauses


def test_no_pause_in_code_that_shares_its_variables(pauses):
    """A tracer writes variables back, maybe over what another thread has assigned meanwhile."""

    def closes(self, x):
        count = 0

        def more():
            nonlocal count
            count += 1

        more()
        for _ in range(60):
            x = x + count
        y = x + 1
        return y

    def looks(self, x):
        for _ in range(60):
            x = x + 1
        y = x + 1
        assert "y" in locals()
        return y

    for forward in (closes, looks):
        assert values_of(module_of(forward), "./y", torch.zeros(1)) == [61]
    assert not pauses


def test_no_pause_under_another_mode(pauses):
    model = module_of(looped)
    with torch.device("cpu"):
        assert values_of(model, "./y", torch.zeros(1)) == [100]
    stack = torch.overrides._get_current_function_mode_stack
    with capture(model, "./y") as seen, torch.device("cpu"):
        model(torch.zeros(1))
        assert [type(mode).__name__ for mode in stack()] == ["Inside", "DeviceContext"]
    assert seen["./y"] == 100
    assert stack() == []


def test_a_mode_that_begins_in_the_forward_is_where_it_would_be(pauses):
    seen_by = []

    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen_by.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def forward(self, x):
        for _ in range(60):
            x = x + 1
        self.other.__enter__()
        for _ in range(60):
            x = x + 1
        y = x.relu()
        self.other.__exit__(None, None, None)
        return y

    model = module_of(forward)
    model.other = Other()
    assert values_of(model, "./y", torch.zeros(1)) == [120]
    assert len(pauses) == 1 and seen_by == ["add"] * 60 + ["relu"]


def test_nothing_lives_longer_for_a_pause(pauses):
    def forward(self, x):
        big = x * 2
        self.big = weakref.ref(big)
        for _ in range(60):
            x = x + 1
        is_kept = self.big() is not None
        del big
        y = x + 1
        torch.relu(x)
        self.alive = is_kept, self.big() is not None
        return y

    model = module_of(forward)
    values_of(model, "./y", torch.zeros(1))
    assert pauses and model.alive == (True, False)
    gone = weakref.ref(model)
    pauses.clear()
    del model
    gc.collect()
    assert gone() is None


def test_sessions_in_one_another_do_not_pause(pauses):
    model = module_of(looped)
    with capture(model, "./y") as outer, capture(model, "./y") as inner:
        model(torch.zeros(1))
    assert outer["./y"] == inner["./y"] == 100
    assert not pauses


def test_pauses_in_threads_are_apart(pauses):
    def run(start):
        model = module_of(looped)
        got = []
        for k in range(20):
            got += values_of(model, "./y", torch.full((1,), float(start + k)))
        results[start] = got

    results = {}
    threads = [threading.Thread(target=run, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {start: [start + k + 100.0 for k in range(20)] for start in (0, 1000, 2000, 3000)}


def test_short_pauses_become_rare(pauses, monkeypatch):
    monkeypatch.setattr(pause, "_WORTH_IT", 1.0)

    def forward(self, x):
        for _ in range(200):
            for _ in range(20):
                x = x + 1
            positive(x)
        y = x + 1
        return y

    assert values_of(module_of(forward), "./y", torch.zeros(1)) == [4001]
    assert 1 <= len(pauses) < 20


def test_a_statement_over_several_lines_is_seen_after_a_pause(pauses):
    # fmt: off
    def forward(self, x):
        for _ in range(60):
            x = x + 1
        y = (
            x
            +
            1
        )
        for _ in range(60):
            x = x + 1
        z, y = (
            x,
            y
            * 2,
        )
        return y
    # fmt: on

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            model(torch.zeros(1))
        assert [float(seen[address]) for address in seen] == [61, 122]
    assert pauses


def test_modules_that_cannot_give_a_variable_its_value_have_no_hooks():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            y = self.a(x)
            z = torch.relu(y) + F.gelu(y)
            w = z.relu()
            v = self.pick(w)
            return self.b(v)

        def pick(self, x):
            return self.b(x)

    model = Several()

    def hooked(address):
        with capture(model, address) as seen:
            found = {name for name, module in model.named_modules() if module._forward_hooks}
            model(torch.ones(1))
        assert address in seen
        return found

    assert hooked("./y") == {"", "a"}
    assert hooked("./w") == {"", "a", "b"}
    assert hooked("./w") == {""}  # now it is known that z was a tensor
    assert hooked("./v") == {"", "a", "b"}


def test_a_generator_that_goes_on_sees_what_its_caller_has_assigned_since():
    def parts(value):
        for k in range(4):
            yield value * k

    def kept(value):
        return value

    def forward(self, x):
        more = parts(x)
        total = x * 0
        for _ in range(4):
            part = next(more)
            y = kept(part)
            y.detach().add_(1)
            total = total + y
        for z in parts(x):
            y = kept(z)
        return total + y

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            assert model(torch.ones(1)) == 0 + 1 + 2 + 3 + 4 + 3
        assert [float(seen[address]) for address in seen] == [0, 1, 2, 3, 0, 1, 2, 3]


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


def told_of(model, address, *inputs):
    """What comes to an address in the second of two sessions, each value by its full address."""
    for _ in range(2):
        with capture(model, address) as seen:
            model(*inputs)
    return {str(one): float(value.sum()) for one in seen for value in seen.calls(one)}


def test_functions_of_torch_that_write_in_place_count():
    def forward(self, x):
        y = x * -2
        torch.relu_(y)
        F.relu_(y)
        torch.Tensor.add_(y, 1)
        y.data.add_(1)
        x.add_(0)
        return y + 1

    model = module_of(forward)
    assert told_of(model, "./y", torch.ones(1)) == {"./y#0": -2, "./y#1": 0, "./y#2": 0, "./y#3": 1}
    assert told_of(model, "./add_", torch.ones(1)) == {"./add_": 2}
    with edit(model, {"./y#1": lambda value: value * 0 + 7}):
        assert model(torch.ones(1)) == 10


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


def test_a_module_in_a_variable_may_be_called_like_a_method_of_tensors():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.relu = nn.Identity(), nn.ReLU(inplace=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            y = x * 2
            for block in self.blocks:
                y = block.norm(y)
                y = block.relu(y)
            return y

    assert list(told_of(Model(), "./y", torch.ones(1))) == [f"./y#{k}" for k in range(5)]


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


def test_each_call_of_a_module_is_an_occasion_to_look():
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


def test_each_call_of_a_method_from_outside_counts():
    def kept(value):
        return value

    class Model(nn.Module):
        def inner(self, x):
            h = kept(x)
            return h * 2

        def helper(self, x, more):
            x = x * 1
            return self.inner(x) if more else x

        def forward(self, x):
            return self.helper(x, True)

    model = Model()
    for number, expected in ((1, [1]), (2, []), (3, [1])):
        with warnings.catch_warnings(), capture(model, f"./helper/inner/h@{number}") as seen:
            warnings.simplefilter("ignore")
            for more in (False, True, False, True, False):
                model.helper(torch.ones(1), more)
        assert [float(value) for one in seen for value in seen.calls(one)] == expected


def test_a_variable_may_be_called_like_an_operation():
    def forward(self, x):
        getitem = x[0]
        linalg_norm = torch.linalg.norm(x)
        return x[1] + getitem + (torch.linalg.norm(x * 2) + linalg_norm)

    model = module_of(forward)
    assert list(told_of(model, "./getitem", torch.ones(2))) == ["./getitem#0", "./getitem#1"]
    assert list(told_of(model, "./linalg_norm", torch.ones(2))) == ["./linalg_norm#0", "./linalg_norm#1"]


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


def test_a_statement_that_does_not_say_what_it_writes_into():
    def bound(self, x):
        y = x * 2
        a = x * 1
        for write in (a.add_, y.add_):
            write(a)
        return y

    def taken(self, x, operation):
        a = x * 1
        operation(a)
        return a * 1

    model = module_of(bound)
    assert told_of(model, "./y", torch.ones(1)) == {"./y#0": 2, "./y#1": 4}
    with edit(model, {"./y#1": scale(2.0)}):
        assert model(torch.ones(1)) == 8
    model = module_of(taken)
    told_of(model, "./a", torch.zeros(1), torch.exp_)
    assert told_of(model, "./exp", torch.zeros(1), torch.exp) == {"./exp": 1}


def test_an_operation_that_is_called_like_a_variable_which_holds_it():
    @torch.library.custom_op("tenterhook_tests::fused", mutates_args=())
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def forward(self, x, fused):
        return fused(x) + 1

    model = module_of(forward)
    assert told_of(model, "./fused", torch.ones(1), torch.ops.tenterhook_tests.fused) == {"./fused": 3}
