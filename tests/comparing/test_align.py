"""Models whose modules have other names."""

import pytest
import torch
from torch import nn

from tenterhook import AddressError, compare
from tenterhook.comparing.align import Alignment

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Mine(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.h = nn.ModuleList(MyBlock() for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


class MyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.fc, self.act, self.proj = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.proj(self.act(self.fc(self.ln(x))))


class Theirs(nn.Module):
    """The same function, written by somebody else."""

    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(TheirBlock() for _ in range(depth))
        self.out = nn.Linear(8, 3)

    def forward(self, hidden):
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return {"logits": self.out(hidden)}


class TheirBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = 1.0

    def forward(self, hidden):
        return hidden + self.scale * self.mlp(self.norm(hidden)), None


def pair(depth=2):
    a, b = Mine(depth), Theirs(depth)
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    return a, b


def test_partners_are_found_by_shapes_and_order():
    a, b = pair()
    alignment = Alignment(a, b)
    wanted = {".": ".", "head": "out"}
    for i in range(2):
        wanted |= {
            f"h.{i}": f"layers.{i}",
            f"h.{i}.ln": f"layers.{i}.norm",
            f"h.{i}.fc": f"layers.{i}.mlp.0",
            f"h.{i}.proj": f"layers.{i}.mlp.2",
        }
    assert wanted.items() <= alignment.pairs.items()
    assert "head = out   by parameters" in str(alignment)


def test_a_port_is_compared_in_place():
    a, b = pair()
    assert compare(a, b, X).equal
    b.layers[1].scale = 1.5
    found = compare(a, b, X)
    assert (found.first.address, found.first.other) == ("h.1", "layers.1")
    assert "self.scale * self.mlp" in found.first.line and "in b" in str(found)


def test_what_has_no_partner_is_listed():
    a, b = pair()
    b.extra = nn.Linear(8, 5)
    a.mine = nn.Conv1d(1, 1, 3)
    found = compare(a, b, X)
    assert found.equal and "extra" in found.only_b and "mine" in found.only_a
    assert "in b alone: " in str(found)


def test_rename_comes_first():
    a, b = pair()
    alignment = Alignment(a, b, {"h.*": "layers.*", "h.*.fc": "layers.*.mlp.0"})
    assert alignment.how["h.1"] == alignment.how["h.1.fc"] == "rename"
    crossed = Alignment(a, b, {"h.0": "layers.1", "h.0.ln": "layers.1.norm"})
    assert crossed.pairs["h.0"] == "layers.1" and crossed.pairs["h.0.ln"] == "layers.1.norm"
    with pytest.raises(AddressError, match="b does not have"):
        Alignment(a, b, {"h.*": "blocks.*"})


def test_a_part_of_a_larger_model():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model = inner

        def forward(self, x):
            return self.model(x)

    a = Mine()
    assert compare(a, Around(a), X, rename={".": "model"}).equal


def test_layouts_are_undone_by_a_function():
    class Flat(Mine):
        def forward(self, x):
            return super().forward(x).T

    a, b = Mine(), Flat()
    b.load_state_dict(a.state_dict())
    assert "5×3 against 3×5" in str(compare(a, b, X).first)
    assert compare(a, b, X, layout={".": lambda value: value.T}).equal


def test_a_layout_is_used_where_b_goes_on_with_the_value():
    class Channels(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.last = last
            self.first, self.second = Conv(last), Conv(last)

        def forward(self, x):
            return self.second(self.first(x))

    class Conv(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.conv, self.last = nn.Conv1d(3, 3, 3, padding=1), last

        def forward(self, x):
            return self.conv(x.transpose(1, 2)).transpose(1, 2) if self.last else self.conv(x)

    a, b = Channels(False), Channels(True)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.first.conv.weight[0, 0, 0] += 0.5
    x = torch.randn(2, 3, 7)
    turned = {name: lambda value: value.transpose(1, 2) for name in ("first", "second", ".")}
    found = compare(a, b, x, b_inputs=x.transpose(1, 2), layout=turned)
    assert found.first.address == "first.conv"
    assert found["second"].own.is_equal or found["second"].own.units < 5


def test_dimensions_of_size_one_do_not_matter():
    class Rows(nn.Module):
        def __init__(self, more):
            super().__init__()
            self.table, self.more = nn.Embedding(5, 8), more

        def forward(self, x):
            places = torch.arange(5)
            return x + self.table(places[None] if self.more else places)

    a, b = Rows(True), Rows(False)
    b.load_state_dict(a.state_dict())
    assert compare(a, b, X).equal


def test_a_whole_block_is_the_partner_of_a_block_and_not_of_a_part():
    class Nested(MyBlock):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(self.fc, self.act, self.proj)

    class Host(Mine):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(Nested() for _ in range(2))

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(FlatBlock() for _ in range(2))
            self.out = nn.Linear(8, 3)

    class FlatBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    alignment = Alignment(Host(), Flat())
    assert alignment.pairs["h.1"] == "blocks.1" and "h.1.mlp" not in alignment.pairs
