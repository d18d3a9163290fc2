"""Tensors of every kind, their statistics as a recorded step has them, and a check against float64."""

import math

import numpy as np
import pytest
import torch

from tenterhook.record.gather import Gather
from tenterhook.stats import Stats
from tenterhook.values.tree import version_of


def measured(*tensors):
    """The statistics of each tensor, as a recorded step would have them."""
    gather = Gather(set())
    for i, tensor in enumerate(tensors):
        gather.add([i], tensor, version_of(tensor))
    gather.settle()
    found = {}
    for block in gather.blocks:
        numbers, bins = block.arrays()
        for places, row, its in zip(block.places, numbers, bins, strict=True):
            found[places[0]] = Stats.of(row, its)
    return [found.get(i) for i in range(len(tensors))]


def check(stats, values):
    """Against NumPy in float64."""
    values = np.asarray(values, np.float64).ravel()
    finite = values[np.isfinite(values)]
    assert stats.count == values.size
    assert stats.nan == np.isnan(values).sum()
    assert stats.pos_inf == (values == np.inf).sum()
    assert stats.neg_inf == (values == -np.inf).sum()
    assert stats.zeros == (values == 0).sum()
    assert sum(stats.histogram.values()) == stats.sampled <= values.size
    if not finite.size:
        assert math.isnan(stats.mean) and math.isnan(stats.rms) and math.isnan(stats.std) and math.isnan(stats.absmax)
        return
    scale = np.abs(finite).max()
    assert stats.min == finite.min() and stats.max == finite.max()
    assert stats.absmax == scale
    assert stats.mean == pytest.approx(finite.mean(), rel=1e-6, abs=1e-6 * scale)
    with np.errstate(over="ignore", under="ignore"):
        assert stats.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-5)
        assert stats.std == pytest.approx(finite.std(), rel=1e-3, abs=1e-7 * scale)


CASES = {
    "normal": torch.randn(10_000),
    "small": torch.randn(7, 3),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "constant": torch.full((5_000,), 3.3),
    "an outlier first": torch.randn(50_000).index_fill_(0, torch.arange(0, 50_000, 4096), 1e6),
    "large mean with NaN": (1e4 + 1e-2 * torch.randn(1 << 18)).index_fill_(0, torch.arange(0, 1 << 18, 4096), math.nan),
    "an outlier that is near": torch.full((4096,), 259371.1875).index_fill_(0, torch.tensor([0]), 293904.8125),
    "equal ones, then zeros": torch.cat([torch.full((16,), 3.3), torch.zeros(8_000)]),
    "mostly equal ones, then zeros": torch.cat([torch.full((30,), 3.3), torch.zeros(8_000)]),
    "large mean": 1e4 + 1e-2 * torch.randn(20_000),
    "huge": torch.tensor([3e38, -3e38, 1.0]).repeat(3_000),
    "tiny": torch.full((6_000,), 1e-40),
    "zeros": torch.zeros(5_000),
    "negative zero": torch.tensor([-0.0, 0.0, 1.0]),
    "NaN": torch.tensor([math.nan, 1.0, 2.0]).repeat(2_000),
    "all NaN": torch.full((5_000,), math.nan),
    "infinite": torch.tensor([math.inf, -math.inf, 1.0, -2.0]),
    "one NaN among many": torch.randn(100_000).index_fill_(0, torch.tensor([99_999]), math.nan),
    "float64": torch.randn(6_000, dtype=torch.float64) * 1e100,
    "bfloat16": torch.randn(6_000).bfloat16(),
    "float16": torch.randn(5).half(),
    "float8": torch.randn(300).to(torch.float8_e4m3fn),
    "integer": torch.arange(-5, 10_000),
    "bool": torch.tensor([True, False, True]),
    "transposed": torch.randn(80, 90).t(),
    "channels last": torch.randn(2, 3, 20, 50).contiguous(memory_format=torch.channels_last),
    "strided": torch.randn(100, 100)[:, ::2],
    "expanded": torch.randn(1, 70).expand(90, 70),
    "with a graph": torch.randn(5_000, requires_grad=True) * 2,
}
