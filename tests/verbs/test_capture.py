"""capture: values and structures, calls, and what can be looked up. Gradients are in hooks/test_gradients.py."""

import re

import pytest
import torch
from torch import nn

from tenterhook import AmbiguousError, NotSeenError, capture
from tenterhook.values.tree import leaves
from tests.verbs.models import Host, mlp

x = torch.randn(3, 4)


def test_values_are_what_the_model_computed_whatever_follows_in_place():
    model = mlp()
    with capture(model, "0", "1", "2:in", ".") as seen:
        out = model(x)
    assert torch.equal(seen["0"], model[0](x))
    assert (seen["0"] < 0).any()
    assert torch.equal(seen["1"], seen["0"].relu())
    assert torch.equal(seen["2:in"], seen["1"])
    assert torch.equal(seen["."], out)
    assert not any(seen[address].requires_grad for address in seen)
    assert list(seen) == ["0", "1", "2:in", "."]
    assert len(seen) == 4


def test_no_selector_means_every_modules_output():
    model = mlp()
    with capture(model) as seen:
        model(x)
    assert list(seen) == ["0", "1", "2", "."]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "named", "data"])
def test_structures_keep_their_type_and_are_copied(kind):
    model = Host()
    with capture(model, "inner") as seen:
        out = model(x, kind)
    kept = seen["inner"]
    assert type(kept) is type(out)
    pairs = list(zip(leaves(kept), leaves(out), strict=True))
    assert len(pairs) == 2
    for (path, mine), (other, theirs) in pairs:
        assert path == other
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("tuple", "[1][0]"), ("tuple", "[-1][0]"), ("list", "[1]"), ("dict", "[b]"), ("named", "[right]"),
        ("named", "[1]"), ("data", "[extra][b]"),
    ],
)  # fmt: skip
def test_leaves_asked_before_or_after(kind, leaf):
    model = Host()
    with capture(model, f"inner:out{leaf}") as before, capture(model, "inner") as whole:
        model(x, kind)
    assert torch.equal(before[f"inner{leaf}"], x + 1)
    assert torch.equal(whole[f"inner{leaf}"], x + 1)


@pytest.mark.parametrize("kind", ["none", "text"])
def test_values_without_tensors(kind):
    model = Host()
    with capture(model, "inner") as seen:
        out = model(x, kind)
    assert seen["inner"] == out


@pytest.mark.parametrize(
    ("args", "kwargs", "whole"),
    [
        ((x,), {}, lambda v: torch.equal(v, x)),
        ((), {"x": x}, lambda v: torch.equal(v, x)),
        ((x, "dict"), {}, lambda v: isinstance(v, tuple) and torch.equal(v[0], x) and v[1] == "dict"),
        ((x,), {"scale": 2.0}, lambda v: list(v) == [0, "scale"] and torch.equal(v[0], x) and v["scale"] == 2.0),
    ],
)
def test_inputs_by_position_and_by_name_however_they_were_passed(args, kwargs, whole):
    model = Host()
    with capture(model, "inner:in", "inner:in[x]", "inner:in[0]") as seen:
        model(*args, **kwargs)
    assert whole(seen["inner:in"])
    assert torch.equal(seen["inner:in[x]"], x)
    assert torch.equal(seen["inner:in[0]"], x)


def test_keyword_only_inputs():
    model = Host()
    with capture(model, "inner:in[mask]", "inner:in") as seen:
        model(x, mask=x > 0)
    assert torch.equal(seen["inner:in[mask]"], x > 0)
    assert torch.equal(seen["inner:in"]["mask"], x > 0)


def test_an_input_that_was_not_given_says_what_was():
    model = Host()
    with capture(model, "inner:in[mask]") as seen:
        model(x)
    with pytest.raises(NotSeenError, match=re.escape("called without [mask]; it was given [0]")):
        seen["inner:in[mask]"]


def test_calls():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer, layer)
    with capture(model, "0", "1@0") as seen, capture(model, "0@1") as one, capture(model, "0@-1") as last:
        out = model(x)
        model(x)
    assert len(seen.calls("0")) == 6
    first = layer(x)
    assert torch.equal(seen["0@0"], first)
    assert torch.equal(seen["0@1"], layer(first.relu()))
    assert torch.equal(seen["0@2"], out)
    assert torch.equal(seen["0@-1"], out)
    assert len(seen.calls("0@1:3")) == 2
    assert len(seen.calls("0@-2:")) == 2
    assert torch.equal(one["0"], seen["0@1"])
    assert torch.equal(last["0"], out)
    assert len(last._taps[0].action.entries(last._taps[0])) == 1
    assert len(seen.calls("1")) == 1


def test_several_values_are_an_error_that_lists_them():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    with capture(model, "0") as seen:
        model(x)
    with pytest.raises(AmbiguousError) as error:
        seen["0"]
    assert str(error.value).splitlines() == [
        "0 means 2 values:",
        "  0@0  3×4 float32",
        "  0@1  3×4 float32",
        "index one of them, or use seen.calls('0') for all",
    ]
    with pytest.raises(NotSeenError, match="it was called 2 times; calls count from @0 to @1"):
        seen["0@2"]


def test_a_module_known_by_two_names_has_both():
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.second = model.first
    model.forward = lambda x: model.second(x)
    with capture(model, "first") as seen:
        out = model(x)
    assert torch.equal(seen["second"], out)
    assert torch.equal(seen["first"], out)
    assert torch.equal(seen[model.first], out)
    with capture(model) as seen:
        model(x)
    assert len(seen.calls("second")) == 1
    with capture(model, "second.weight") as seen:
        pass
    assert torch.equal(seen["first.weight"], model.first.weight)


def test_lookups_by_glob_class_module_and_predicate():
    model = mlp()
    with capture(model) as seen:
        model(x)
    assert len(seen.calls("**<Linear>")) == 2
    assert len(seen.calls(nn.Linear)) == 2
    assert list(seen["**<ReLU>"]) == ["1"] and torch.equal(seen["**<ReLU>"]["1"], seen["1"])
    assert torch.equal(seen[model[2]], seen["2"])
    assert torch.equal(seen[lambda name, module: name == "2"]["2"], seen["2"])
    assert "2" in seen and "0:in" not in seen and "nonsense" not in seen and 3 not in seen


def test_parameters_and_buffers_are_read_on_entering():
    model = nn.Sequential(nn.BatchNorm1d(4))
    mean = model[0].running_mean.clone()
    with capture(model, "0.running_mean", "0.weight") as seen:
        model(x)
    assert torch.equal(seen["0.running_mean"], mean)
    assert not torch.equal(model[0].running_mean, mean)
    assert torch.equal(seen["0.weight"], model[0].weight)


def test_what_was_not_asked_for():
    model = mlp()
    with capture(model, "0") as seen:
        model(x)
    with pytest.raises(NotSeenError, match="'1' was not asked for in this session; captured: 0"):
        seen["1"]
    host = Host()
    with capture(host, "inner[0]") as seen:
        host(x, "tuple")
    with pytest.raises(NotSeenError, match=re.escape("only inner:out[0] was captured")):
        seen["inner[1]"]


def test_a_leaf_that_is_not_there():
    model = Host()
    with capture(model, "inner[logits]", "inner") as seen:
        model(x, "dict")
    for address in ("inner[logits]", "inner:out[nope]"):
        with pytest.raises(NotSeenError, match=re.escape("dict(a, b), with leaves [a], [b]")) as error:
            seen[address]
        assert "calls" not in str(error.value)


def test_an_object_that_is_no_tensor_is_no_value_of_its_own():
    class Cached(nn.Module):
        def forward(self, x):
            return x, object()

    model = Cached()
    with capture(model, ".[1]", "grad(.)", ".") as seen:
        model(x.clone().requires_grad_())[0].sum().backward()
    with pytest.raises(NotSeenError, match="is a object: no tensor, so it was not kept"):
        seen[".[1]"]
    assert repr(seen["."][1]) == "<object: not a tensor, not kept>"
    assert seen["grad(.)"][1] is None


def test_inference_mode_values_can_be_used_afterwards():
    model = mlp()
    for options in ({}, {"copy": False}, {"dtype": torch.float64}):
        with torch.inference_mode(), capture(model, "2", "0:in", **options) as seen:
            model(x)
        for address in ("2", "0:in"):
            value = seen[address].requires_grad_()
            (value * value).sum().backward()
            assert torch.equal(value.grad, 2 * value)


def test_a_gradient_inside_vmap_is_said_to_be_the_transforms():
    model = nn.Linear(4, 4)
    with capture(model, "grad(.)") as seen:
        torch.vmap(model)(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert "inside vmap or jvp a value has no gradient of its own" in str(seen.report())


def test_values_inside_vmap_and_func_grad():
    model = nn.Linear(4, 2)
    with capture(model, ".") as seen:
        torch.vmap(lambda row: model(row), in_dims=1)(x.T)
        torch.func.grad(lambda v: model(v).sum())(x)
    assert len(seen.calls(".")) == 2
    for value in seen.calls("."):
        torch.testing.assert_close(value, model(x).detach())
        assert value.add(1).sum().item() == pytest.approx((model(x) + 1).sum().item(), rel=1e-4)


KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(2, 2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "bool": lambda: torch.ones(2, dtype=torch.bool),
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "empty": lambda: torch.ones(0, 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")  # deprecated in torch, and still met in the wild
def test_other_kinds_of_tensors(kind):
    value = KINDS[kind]()
    model = nn.Identity()
    with capture(model, ".", grad=True) as seen:
        model(value)
    kept = seen["."]
    assert kept.dtype == value.dtype and kept.shape == value.shape and kept.layout == value.layout
    assert kept is not value
    assert "grad(.)" in seen.report().silent


def test_a_captured_says_what_it_is():
    model = mlp()
    with capture(model, "0", "grad(0)") as seen:
        model(x)
        model(x)
    assert repr(seen).splitlines() == [
        "captured 2 values (192 B) at 1 of 2 addresses",
        *str(seen.report()).splitlines(),
    ]


def test_calls_of_which_nothing_could_be_kept_are_counted():
    class Sometimes(nn.Module):
        def forward(self, x, first=False):
            return object() if first else x * 2

    model = Sometimes()
    with capture(model, ".") as seen:
        model(x, first=True)
        model(x)
        model(x + 1)
    assert torch.equal(seen[".@1"], x * 2)
    assert torch.equal(seen[".@-1"], (x + 1) * 2)
    assert [value is None for value in seen.calls(".")] == [True, False, False]


def test_what_was_captured_outlives_the_model():
    def run():
        model = mlp()
        with capture(model, "*", grad=True) as seen:
            model(x).sum().backward()
        return seen

    seen = run()
    assert len(seen.calls("*")) == len(seen.calls("grad(**)")) == 3
    assert seen["2"].shape == (3, 2)


def test_calls_without_a_gradient_have_none_in_their_place():
    model, passes = mlp(), []
    with capture(model, "0", "grad(0)", "grad(0:in)", "grad(2@0:2)") as seen:
        for k in range(4):
            with torch.set_grad_enabled(k != 1):
                out = model(x.clone().requires_grad_()).sum()
            passes.append(out)
        passes[3].backward()
        passes[0].backward(retain_graph=True)
        passes[0].backward()
    assert len(seen.calls("0")) == 4
    for address in ("grad(0)", "grad(0:in)"):
        assert [grad is None for grad in seen.calls(address)] == [False, False, True, True, False]
    assert [grad is None for grad in seen.calls("grad(2)")] == [False, False, True]
    assert len(seen.calls("grad(0@2:)")) == 2
    with pytest.raises(NotSeenError):
        seen.calls("grad(0@1:3)")
    with capture(model, "grad(0)", keep="last") as seen:
        model(x)
        model(x).sum().backward()
    assert len(seen.calls("grad(0)")) == 1


def test_values_inside_a_forward_that_came_in_some_calls_stay_beside_their_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, skip):
            h = self.fc(x)
            if not skip:
                y = h * 2
                h = y
            return h

    model = Model()
    with capture(model, "./y", "grad(./y)") as seen:
        outs = [model(x, skip) for skip in (True, False, True, False, False)]
        (outs[1].sum() + outs[4].sum()).backward()
    assert [grad is None for grad in seen.calls("grad(./y)")] == [False, True, False]
    assert len(seen.calls("./y")) == 3
