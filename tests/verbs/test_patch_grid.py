"""patch_grid: each value of the clean run in the corrupted one, against hooks by hand."""

import builtins

import pytest
import torch
from torch import nn

from tenterhook import AddressError, EditError, patch_grid


class Layer(nn.Module):
    def __init__(self, several=False):
        super().__init__()
        self.fc, self.several = nn.Linear(4, 4), several

    def forward(self, x):
        y = x + self.fc(x).tanh().cumsum(1)
        return (y, y[:, 0]) if self.several else y


class Net(nn.Module):
    def __init__(self, shared=False):
        super().__init__()
        layers = [Layer() for _ in range(3)]
        self.h = nn.ModuleList([layers[0]] * 3 if shared else layers)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return self.out(x)


def metric(out):
    return out[0, -1, 2] - out[0, -1, 1]


def by_hand(model, clean, corrupt, layer, position, dim=1):
    kept = []
    handle = model.h[layer].register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    model(clean)
    handle.remove()
    calls = iter(kept)

    def put(module, args, out):
        out = out.clone()
        out.select(dim, position).copy_(next(calls).select(dim, position))
        return out

    handle = model.h[layer].register_forward_hook(put)
    value = metric(model(corrupt))
    handle.remove()
    return value.item()


@pytest.mark.parametrize("shared", [False, True])
def test_the_grid_is_what_hooks_by_hand_give(shared):
    model, clean, corrupt = Net(shared), torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    grid = patch_grid(model, clean, corrupt, "h.*", range(6), metric, at_once=5)
    layers = [0] if shared else [0, 1, 2]
    assert grid.sites == [f"h.{i}" for i in layers] and grid.positions == list("012345")
    truth = torch.tensor([[by_hand(model, clean, corrupt, i, p) for p in range(6)] for i in layers])
    torch.testing.assert_close(grid.values, truth, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(grid.clean, metric(model(clean)).detach())
    torch.testing.assert_close(grid.corrupt, metric(model(corrupt)).detach())
    assert not grid.values.requires_grad


def test_positions_with_names_slices_and_another_dimension():
    model, clean, corrupt = Net(), torch.randn(1, 6, 4), torch.randn(1, 6, 4)
    positions = {"last two": slice(4, None), "some": [0, 2], "all": ...}
    grid = patch_grid(model, clean, corrupt, ["h.2", "out"], positions, metric)
    assert grid.positions == list(positions) and grid.values.shape == (2, 3)
    torch.testing.assert_close(grid.values[:, 2], grid.clean.expand(2))
    torch.testing.assert_close(grid.values[:, 0], grid.clean.expand(2))
    torch.testing.assert_close(grid.values[:, 1], grid.corrupt.expand(2))
    units = patch_grid(model, clean, corrupt, "h.1", range(4), metric, dim=2)
    truth = [by_hand(model, clean, corrupt, 1, unit, dim=2) for unit in range(4)]
    torch.testing.assert_close(units.values[0], torch.tensor(truth), atol=2e-5, rtol=1e-4)
    assert patch_grid(model, clean, corrupt, "h.1", [slice(1, 3)], metric).positions == ["1:3"]


def test_it_reads_well():
    model, clean, corrupt = Net(), torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    grid = patch_grid(model, clean, corrupt, "h.*", {"the": 0, "cat": 1}, metric)
    lines = repr(grid).splitlines()
    assert lines[0].split() == ["the", "cat"] and lines[2].split()[0] == "h.0" and len(lines) == 6
    assert lines[-1] == f"metric: clean {grid.clean.item():.4g}, corrupt {grid.corrupt.item():.4g}"
    assert "<table" in grid._repr_html_()


def test_a_heat_map():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    model, clean, corrupt = Net(), torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    grid = patch_grid(model, clean, corrupt, "h.*", {"the": 0, "cat": 1}, metric)
    grid.values[0, 0] = torch.nan
    ax = grid.show()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["the", "cat"]
    assert [label.get_text() for label in ax.get_yticklabels()] == grid.sites
    (picture,) = ax.images
    shown = torch.from_numpy(picture.get_array().filled(torch.nan))
    assert torch.equal(shown.nan_to_num(7), grid.values.double().nan_to_num(7))
    low, high = picture.get_clim()
    assert (low + high) / 2 == pytest.approx(grid.corrupt.item())
    assert grid.show(ax) is ax
    matplotlib.pyplot.close("all")
    both = patch_grid(model, clean, corrupt, "h.*", [0], lambda out: out[0, -1, :2])
    assert both.values.shape == (3, 1, 2)
    with pytest.raises(ValueError, match=r"2 numbers for each run, and a heat map shows one"):
        both.show()


def test_without_matplotlib(monkeypatch):
    model, x = Net(), torch.randn(1, 2, 4)
    grid = patch_grid(model, x, x, "h.0", [0], metric)
    plain = builtins.__import__

    def missing(name, *args):
        if name == "matplotlib":
            raise ImportError(name)
        return plain(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install matplotlib; without it, print the grid, or take grid.values"):
        grid.show()


def test_what_cannot_be_patched_says_so():
    model, clean = Net(), torch.randn(1, 3, 4)
    with pytest.raises(AddressError, match="got 1 and 0 of them"):
        patch_grid(model, clean, clean, "h.0", [], metric)
    with pytest.raises(AddressError, match="got 0 and 1 of them"):
        patch_grid(model, clean, clean, [], [0], metric)
    with pytest.raises(IndexError, match=r"h.0: .*out of bounds.*it is 1×3×4 float32"):
        patch_grid(model, clean, clean, "h.0", [3], metric)
    with pytest.raises(EditError, match=r"h\.0\.fc\.weight: a parameter is shared by all rows"):
        patch_grid(model, clean, clean, "h.0.fc.weight", [0], metric)
    several = Layer(several=True)
    with pytest.raises(EditError, match=r"\. has several tensors, .*; name the one to patch: \.\[0\]"):
        patch_grid(several, clean, clean, ".", [0], lambda out: out[0].sum())
    assert patch_grid(several, clean, clean, ".:out[0]", [0], lambda out: out[0].sum()).sites == [".:out[0]"]


@pytest.mark.parametrize("position", [0, 2, -1, slice(0, 2), ...], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_inputs_of_unequal_length_raise_at_once(position, shared):
    model, clean, corrupt = Net(shared), torch.randn(1, 5, 4), torch.randn(1, 3, 4)
    what = r"h\.0 is 1×5×4 in the clean run and 1×3×4 in the corrupted one.*make both of one length"
    calls = []
    model.out.register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(EditError, match=what):
        patch_grid(model, clean, corrupt, "h.*", [position], metric)
    assert len(calls) == 2
    with pytest.raises(EditError, match=what.replace("5×4", "0×4").replace("3×4", "5×4").replace("0×4", "3×4")):
        patch_grid(model, corrupt, clean, "h.*", [position], metric)


def test_a_batch_may_be_of_another_size():
    model, clean, corrupt = Net(), torch.randn(1, 5, 4), torch.randn(3, 5, 4)
    grid = patch_grid(model, clean, corrupt, "h.*", range(5), metric)
    truth = torch.tensor([[by_hand(model, clean, corrupt, i, p) for p in range(5)] for i in range(3)])
    torch.testing.assert_close(grid.values, truth, atol=2e-5, rtol=1e-4)
