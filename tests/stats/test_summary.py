"""What one row of statistics tells."""

import math

import pytest
import torch

from tenterhook.stats import Stats
from tests.stats.measuring import measured


def test_the_bin_of_a_value():
    values = torch.tensor([1.0, 1.99, 2.0, -0.5, 0.0, math.inf, 1e-45])
    found = measured(values)[0].histogram
    assert found == {127: 2, 128: 1, 256 + 126: 1, 0: 2, 255: 1}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
def test_shares_against_the_format_itself(name):
    dtype = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}.get(name) or getattr(torch, name)
    # Powers of two and values just beside them, away from the halves that a format rounds to even.
    exponents = torch.arange(-40, 30, dtype=torch.float64)
    values = torch.cat([2**exponents * 1.01]).float()
    stats = measured(values)[0]
    cast = values.to(dtype).float()
    assert stats.underflow(name) == pytest.approx((cast == 0).float().mean().item(), abs=1e-6)
    info = torch.finfo(dtype)
    certain = values >= 2.0 ** math.ceil(math.log2(info.max))
    assert stats.overflow(name) == pytest.approx(certain.float().mean().item(), abs=1e-6)


def test_stats_of_nothing():
    nothing = Stats()
    assert nothing + nothing == nothing
    assert math.isnan(nothing.mean) and math.isnan(nothing.overflow("float16"))
