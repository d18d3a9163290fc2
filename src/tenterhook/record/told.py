"""What was measured in a sampled step, told to a function of the user's: for TensorBoard, wandb or a list."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from tenterhook.record.step import Step
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


class Telling:
    """Calls the user's function for each row of a step; what it raises is said once, and ends nothing."""

    def __init__(self, function: Callable[[int, str, Stats], object]) -> None:
        if not callable(function):
            raise TypeError(f"log is a function (step, name, stats), got {function!r}")
        self._function = function
        self._failed = False

    def tell(self, step: Step) -> None:
        """Tell all of a step."""
        rows = step.rows
        if not len(rows):
            return
        models = {place.model for place in rows.places}
        infinite = (rows.pos_inf + rows.neg_inf).tolist()
        counts = (rows.count.tolist(), rows.nan.tolist(), infinite, rows.zeros.tolist())
        values = (rows.mean, rows.std, rows.min, rows.max, rows.rms)
        finite, squares = rows.finite.tolist(), rows.sumsq.tolist()
        columns = zip(rows.places, finite, squares, zip(*counts, strict=True), zip(*values, strict=True), strict=True)
        for place, some, square, many, of_values in columns:
            floats = map(float, of_values) if some else [math.nan] * len(values)
            name = f"{place.what}/{place.site}" if len(models) == 1 else f"{place.what}/{place.model}/{place.site}"
            stats = Stats(*map(int, many), *floats, math.sqrt(square) if some else math.nan)
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
