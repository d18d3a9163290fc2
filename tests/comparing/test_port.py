"""GPT-2 of transformers against a port that is written in another way, with other names and a fused attention."""

import pytest
import torch
from torch import nn

from tenterhook import compare
from tests.comparing.planted import CONFIGS, IDS, build

HEADS = 2


class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(50, 16), nn.Embedding(16, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)

    def forward(self, ids):
        h = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.qkv, self.o = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.n2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale, self.gelu, self.causal = 1.0, "tanh", True

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(mixed.transpose(1, 2).flatten(2)) * self.scale
        return x + self.down(nn.functional.gelu(self.up(self.n2(x)), approximate=self.gelu))


def ported():
    a, b = build("gpt2", CONFIGS["gpt2"]), Port().eval()
    mine = a.transformer
    with torch.no_grad():
        for other, weight in ((b.emb, mine.wte), (b.pos, mine.wpe), (b.out, a.lm_head)):
            other.weight.copy_(weight.weight)
        b.norm.load_state_dict(mine.ln_f.state_dict())
        for layer, block in zip(b.layers, mine.h, strict=True):
            layer.n1.load_state_dict(block.ln_1.state_dict())
            layer.n2.load_state_dict(block.ln_2.state_dict())
            pairs = ((layer.qkv, block.attn.c_attn), (layer.o, block.attn.c_proj))
            for other, one in (*pairs, (layer.up, block.mlp.c_fc), (layer.down, block.mlp.c_proj)):
                other.weight.copy_(one.weight.T)
                other.bias.copy_(one.bias)
    return a, b


def test_a_faithful_port_is_within_rounding():
    a, b = ported()
    found = compare(a, b, IDS)
    assert found.agree and not found.equal, found
    assert found.alignment.pairs["transformer.h.1"] == "layers.1"
    assert found.alignment.pairs["transformer.h.1.attn.c_attn"] == "layers.1.qkv"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (dict(scale=1.1), "x = x + self.o("),
        (dict(gelu="none"), "return x + self.down(nn.functional.gelu"),
        (dict(causal=False), "mixed = nn.functional.scaled_dot_product_attention"),
    ],
    ids=str,
)
def test_an_unfaithful_one_has_its_line_named(change, line):
    a, b = ported()
    vars(b.layers[1]).update(change)
    found = compare(a, b, IDS)
    assert (found.first.address, found.first.other) == ("transformer.h.1", "layers.1"), found
    assert found.first.line.startswith(line), found.first
