"""Measuring tensors on a CPU. NumPy has the fastest passes for counts and extrema, torch for sums.

A large tensor is measured by itself; small ones together, for there the calls cost more than the numbers. Histograms
are counted together in any case, of a fixed sample of each tensor.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenterhook.stats._layout import BINS, NUMBERS

SMALL = 4096  # elements, up to which tensors are measured together
_RUNS, _RUN = 32, 32  # the sample of a tensor that is larger than that: so many runs of so many neighbours
Floats = NDArray[np.floating]
Rows = tuple[NDArray[np.float64], NDArray[np.int32]]


def measure_large(tensor: Tensor) -> tuple[list[float], Floats]:
    """A row of NUMBERS of a flat tensor of float32 or float64, and the sample for its histogram."""
    values = tensor.numpy()
    sample = _sample(values)
    zeros = int(np.count_nonzero(values == 0))
    least, most = np.minimum.reduce(values).item(), np.maximum.reduce(values).item()
    if not math.isfinite(least - most):
        infinite = [int(np.count_nonzero(m)) for m in (np.isnan(values), values == np.inf, values == -np.inf)]
        finite = tensor[tensor.isfinite()]
        least, most = (x.item() for x in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
        return [values.size, *infinite, zeros, *_sums(finite), least, most, sample.size], sample
    return [values.size, 0, 0, 0, zeros, *_sums(tensor), least, most, sample.size], sample


def measure_small(arrays: Sequence[Floats]) -> Rows:
    """The numbers and the histograms of several flat arrays at once, in float64 throughout."""
    sizes = np.array([array.size for array in arrays])
    numbers = np.zeros((len(arrays), len(NUMBERS)))
    numbers[:, 0] = sizes
    numbers[:, 7:9] = math.inf, -math.inf
    filled = np.flatnonzero(sizes)
    if not filled.size:
        return numbers, np.zeros((len(arrays), BINS), np.int32)
    values = np.concatenate(arrays, dtype=np.float64)
    starts = np.cumsum(sizes[filled]) - sizes[filled]
    lower = upper = values
    finite = np.isfinite(values)
    if not finite.all():
        for column, mask in enumerate((np.isnan(values), values == np.inf, values == -np.inf), 1):
            numbers[filled, column] = np.add.reduceat(mask, starts, dtype=np.int64)
        lower, upper = np.where(finite, values, math.inf), np.where(finite, values, -math.inf)
        values = np.where(finite, values, 0.0)
        numbers[filled, 4] -= np.add.reduceat(~finite, starts, dtype=np.int64)
    with np.errstate(over="ignore"):
        sums = [np.add.reduceat(x, starts) for x in (values == 0, values, values * values)]
    numbers[filled, 4:7] += np.stack(sums, 1)
    numbers[filled, 7] = np.minimum.reduceat(lower, starts)
    numbers[filled, 8] = np.maximum.reduceat(upper, starts)
    samples = [_sample(array) for array in arrays]
    numbers[:, 9] = [sample.size for sample in samples]
    return numbers, histograms(samples)


def histograms(samples: Sequence[Floats]) -> NDArray[np.int32]:
    """How many values of each array are in each bin."""
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate(samples, dtype=np.float32, casting="same_kind")
    owner = np.repeat(np.arange(len(samples)) * BINS, [array.size for array in samples])
    bins = (values.view(np.int32) >> 23 & BINS - 1) + owner
    return np.bincount(bins, minlength=len(samples) * BINS).reshape(-1, BINS).astype(np.int32)


def _sums(tensor: Tensor) -> tuple[float, float]:
    """Sum and sum of squares, as good as in float64."""
    total, square = tensor.sum().item(), torch.dot(tensor, tensor).item()
    # Little is left of float32's digits where the mean is far larger than the spread, or the squares are too large.
    if tensor.dtype is torch.float32 and tensor.numel():
        spread = square - total * total / tensor.numel()
        if not (1e-30 < square < math.inf and spread > 1e-2 * square):
            return _sums(tensor.double())
    return total, square


def _sample(values: Floats) -> Floats:
    if values.size <= _RUNS * _RUN:
        return values
    step = values.size // _RUNS
    return values[: step * _RUNS].reshape(_RUNS, step)[:, :_RUN].ravel()
