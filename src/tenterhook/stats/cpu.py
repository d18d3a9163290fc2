"""Measuring tensors on a CPU: by compiled code, or where there is none by NumPy, whose passes are fast.

A large tensor is measured by itself; small ones together, for there the calls cost more than the numbers. Histograms
are counted together in any case, of a fixed sample of each tensor.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenterhook.stats.columns import BINS, NUMBERS
from tenterhook.stats.native import Rows, measure_native

SMALL = 4096  # elements, up to which tensors are measured together
_CHUNK = 65536  # elements of a larger one that are in the cache together
_ROW = 4096  # that are summed in their own precision, before float64 takes over
_ONES = {dtype: np.ones(_ROW, dtype) for dtype in (np.float32, np.float64)}
_LARGEST = 1e15  # whose squares can still be summed in float32
_MASK = np.empty(_CHUNK, bool)  # memory that is not new costs nothing
_RUNS, _RUN = 32, 32  # the sample of a tensor that is larger than that: so many runs of so many neighbours
Floats = NDArray[np.floating]


def measure_large(tensor: Tensor) -> tuple[Any, NDArray[np.int32]]:
    """A row of NUMBERS and the histogram of a flat tensor of float32 or float64."""
    if tensor.dtype is torch.float32 and (rows := measure_native([tensor])) is not None:
        return rows[0][0], rows[1][0]
    numbers, sample = _passes(tensor)
    return numbers, histograms([sample])[0]


def _passes(tensor: Tensor) -> tuple[list[float], Floats]:
    values = tensor.numpy()
    sample = _sample(values)
    zeros, total, square = 0, 0.0, 0.0
    least = most = float(values[0])
    ones = _ONES[values.dtype.type]
    for start in range(0, values.size, _CHUNK):  # all passes over one piece while the cache has it
        piece = values[start : start + _CHUNK]
        low, high = np.minimum.reduce(piece).item(), np.maximum.reduce(piece).item()
        if not -_LARGEST < low <= high < _LARGEST:  # NaN too
            return [*_with_care(tensor), sample.size], sample
        least, most = min(least, low), max(most, high)
        if low <= 0 <= high:
            zeros += int(np.count_nonzero(np.equal(piece, 0, out=_MASK[: piece.size])))
        rest = piece.size % _ROW
        rows = piece[: piece.size - rest].reshape(-1, _ROW)
        total += sum(np.vecdot(rows, ones).tolist())
        square += sum(np.vecdot(rows, rows).tolist())
        if rest:
            total += np.vecdot(piece[-rest:], ones[:rest]).item()
            square += np.vecdot(piece[-rest:], piece[-rest:]).item()
    if tensor.dtype is torch.float32 and not _is_exact(total, square, values.size):
        total, square = tensor.sum(dtype=torch.float64).item(), tensor.double().square_().sum().item()
    return [values.size, 0, 0, 0, zeros, total, square, least, most, sample.size], sample


def _is_exact(total: float, square: float, size: int) -> bool:
    """Whether float32's digits were enough: not where the mean is far larger than the spread, or squares are huge."""
    return 1e-30 < square < math.inf and square - total * total / size > 1e-2 * square


def _with_care(tensor: Tensor) -> list[float]:
    """The numbers of a tensor with infinite or huge values."""
    infinite = [tensor.isnan(), tensor == math.inf, tensor == -math.inf]
    finite = tensor[tensor.isfinite()].double()
    least, most = (x.item() for x in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
    counts = [tensor.numel(), *(int(mask.sum()) for mask in infinite), int((tensor == 0).sum())]
    return [*counts, finite.sum().item(), finite.square().sum().item(), least, most]


def measure_small(tensors: Sequence[Tensor]) -> Rows:
    """The numbers and the histograms of several flat tensors at once."""
    if all(t.dtype is torch.float32 for t in tensors) and (rows := measure_native(tensors)) is not None:
        return rows
    return _together([tensor.numpy() for tensor in tensors])


def _together(arrays: Sequence[Floats]) -> Rows:
    """In float64 throughout."""
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


def _sample(values: Floats) -> Floats:
    if values.size <= _RUNS * _RUN:
        return values
    step = values.size // _RUNS
    return values[: step * _RUNS].reshape(_RUNS, step)[:, :_RUN].ravel()
