"""Ranges, lists and what is below a class, in addresses."""

import re

import pytest
import torch
from torch import nn

from tenterhook import AddressError, capture, edit, sites
from tenterhook.addresses.grammar import Address, choices, parse
from tenterhook.addresses.sites import resolve
from tenterhook.changes import scale, zero


class LayerNorm(nn.Module):
    """Another of that name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        q = self.attn(self.ln(x))
        k = q * 2
        v = k + 1
        return x + self.mlp(v)


class Net(nn.Module):
    def __init__(self, many=6):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(many))
        self.ln = LayerNorm()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.ln(x)


def names(model, selector):
    return [str(site) for site in resolve(model, selector)]


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("h.{2..4}", ["h.2", "h.3", "h.4"]),
        ("h.{0,3,5}", ["h.0", "h.3", "h.5"]),
        ("h.{5,0..1}", ["h.0", "h.1", "h.5"]),
        ("h.{0, 3}.{ln,attn}", ["h.0.ln", "h.0.attn", "h.3.ln", "h.3.attn"]),
        ("h.{1}.m{lp}.*", ["h.1.mlp.0", "h.1.mlp.1"]),
        ("h.{1,2}<Block>:in", ["h.1:in", "h.2:in"]),
        ("grad(h.{0..1}@0)", ["grad(h.0@0)", "grad(h.1@0)"]),
        ("h.{0,1}.attn.{weight,bias}", [f"h.{i}.attn.{name}" for i in (0, 1) for name in ("weight", "bias")]),
        ("h.{0,1}/{q,k}", ["h.0/q", "h.0/k", "h.1/q", "h.1/k"]),
        ("h.0/{q,k}#0", ["h.0/q#0", "h.0/k#0"]),
        ("**<LayerNorm>.weight", ["ln.weight", *(f"h.{i}.ln.weight" for i in range(6))]),
        ("h.{0,2}.**<LayerNorm>.{weight,bias}", [f"h.{i}.ln.{name}" for i in (0, 2) for name in ("weight", "bias")]),
        ("**<torch.nn.modules.normalization.LayerNorm>.bias", [f"h.{i}.ln.bias" for i in range(6)]),
        ("**<test_globs.LayerNorm>", ["ln"]),
        ("h.{0,1}<Block>.mlp.0:in[0]", ["h.0.mlp.0:in[0]", "h.1.mlp.0:in[0]"]),
        ("*<Net>.seen", []),
        (".<Net>.seen", ["seen"]),
        ("grad(h.*<Block>.**.weight)", None),
    ],
)
def test_what_is_meant(selector, meant):
    model = Net()
    if meant == []:
        with pytest.raises(AddressError):
            names(model, selector)
        return
    if meant is None:
        meant = [f"grad({n})" for n, _ in model.named_parameters() if n.startswith("h.") and n.endswith("weight")]
    assert sorted(names(model, selector)) == sorted(meant)
    assert parse(str(parse(selector))) == parse(selector)


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("h.{7..9}", ["nothing in Net answers to 'h.{7..9}'", "h has 0, 1, 2, 3, 4, 5"]),
        ("h.{4..9}", ["nothing there is called 6, 7, 8, 9", "h has 0, 1, 2, 3, 4, 5"]),
        ("h.{0,50}.ln", ["nothing there is called 50"]),
        ("{h,g}.0", ["nothing there is called g", "Net has h, ln, seen"]),
        ("h.0.{attn,mpl}", ["nothing there is called mpl", "h.0 has ln, attn, mlp"]),
        ("h.{8..40}.attn", ["h has 0, 1, 2, 3, 4, 5"]),
        ("**<LayerNorm>.gain", ["a LayerNorm has weight"]),
        ("**<Block>.attn.gain", ["a Block has ln, attn, mlp, mlp.0, mlp.1, ln.weight"]),
        ("**<Layernorm>.weight", ["its classes are Block, LayerNorm", "did you mean **<LayerNorm>"]),
        ("h.{0,{1,2}}", ["not nested"]),
        ("h.{0,1", ["choices are written {0,3,5}, {2..4}"]),
        ("h.{}", ["choices are written"]),
        ("h.{4..2}", ["from low to high"]),
        ("h.{1,}", ["choices are written"]),
        ("h.{1...3}", ["choices are written"]),
        ("h.{-2..-1}", ["choices are written"]),
        ("h.{0..99999999}", ["choices are written"]),
        ("h.0/{q,{k}}", ["not nested"]),
        ("**<Block>.", ["it has an empty part"]),
    ],
)
def test_what_there_is_instead(selector, said):
    with pytest.raises(AddressError) as raised:
        resolve(Net(), selector)
    assert all(words in str(raised.value) for words in said), str(raised.value)


def test_long_lists_are_cut():
    with pytest.raises(AddressError, match=r"h has 0, 1, 2, 3, 4, 5, 6, 7, …, 19"):
        resolve(Net(20), "h.{20..30}")
    with pytest.raises(AddressError, match=r"called 2, 3, 4, 5, 6, 7 … \(10 in all\)"):
        resolve(Net(2), "h.{0..11}")


def test_shared_modules_answer_to_each_of_their_names():
    model = Net(3)
    model.h[2] = model.h[0]
    assert names(model, "h.{1,2}") == ["h.1", "h.2"] and names(model, "h.{0..2}") == ["h.0", "h.1"]
    model.again = model.ln
    assert names(model, ".<Net>.{ln,again}.weight") == ["ln.weight"]


def test_names_with_braces_of_their_own():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("{0,1}", "a{b}", "0", "1")})
    assert names(model, "{0,1}") == [r"\{0,1\}"] and names(model, r"a\{b\}") == [r"a\{b\}"]
    assert names(model, r"\{0,1\}.weight") == [r"\{0,1\}.weight"]
    assert names(model, "{0,1}.weight") == ["0.weight", "1.weight"]
    assert parse(r"\{0,1\}") == Address(r"\{0,1\}") and not parse(r"\{0,1\}").is_glob
    assert names(model, "{0,1}<Linear>") == ["0", "1"]


def test_choices_read_as_they_are_written():
    assert choices("{0, 2..4 ,x}") == ["0", "2", "3", "4", "x"]
    assert choices("{1.5}") == ["1.5"] and choices("{..}") == choices("{}") == choices("{a..c}") == []


def test_in_the_verbs():
    model, x = Net(), torch.randn(2, 4)
    with capture(model, "h.{1..2}", "h.{0,5}/{q,k}", "**<LayerNorm>.weight", "grad(**<LayerNorm>.weight)") as seen:
        model(x).sum().backward()
    assert torch.equal(seen["h.{0}/k"]["h.0/k"], seen["h.0/q"] * 2) and len(seen.calls("h.{1,2}")) == 2
    assert len(seen.calls("**<LayerNorm>.weight")) == 7 and len(seen.calls("h.{0,5}/{q,k}")) == 4
    assert torch.equal(seen["grad(h.3.ln.weight)"], model.h[3].ln.weight.grad)
    with edit(model, {"h.{0..5}.mlp": zero(), "ln<LayerNorm>.weight": scale(2.0)}):
        torch.testing.assert_close(model(x), 2 * x)
    shown = [str(site) for site in sites(model, match="h.{0,1}.ln")]
    assert shown == ["h.0.ln", "h.1.ln"]


def test_only_a_graph_has_no_parts_below_a_class():
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    with pytest.raises(AddressError, match=re.escape("a graph node has no parts")):
        capture(loss, "grad(**<MulBackward0>.0)")
