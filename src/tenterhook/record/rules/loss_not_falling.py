"""A loss that stays where it was."""

import math
import statistics
from collections import deque
from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.step import Step

_FIRST, _LAST, _LOOK_AT, _FALL = 20, 50, 200, 0.02


class LossNotFalling(Checked):
    """After 200 steps, or when the learning rate has risen: the mean of the last 50 is not 2 % below that of the first.

    A classifier that begins below chance was trained before, and may have little to gain. Of other losses that is not
    known, so one that just stays is no more than a note. So is one that begins below zero, as that of a policy does.
    A new optimizer begins another training. It goes on with the model of one before if its loss begins lower than that
    began, or rather where that had ended.
    """

    name = "loss not falling"
    only_sampled = False
    needs = f"fewer than {_LOOK_AT} steps with a loss"

    def __init__(self) -> None:
        self._newest = 0  # of the optimizers
        self._done = False  # with what it trains
        self._began = -math.inf  # with which loss those before did
        self._ended = math.inf  # and the last of them
        self._losses: list[float] = []
        self._recent: deque[float] = deque(maxlen=_LAST)
        self._rates: list[float] = []
        self._look_at = _LOOK_AT
        self._classes: int | None = None
        self._several: str | None = None

    @property
    def unchecked(self) -> str | None:
        """Why nothing was checked, or None."""
        return self._several or super().unchecked

    def look(self, step: Step) -> Iterator[Finding]:
        """Once for each training."""
        if (newest := max(step.optimizers, default=0)) > self._newest:  # another one begins
            self._newest, self._done, self._classes, self._look_at = newest, False, None, _LOOK_AT
            if self._losses:
                self._began = max(self._began, statistics.fmean(self._losses[:_FIRST]))
                self._ended = statistics.fmean(self._recent)
            for some in (self._losses, self._rates, self._recent):
                some.clear()
        if step.loss is None or not math.isfinite(step.loss) or self._several:
            return
        self._recent.append(step.loss)
        if self._done:
            return
        self._classes = self._classes or step.classes
        if len(step.optimizers) > 1 and len(step.losses) > 1:  # as in a GAN
            self._several = "several optimizers, each with a loss of its own, whose sum need not fall"
            return
        self._losses.append(step.loss)
        self._rates.append(max(step.rates, default=0.0))
        if len(self._losses) < self._look_at:
            return
        if self._rates[-1] > self._rates[-_LAST]:  # still warming up
            self._look_at += _LOOK_AT
            return
        self.has_looked = self._done = True
        yield from self._judge(step)

    def _judge(self, step: Step) -> Iterator[Finding]:
        first, last = statistics.fmean(self._losses[:_FIRST]), statistics.fmean(self._losses[-_LAST:])
        chance = math.log(self._classes) if self._classes and self._classes > 1 else None
        rises = last > first + 0.1 * abs(first)
        if first < self._began - 0.1 * abs(self._began):
            return
        if _is_below(self._ended, self._began) and abs(first - self._ended) < abs(first - self._began):
            return
        if _is_below(last, first) or (chance and first < 0.75 * chance and not rises):
            return
        text = f"{last:.4g} over the last {_LAST} of {len(self._losses)} steps, {first:.4g} over the first {_FIRST}"
        why = "after so many steps a model that learns anything shows it"
        then = "try to overfit one batch; look at the learning rate, the labels and the gradients"
        if (chance or rises) and first >= 0:
            yield Finding(self.name, "warn", step.number, text, None, why, then)
        else:
            then += "; a model that was trained before may just have little to gain, and the loss of a policy rise"
            yield Finding(self.name, "note", step.number, text, None, why, then)


def _is_below(loss: float, other: float) -> bool:
    return loss <= other - _FALL * abs(other)
