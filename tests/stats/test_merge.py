"""Sums of statistics against measuring at once, and divided ones against those of divided values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.stats import BINS, NUMBERS
from tenterhook.stats.arithmetic import divided
from tests.stats.measuring import measured

floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(floats, max_size=40), min_size=2, max_size=5))
def test_merging_equals_measuring_at_once(parts):
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    total, *rest = measured(*tensors)
    for stats in rest:
        total = total + stats
    whole = measured(torch.cat(tensors))[0]
    for name in ("count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max", "sampled", "histogram"):
        assert getattr(total, name) == getattr(whole, name), name
    assert total.sum == pytest.approx(whole.sum, rel=1e-9, abs=1e-9 * (whole.absmax if whole.finite else 0) + 1e-300)
    assert total.sumsq == pytest.approx(whole.sumsq, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 2.0, 1024.0, 65536.0])
def test_divided_as_if_the_values_had_been(scale):
    values = torch.randn(200) * torch.logspace(-30, 30, 200)
    (scaled,), (true,) = measured(values * scale), measured(values)
    numbers = np.array([[getattr(scaled, name) for name in NUMBERS]], float)
    bins = np.zeros((1, BINS), np.int32)
    for key, many in scaled.histogram.items():
        bins[0, key] = many
    moved, shifted = divided(numbers, bins, scale)
    for name, value in zip(NUMBERS, moved[0], strict=True):
        assert value == pytest.approx(getattr(true, name), rel=1e-6), name
    assert {int(k): int(shifted[0, k]) for k in np.flatnonzero(shifted[0])} == true.histogram
