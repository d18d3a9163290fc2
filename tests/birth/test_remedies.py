"""What is advised where a value that is not finite was made."""

import pytest
import torch
from torch import nn

from tenterhook import NonFiniteError, find_nonfinite


def remedy_of(compute, model=None):
    model = model or nn.Linear(2, 2)
    with pytest.raises(NonFiniteError) as error, find_nonfinite(model):
        compute(model(torch.ones(3, 2))).sum().backward()
    return error.value.birth.remedy


SMALLER = "make its inputs smaller"


@pytest.mark.parametrize(
    ("compute", "advice"),
    [
        (lambda v: (v * 0 + 1e30).pow(2), SMALLER),  # not: where it is defined
        (lambda v: (v * 0 - 1).pow(1.5), "clamp its input to where it is defined"),
        (lambda v: (v * 0 + 1e3).exp(), "clamp its input, or subtract its maximum"),
        (lambda v: (v.double() * 0 + 1e200).pow(2), SMALLER),  # not: in float32
        (lambda v: ((v * 0 + 1e3).half() * 1e3).float(), f"compute this in float32, or {SMALLER}"),
        (lambda v: ((v * 0 + 3e38).bfloat16() * 1e3).float(), f"compute this in float32, or {SMALLER}"),
        (lambda v: v / (v * 0), "add a small number to the divisor"),
        (lambda v: (v * 0).sqrt(), "the slope is infinite there"),
    ],
)
def test_the_advice_is_about_what_was_wrong(compute, advice):
    assert remedy_of(compute).startswith(advice)
