"""Measuring tensors on a CPU: by compiled code, or where there is none by NumPy, whose passes are fast.

A large tensor is measured by itself; small ones together, for there the calls cost more than the numbers. Histograms
are counted together in any case, of a fixed sample of each tensor.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenterhook.stats.arithmetic import UFUNCS
from tenterhook.stats.columns import BINS, INDEX, START, TABLE, Column
from tenterhook.stats.native import Measured, measure_native
from tenterhook.stats.summary import merge

# Of each value: what is summed, or what the least or the largest is taken of. Sizes need no values.
EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "nan": np.isnan,
    "pos_inf": lambda values: values == np.inf,
    "neg_inf": lambda values: values == -np.inf,
    "zeros": lambda values: values == 0,
    "sum": lambda values: values,
    "sumsq": np.square,
    "min": lambda values: values,
    "max": lambda values: values,
}
SMALL = 4096  # elements, up to which tensors are measured together
_PIECE = 65536  # elements of a larger one that are in the cache together
_LINE = 4096  # that are summed in their own precision, before float64 takes over
_ONES = {dtype: np.ones(_LINE, dtype) for dtype in (np.float32, np.float64)}
_LARGEST = 1e15  # whose squares can still be summed in float32
_MASK = np.empty(_PIECE, bool)  # memory that is not new costs nothing
_RUNS, _RUN = 32, 32  # the sample of a tensor that is larger than that: so many runs of so many neighbours
Floats = NDArray[np.floating]


def measure_large(tensor: Tensor) -> tuple[Sequence[float], NDArray[np.int32]]:
    """A row of numbers and the histogram of a flat tensor of float32 or float64."""
    if tensor.dtype is torch.float32 and (found := measure_native([tensor])) is not None:
        return found[0][0], found[1][0]
    values = tensor.numpy()
    sample = _sample(values)
    row = functools.reduce(merge, (_quick(piece) or _careful([piece])[0].tolist() for piece in _pieces(values)))
    row[INDEX["sampled"]] = sample.size
    return row, histograms([sample])[0]


def _pieces(values: Floats) -> Iterator[Floats]:
    """Whole lines of _LINE values, and the rest."""
    lines = values.size - values.size % _LINE
    for start in range(0, lines, _PIECE):
        yield values[start : min(start + _PIECE, lines)]
    if lines < values.size:
        yield values[lines:]


def _quick(piece: Floats) -> list[float] | None:
    """Its numbers in its own precision; None where that is not enough: of NaN, infinite and huge values, say."""
    low, high = np.minimum.reduce(piece).item(), np.maximum.reduce(piece).item()
    if not -_LARGEST < low <= high < _LARGEST:  # NaN too
        return None
    lines = piece.reshape(-1, min(piece.size, _LINE))
    total = sum(np.vecdot(lines, _ONES[piece.dtype.type][: lines.shape[1]]).tolist())
    square = sum(np.vecdot(lines, lines).tolist())
    if piece.dtype == np.float32 and not _is_exact(total, square, piece.size):
        return None
    zeros = int(np.count_nonzero(np.equal(piece, 0, out=_MASK[: piece.size]))) if low <= 0 <= high else 0
    known = {"count": piece.size, "zeros": zeros, "sum": total, "sumsq": square, "min": low, "max": high}
    return [known[column.name] if column.name in known else _reduced(column, piece) for column in TABLE]


def _is_exact(total: float, square: float, size: int) -> bool:
    """Whether float32's digits were enough: not where the mean is far larger than the spread, or squares are huge."""
    return 1e-30 < square < math.inf and square - total * total / size > 1e-2 * square


def _reduced(column: Column, piece: Floats) -> float:
    """A number of finite values that has no quicker way."""
    if column.of == "others" or column.name not in EXPRESSIONS:
        return column.start
    return UFUNCS[column.merge].reduce(EXPRESSIONS[column.name](piece), dtype=np.float64).item()


def measure_small(tensors: Sequence[Tensor]) -> Measured:
    """The numbers and the histograms of several flat tensors at once."""
    if all(t.dtype is torch.float32 for t in tensors) and (found := measure_native(tensors)) is not None:
        return found
    arrays = [tensor.numpy() for tensor in tensors]
    samples = [_sample(array) for array in arrays]
    numbers = _careful(arrays)
    numbers[:, INDEX["sampled"]] = [sample.size for sample in samples]
    return numbers, histograms(samples)


def _careful(arrays: Sequence[Floats]) -> NDArray[np.float64]:
    """A row of numbers for each array, in float64 throughout; `sampled` is not known here."""
    sizes = np.array([array.size for array in arrays])
    numbers = np.tile(START, (len(arrays), 1))
    numbers[:, INDEX["count"]] = sizes
    filled = np.flatnonzero(sizes)
    if not filled.size:
        return numbers
    values = np.concatenate(arrays, dtype=np.float64)
    starts = np.cumsum(sizes[filled]) - sizes[filled]
    finite = np.isfinite(values)
    are_finite = finite.all()
    with np.errstate(over="ignore"):
        for name, expression in EXPRESSIONS.items():
            column = TABLE[INDEX[name]]
            if column.of == "others" and are_finite:
                continue
            terms = expression(values)
            if column.of == "finite" and not are_finite:
                terms = np.where(finite, terms, column.start)
            numbers[filled, INDEX[name]] = UFUNCS[column.merge].reduceat(terms, starts, dtype=np.float64)
    return numbers


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
