"""The statistics of a tensor: TABLE declares them, and all that treats them one like another follows from it.

A tensor's statistics are a row of numbers (float64, a column for each row of TABLE) and a histogram (int32, BINS
columns), which counts values by sign and power of two, of a fixed sample of the tensor where that is large. A value's
bin is the upper nine bits of its float32 form:

    bin = sign * 256 + biased exponent      0 < exponent < 255: 2**(exponent - 127) <= |value| < 2**(exponent - 126)
                                            exponent 0: zero, or smaller than all that; 255: infinite or NaN

A new statistic is a row at the end of TABLE and an expression for each backend: EXPRESSIONS in cpu.py; COUNTED in
native.c (what is no count: a line in its `careful` and in its `quick`); `_careful` and `_quick` in cuda.py. Then
docs/format.md wants its row. tests/stats/test_columns.py adds one in that way, and finds it in a run.
"""

import math
from dataclasses import dataclass
from typing import Literal

_START = {"sum": 0.0, "min": math.inf, "max": -math.inf}


@dataclass(frozen=True, slots=True)
class Column:
    """A statistic: how the numbers of two tensors become that of both, and what it says."""

    name: str
    dtype: Literal["int64", "float64"]  # on disk; rows of numbers are float64 throughout, and extrema are on disk too
    merge: Literal["sum", "min", "max"]
    of: Literal["all", "finite", "others", "sample"]  # whose values: others are infinite and NaN
    meaning: str  # for docs/format.md
    power: int = 0  # where values are divided by a loss scale, the number is divided by this power of it

    @property
    def start(self) -> float:
        """The number of no values, which changes nothing where it is merged with others."""
        return _START[self.merge]

    @property
    def is_nullable(self) -> bool:
        """Whether the number of no values says nothing: on disk it is null."""
        return self.merge != "sum"


TABLE = (
    Column("count", "int64", "sum", "all", "values"),
    Column("nan", "int64", "sum", "others", "how many of them are that"),
    Column("pos_inf", "int64", "sum", "others", "how many of them are that"),
    Column("neg_inf", "int64", "sum", "others", "how many of them are that"),
    Column("zeros", "int64", "sum", "finite", "how many of them are that"),
    Column("sum", "float64", "sum", "finite", "of the finite values", power=1),
    Column("sumsq", "float64", "sum", "finite", "of the finite values", power=2),
    Column("min", "float64", "min", "finite", "of the finite values; null if there are none", power=1),
    Column("max", "float64", "max", "finite", "of the finite values; null if there are none", power=1),
    Column("sampled", "int64", "sum", "sample", "how many values are in the histogram"),
)
BINS = 512

NUMBERS = tuple(column.name for column in TABLE)
INDEX = {name: i for i, name in enumerate(NUMBERS)}
START = tuple(column.start for column in TABLE)
