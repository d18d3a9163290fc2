"""What a capture is afterwards: a mapping of single values, wildcards, joined values, another device."""

import re
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tenterhook import AmbiguousError, NotSeenError, OverwrittenError, capture, edit
from tests.verbs.models import Host, mlp

x = torch.randn(3, 4)


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2))


def test_a_capture_is_a_mapping_of_single_values_named_in_full():
    model = twice()
    with capture(model, "0", "1:in", "3", "grad(0)", "grad(3.weight)") as seen:
        model(x).sum().backward()
    first = model[0](x)
    assert isinstance(seen, Mapping)
    assert list(seen) == list(seen.keys()) and list(seen)[:4] == ["0@0", "0@1", "1:in", "3"]
    assert set(seen) == {"0@0", "0@1", "1:in", "3", "grad(0@0)", "grad(0@1)", "grad(3.weight)"}
    assert len(seen) == len(seen.items()) == len(list(seen.values())) == 7
    for (address, value), same in zip(seen.items(), seen.values(), strict=True):
        assert torch.equal(value, seen[address]) and torch.equal(value, same)
    assert torch.equal(seen["0@0"], first) and torch.equal(seen["0@1"], model[0](first.tanh()))
    assert "0@1" in seen and "0@2" not in seen and "1" not in seen
    assert seen.get("1") is None and seen.get("nonsense", 3) == 3 and torch.equal(seen.get("0@0"), first)
    assert {seen: 1}[seen] == 1 and seen == seen and seen != {}


def test_a_backward_pass_that_comes_again_has_a_number():
    model = mlp()
    with capture(model, "grad(0)", "grad(2.weight)") as seen:
        out = model(x).sum()
        out.backward(retain_graph=True)
        (3 * out).backward()
    assert set(seen) == {"grad(0)#0", "grad(0)#1", "grad(2.weight)#0", "grad(2.weight)#1"}
    torch.testing.assert_close(seen["grad(2.weight)#1"], 3 * seen["grad(2.weight)#0"])
    torch.testing.assert_close(sum(seen.calls("grad(2.weight)")), model[2].weight.grad)
    with pytest.raises(NotSeenError, match=r"grad\(0\)#2: there was no such backward pass"):
        seen["grad(0)#2"]
    with pytest.raises(AmbiguousError, match=r"  grad\(0\)#1  3×8 float32"):
        seen["grad(0)"]


def test_what_two_selectors_mean_is_there_once():
    model = twice()
    with capture(model, "0", "0@1", "**<Linear>") as seen:
        model(x)
    assert sorted(seen) == ["0@0", "0@1", "3"] and len(list(seen.values())) == 3


@pytest.mark.parametrize("keep", ["all", "last"])
def test_the_names_say_which_calls_were_kept(keep):
    model = mlp()
    with capture(model, "0", keep=keep) as seen:
        for k in range(3):
            model(x + k)
    assert list(seen) == (["0@2"] if keep == "last" else ["0@0", "0@1", "0@2"])
    assert torch.equal(seen["0@2"], model[0](x + 2))


def test_leaves_that_were_asked_for_have_their_own_names():
    model = Host()
    with capture(model, "inner:out[b]", "inner:in[x]") as seen:
        model(x, "dict")
    assert sorted(seen) == ["inner:in[x]", "inner:out[b]"] and torch.equal(seen["inner:out[b]"], x + 1)


def test_a_wildcard_gives_a_dict_however_many_it_means():
    model = twice()
    with capture(model) as seen:
        model(x)
    assert list(seen["*<Linear>"]) == ["0@0", "0@1", "3"]
    assert list(seen["*<Tanh>"]) == list(seen[nn.Tanh]) == list(seen[lambda name, m: name == "1"]) == ["1"]
    assert torch.equal(seen["*<Tanh>"]["1"], seen["1"])
    assert torch.equal(seen[model[3]], seen["3"]) and torch.equal(seen["3<Linear>"], seen["3"])
    with pytest.raises(AmbiguousError, match="0@0:2 means 2 values"):
        seen["0@0:2"]


def test_a_wildcard_inside_a_forward_gives_a_dict():
    class Own(nn.Module):
        def forward(self, x):
            y = x + 1
            return y * 2

    model = Own()
    with capture(model, "./*") as seen:
        model(x)
    assert torch.equal(seen["./y"], x + 1) and torch.equal(seen["./*"]["./y"], x + 1)
    assert list(seen["./y*"]) == ["./y"]


def test_a_module_with_a_star_in_its_name_is_one_module():
    model = nn.Module()
    model.add_module("a*b", nn.Linear(4, 4))
    model.forward = lambda x: model._modules["a*b"](x)
    with capture(model, "a*b") as seen:
        out = model(x)
    (name,) = seen
    assert torch.equal(seen[name], out)


def test_stack():
    model = twice()
    with capture(model, "0", "1", "3", reduce=lambda v: v.mean()) as small, capture(model, "0", "1", "3") as seen:
        model(x)
    assert torch.equal(seen.stack("0"), torch.stack(seen.calls("0")))
    assert torch.equal(seen.stack("0", dim=1), torch.stack(seen.calls("0"), 1))
    assert torch.equal(small.stack("*"), torch.stack([v.mean() for v in seen["*"].values()]))
    with pytest.raises(ValueError, match=re.escape("only values of one shape can be stacked")) as error:
        seen.stack("*")
    assert "  3  3×2 float32" in str(error.value) and "reduce=" in str(error.value)


def test_cat_joins_the_calls_of_one_place():
    model, batches = mlp(), [torch.randn(n, 4) for n in (3, 2, 4)]
    with capture(model, "0", "1", "2.weight", reduce=lambda v: v[:, :2]) as seen:
        for batch in batches:
            model(batch)
    torch.testing.assert_close(seen.cat("0"), model[0](torch.cat(batches))[:, :2])
    with pytest.raises(AmbiguousError, match=r"\* means several places \(0@0, 0@1, 0@2, 1@0 …\)"):
        seen.cat("*")
    with pytest.raises(ValueError, match="values that are joined along dimension 1 have one shape but for that"):
        seen.cat("0", dim=1)


def test_what_is_no_tensor_cannot_be_joined():
    lstm = nn.LSTM(4, 5)
    with capture(lstm, ".", "bias_hh_l0") as seen, capture(lstm, ".[0]", reduce=lambda v: v.sum().item()) as numbers:
        out, _ = lstm(x)
    with pytest.raises(TypeError, match=r"\. is tuple\(0, 1\), and cat is for tensors; name one of its leaves"):
        seen.cat(".")
    assert torch.equal(seen.cat(".[0]"), out)
    assert numbers.stack(".[0]").tolist() == [pytest.approx(out.sum().item())]
    with pytest.raises(ValueError, match="there is no dimension 0 to join these along"):
        numbers.cat(".[0]")


def test_values_overwritten_since_raise_when_they_are_reached():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    with capture(model, "0", "2", copy=False) as seen:
        model(x)
    assert list(seen) == ["0", "2"]
    for read in (lambda: dict(seen), lambda: list(seen.values()), lambda: seen.to("cpu"), lambda: seen.stack("0")):
        with pytest.raises(OverwrittenError, match=r"0.* was kept with copy=False"):
            read()


def test_to_is_a_capture_of_its_own():
    model = twice()
    with capture(model, "0", "grad(0)", "1:in", "grad(3)") as seen:
        out = model(x)
        out[:, 0].sum().backward()
        early = seen.to("cpu")
        model(x)
    assert len(early.calls("0")) == 2 and len(seen.calls("0")) == 4
    assert torch.equal(early["grad(0@1)"], seen["grad(0@1)"]) and torch.equal(early[nn.Linear]["0@0"], seen["0@0"])
    assert early.report().silent == [] and repr(early).startswith("captured 6 values")
    meta = seen.to("meta")
    assert all(value.is_meta for value in meta.values()) and list(meta) == list(seen)
    with edit(model, early.patch("0")):
        assert torch.equal(model(-x), out)


def test_the_head_says_how_much_there_is():
    model = mlp()
    with capture(model) as seen:
        model(torch.randn(1000, 4))
    assert repr(seen).splitlines()[0] == "captured 4 values (80 kB) at 4 of 4 addresses"
    with capture(model, "0", reduce=lambda v: 1.0) as seen:
        model(x)
    assert repr(seen).splitlines()[0] == "captured 1 value (0 B) at 1 of 1 address"


def test_a_long_capture_names_what_never_came():
    model = nn.Sequential(*[nn.Identity() for _ in range(30)], nn.Sequential(nn.Linear(1, 1)))
    with capture(model, "**", "grad(30.0.weight)") as seen:
        model[:30](x)
    lines = repr(seen).splitlines()
    assert len(lines) == 25 and lines[23].startswith("… ")
    assert lines[24] == "never came: ., 30, 30.0, grad(30.0.weight)"
