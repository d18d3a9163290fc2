"""What was measured in a sampled step, told to a function of the user's: for TensorBoard, wandb or a list."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tenterhook.record.step import Rows, Step
from tenterhook.say import say


@dataclass(frozen=True, slots=True)
class Stats:
    """The statistics of one tensor in one step, of its finite values; `norm` is the 2-norm."""

    count: int
    nan: int
    inf: int
    zeros: int
    mean: float
    std: float
    min: float
    max: float
    rms: float
    norm: float


class LogFunction:
    """Calls the user's function for each row of a step; what it raises is said once, and ends nothing."""

    def __init__(self, function: Callable[[int, str, Stats], object]) -> None:
        if not callable(function):
            raise TypeError(f"log is a function (step, name, stats), got {function!r}")
        self._function = function
        self._failed = False

    def call_for(self, step: Step) -> None:
        """Call it for each row of a step."""
        rows = step.rows
        if not len(rows):
            return
        has_several = len({place.model for place in rows.places}) > 1
        for place, stats in zip(rows.places, _stats(rows), strict=True):
            name = f"{place.what}/{place.model}/{place.site}" if has_several else f"{place.what}/{place.site}"
            try:
                self._function(step.number, name, stats)
            except Exception as error:
                self._say(error, step.number, name)

    def _say(self, error: Exception, step: int, name: str) -> None:
        if not self._failed:
            self._failed = True
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            say(f"tenterhook: log={_called(self._function)} raised {what} at step {step}, {name}; it is called again,")
            say("    and what else it raises is not told; the training and the recording go on")


def _called(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _stats(rows: Rows) -> Iterator[Stats]:
    """Those of each row; NaN what needs a finite value, where there is none."""
    counts = (rows.count, rows.nan, rows.pos_inf + rows.neg_inf, rows.zeros)
    with np.errstate(all="ignore"):  # sums that are infinite
        figures = (rows.mean, rows.std, rows.min, rows.max, rows.rms, np.sqrt(rows.sumsq))
    whole = zip(*(column.astype(int).tolist() for column in counts), strict=True)
    parts = zip(*(np.where(rows.finite > 0, column, np.nan).tolist() for column in figures), strict=True)
    for (count, nan, inf, zeros), (mean, std, least, most, rms, norm) in zip(whole, parts, strict=True):
        yield Stats(count, nan, inf, zeros, mean, std, least, most, rms, norm)
