"""The numbers of captured values, against torch's own."""

import math

import pytest
import torch
from torch import nn

from tenterhook import capture
from tenterhook.stats.measured import measured
from tests.verbs.models import Host, mlp

x = torch.randn(3, 4)


def test_stats_are_those_of_each_value():
    model = mlp()
    with capture(model, "**", "grad(0.weight)") as seen:
        model(x).sum().backward()
    stats = seen.stats()
    assert [row["address"] for row in stats] == list(seen) and len(stats) == 5
    for row, value in zip(stats.rows, seen.values(), strict=True):
        wide = value.double()
        assert row["shape"] == tuple(value.shape) and row["dtype"] == "float32"
        assert row["mean"] == pytest.approx(wide.mean().item(), abs=1e-12)
        assert row["std"] == pytest.approx(wide.std(correction=0).item(), abs=1e-9)
        assert row["absmax"] == pytest.approx(wide.abs().max().item())
        assert (row["zeros"], row["nonfinite"]) == (int((value == 0).sum()), 0)
    assert [row["address"] for row in seen.stats("0", "1")] == ["0", "1"]
    assert "address" in str(stats).splitlines()[0] and repr(stats) == str(stats) and "<td" in stats._repr_html_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_any_real_dtype(dtype):
    values = (torch.randn(5000) * 3).to(dtype)
    stats, wide = measured(values), values.double()
    assert stats.mean == pytest.approx(wide.mean().item(), abs=1e-12)
    assert stats.std == pytest.approx(wide.std(correction=0).item(), abs=1e-9)
    assert stats.zeros == int((wide == 0).sum())


def test_large_tensors_are_measured_in_pieces(monkeypatch):
    monkeypatch.setattr("tenterhook.stats.measured._PIECE", 7)
    values = torch.randn(100)
    values[[3, 50, 99]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    stats, finite = measured(values), values[values.isfinite()].double()
    assert (stats.count, stats.nan, stats.pos_inf, stats.neg_inf) == (100, 1, 1, 1)
    assert stats.mean == pytest.approx(finite.mean().item()) and stats.absmax == finite.abs().max().item()
    assert stats.std == pytest.approx(finite.std(correction=0).item())


def test_what_has_no_such_numbers_says_so():
    values = {"none": torch.empty(0), "nan": torch.full((2,), torch.nan), "complex": torch.zeros(2, dtype=torch.cfloat)}
    model = nn.Identity()
    found = {}
    for name, value in values.items():
        with capture(model, ".") as seen:
            model(value)
        (found[name],) = seen.stats().rows
        assert "–" in str(seen.stats())
    assert math.isnan(found["none"]["mean"]) and found["none"]["zeros"] == 0
    assert math.isnan(found["nan"]["absmax"]) and found["nan"]["nonfinite"] == 2
    assert found["complex"]["mean"] is None and found["complex"]["dtype"] == "complex64"


def test_structures_have_a_row_for_each_leaf_and_numbers_have_one():
    model = Host()
    with capture(model, "inner") as seen, capture(model, "inner:out[a]", reduce=lambda v: v.max().item()) as numbers:
        model(x, "dict")
    assert [row["address"] for row in seen.stats()] == ["inner:out[a]", "inner:out[b]"]
    (row,) = numbers.stats()
    assert (row["dtype"], row["shape"], row["mean"]) == ("float", (), x.max().item())


def test_leaves_of_backward_passes_keep_their_numbers():
    model = Host()
    ready = x.clone().requires_grad_()
    with capture(model, "grad(inner)") as seen:
        out = model(ready, "dict")
        for _ in range(2):
            out["a"].sum().backward(retain_graph=True)
    assert [row["address"] for row in seen.stats()] == ["grad(inner:out[a])#0", "grad(inner:out[a])#1"]


def test_a_data_frame_can_be_made_of_the_rows():
    pandas = pytest.importorskip("pandas")
    model = mlp()
    with capture(model) as seen:
        model(x)
    frame = pandas.DataFrame(seen.stats().rows)
    assert list(frame.columns) == ["address", "shape", "dtype", "mean", "std", "absmax", "zeros", "nonfinite"]
