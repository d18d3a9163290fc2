"""Statistics of tensors as a recorded step has them, and a check against float64."""

import math

import numpy as np
import pytest

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
