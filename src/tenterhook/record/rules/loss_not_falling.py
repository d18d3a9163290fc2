"""A loss that stays where it was."""

import math
import statistics
from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step

_FIRST, _LOOK_AT, _FALL = 20, 200, 0.02


class LossNotFalling(Checked):
    """After 200 steps: the mean of the last 50 is not 2 % below that of the first 20."""

    name = "loss not falling"
    needs = f"fewer than {_LOOK_AT} steps with a loss"

    def __init__(self) -> None:
        self._losses: list[float] = []

    def look(self, step: Step) -> Iterator[Finding]:
        """Once, at the 200th loss."""
        if step.loss is None or not math.isfinite(step.loss) or self.has_looked:
            return
        if len(step.rates) > 1 and step.backwards > 1 and len(set(step.rates)) > 1:
            self.needs = "several optimizers and losses in one step"  # type: ignore[misc]
        self._losses.append(step.loss)
        if len(self._losses) < _LOOK_AT:
            return
        self.has_looked = True
        first, last = statistics.fmean(self._losses[:_FIRST]), statistics.fmean(self._losses[-50:])
        if last > first - _FALL * abs(first):
            text = f"loss {last:.4g} over the last 50 of {_LOOK_AT} steps, {first:.4g} over the first {_FIRST}"
            why = "after so many steps a model that learns anything shows it"
            then = "try to overfit one batch; look at the learning rate, the labels and the gradients"
            yield Finding(self.name, "warn", step.number, text, None, why, then)
