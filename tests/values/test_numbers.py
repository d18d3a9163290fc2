"""Differences and largest values, against the plain way."""

import math

import pytest
import torch

from tenterhook.values.numbers import difference, largest

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_the_largest_is_that_of_the_absolute_values(dtype):
    x = torch.randn(3, 50).to(dtype)
    for some in (x, -x, x[:, :1], x.real.abs(), -x.real.abs()):
        assert torch.equal(largest(some), some.abs().amax())


@pytest.mark.parametrize(("values", "most"), [((1.0, -INF), INF), ((NAN, INF), NAN), ((-0.0, 0.0), 0.0)])
def test_the_largest_of_what_is_not_finite(values, most):
    assert str(largest(torch.tensor(values)).item()) == str(most)


def test_what_is_the_same_is_no_difference():
    a = torch.tensor([1.0, INF, -INF, INF, NAN, 1.0])
    b = torch.tensor([3.0, INF, -INF, -INF, NAN, NAN])
    assert str(difference(a, b).tolist()) == str([2.0, 0.0, 0.0, -INF, NAN, NAN])


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (torch.tensor([True, False]), torch.tensor([False, False]), [-1.0, 0.0]),
        (torch.tensor([2**53 - 1]), torch.tensor([2**53 - 2]), [-1.0]),
        (torch.tensor([250], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8), [-245.0]),
        (torch.tensor([60000.0]).half(), torch.tensor([-60000.0]).half(), [-120000.0]),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), [1j]),
    ],
    ids=["bool", "long", "unsigned", "half", "complex"],
)
def test_the_difference_is_in_a_dtype_that_holds_it(a, b, apart):
    assert difference(a, b).tolist() == apart
