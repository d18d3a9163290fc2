"""What is worked out from rows of numbers: rows merged, rows of divided values, and mean, rms, std and absmax."""

import math

import numpy as np
from numpy.typing import NDArray

from tenterhook.stats.columns import BINS, INDEX, TABLE

Floats = NDArray[np.float64]
Bins = NDArray[np.int32]
UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
_EXTREMA = [(i, UFUNCS[column.merge]) for i, column in enumerate(TABLE) if column.merge != "sum"]
_SCALED = [(i, column.power) for i, column in enumerate(TABLE) if column.power]
_NAN, _POS_INF, _NEG_INF = (INDEX[name] for name in ("nan", "pos_inf", "neg_inf"))
_HALF = BINS // 2  # of one sign


def merged(numbers: Floats, starts: NDArray[np.int64]) -> Floats:
    """A row for each run of rows, which begin at `starts`: of all their values at once."""
    found = np.add.reduceat(numbers, starts)
    for i, ufunc in _EXTREMA:
        found[:, i] = ufunc.reduceat(numbers[:, i], starts)
    return found


def divided(numbers: Floats, bins: Bins, scale: float) -> tuple[Floats, Bins]:
    """The statistics of the values divided by a loss scale: a power of two, so that bins just move."""
    numbers = numbers.copy()
    for i, power in _SCALED:
        numbers[:, i] /= scale**power
    signs = bins.reshape(-1, 2, _HALF)
    moved = np.zeros_like(signs)
    smallest, infinite = 0, _HALF - 1  # bins that stay
    for bin_ in (smallest, infinite):
        moved[:, :, bin_] = signs[:, :, bin_]
    to = np.clip(np.arange(infinite) - round(math.log2(scale)), smallest, infinite - 1)  # too small: counted with zero
    for bin_ in range(smallest + 1, infinite):
        moved[:, :, to[bin_]] += signs[:, :, bin_]
    return numbers, moved.reshape(bins.shape)


class Numbers:
    """Rows of numbers: their columns by name, and what follows from these; 0 where no value is finite."""

    def __init__(self, numbers: Floats) -> None:
        self.numbers = numbers

    def __getattr__(self, name: str) -> Floats:
        if name not in INDEX:
            raise AttributeError(name)
        return self.numbers[:, INDEX[name]]

    @property
    def infinite(self) -> Floats:
        """How many values are infinite or NaN."""
        numbers = self.numbers
        return numbers[:, _NAN] + numbers[:, _POS_INF] + numbers[:, _NEG_INF]

    @property
    def finite(self) -> Floats:
        """How many values are neither."""
        return self.count - self.infinite

    @property
    def mean(self) -> Floats:
        """The means of the finite values."""
        return self.sum / np.maximum(self.finite, 1)

    @property
    def rms(self) -> Floats:
        """The roots of the mean squares of the finite values."""
        return np.sqrt(self.sumsq / np.maximum(self.finite, 1))

    @property
    def std(self) -> Floats:
        """The standard deviations of the finite values."""
        square = self.sumsq / np.maximum(self.finite, 1)
        return np.where(self.min == self.max, 0.0, np.sqrt(np.fmax(square - self.mean**2, 0)))

    @property
    def absmax(self) -> Floats:
        """The largest magnitudes; NaN where no value is finite."""
        return np.where(self.finite > 0, np.maximum(-self.min, self.max), np.nan)
