"""Each way of measuring on a CPU, against float64."""

import math

import pytest
import torch

from tenterhook.stats.cpu import SMALL
from tests.stats.measuring import check, measured

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
