"""Each way of measuring on a CPU, against float64."""

import math

import pytest
import torch

from tenterhook.stats.cpu import SMALL
from tests.stats.measuring import CASES, check, measured


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, way):
    tensor = CASES[name]
    check(measured(tensor)[0], tensor.detach().double().numpy())
    check(measured(tensor.detach().reshape(-1)[1:])[0], tensor.detach().double().reshape(-1)[1:].numpy())


def test_all_together_as_each_alone(way):
    together = measured(*CASES.values())
    for tensor, stats in zip(CASES.values(), together, strict=True):
        alone = measured(tensor)[0]
        assert stats == alone


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1023, 4095, 4096, 4097, 8191, 8192, 8193, 70_001])
def test_around_the_borders_of_blocks(size, way):
    value = torch.randn(size) + 100
    check(measured(value)[0], value.double().numpy())
    for at in {0, size // 2, size - 1}:
        for bad in (math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-42):
            changed = value.clone()
            changed[at] = bad
            check(measured(changed)[0], changed.double().numpy())


def test_the_limit_between_small_and_large_makes_no_difference():
    for size in (SMALL - 1, SMALL, SMALL + 1):
        value = torch.randn(size)
        check(measured(value)[0], value.double().numpy())
