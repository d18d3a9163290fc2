"""The statistics of one or many tensors on the host, without torch: they add up, and tell mean, std, rms and shares."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from tenterhook.stats.columns import INDEX, NUMBERS, START, TABLE

# Of each format: from which power of two on values become infinite, below which they become zero. An overflow at a
# number that is no power of two is counted from the next one on: 448 of float8_e4m3 from 512.
LIMITS = {"float16": (16, -25), "bfloat16": (128, -134), "float8_e4m3": (9, -10), "float8_e5m2": (16, -17)}
# Below these, values have fewer digits than they should.
SUBNORMAL = {"float16": -14, "bfloat16": -126, "float8_e4m3": -6, "float8_e5m2": -14}

_TYPES = {column.name: int if column.dtype == "int64" else float for column in TABLE}
_STARTS = [(name, type_, type_(START[INDEX[name]])) for name, type_ in _TYPES.items()]
_Numbers = make_dataclass("_Numbers", _STARTS, frozen=True)
_MERGE: dict[str, Any] = {"sum": operator.add, "min": min, "max": max}


def merge(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The row of numbers of two tensors together."""
    return [_MERGE[column.merge](a, b) for column, a, b in zip(TABLE, one, other, strict=True)]


@dataclass(frozen=True)
class Stats(_Numbers):  # type: ignore[misc, valid-type]
    """The statistics that TABLE declares, by their names, and a histogram: {bin: how many}, of `sampled` values."""

    histogram: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: Sequence[float], bins: Sequence[int]) -> "Stats":
        """One row, as a tensor was measured."""
        values = {name: _TYPES[name](number) for name, number in zip(NUMBERS, numbers, strict=True)}
        return cls(**values, histogram={key: int(many) for key, many in enumerate(bins) if many})

    def __add__(self, other: "Stats") -> "Stats":
        both = merge(*([getattr(stats, name) for name in NUMBERS] for stats in (self, other)))
        bins = dict(self.histogram)
        for key, many in other.histogram.items():
            bins[key] = bins.get(key, 0) + many
        return Stats(*both, histogram=bins)

    @property
    def finite(self) -> int:
        """How many values are neither infinite nor NaN."""
        return self.count - self.nan - self.pos_inf - self.neg_inf

    @property
    def mean(self) -> float:
        """The mean of the finite values."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite values."""
        return math.sqrt(self.sumsq / self.finite) if self.finite else math.nan

    @property
    def std(self) -> float:
        """The standard deviation of the finite values, as of a whole population."""
        if self.min == self.max:
            return 0.0
        return math.sqrt(max(0.0, self.sumsq / self.finite - self.mean**2)) if self.finite else math.nan

    @property
    def absmax(self) -> float:
        """The largest magnitude of a finite value."""
        return max(-self.min, self.max) if self.finite else math.nan

    def overflow(self, dtype: str) -> float:
        """The share of values that would be infinite in another format, to the power of two."""
        return self._share(LIMITS[dtype][0] + 127, 254)

    def underflow(self, dtype: str) -> float:
        """The share of values that would become zero in another format, and are not zero."""
        return self._share(1, LIMITS[dtype][1] + 126)

    def subnormal(self, dtype: str) -> float:
        """The share of values that would lose digits in another format, or all of them."""
        return self._share(1, SUBNORMAL[dtype] + 126)

    def _share(self, first: int, last: int) -> float:
        many = sum(n for key, n in self.histogram.items() if first <= key % 256 <= last)
        return many / self.sampled if self.sampled else math.nan
