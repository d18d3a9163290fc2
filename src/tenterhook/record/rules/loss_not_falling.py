"""A loss that stays where it was."""

import math
import statistics
from collections import deque
from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import Target, together
from tenterhook.record.step import Step


class LossNotFalling(Checked):
    """After 200 steps, or when the learning rate has risen: the mean of the last 50 is not 2 % below that of the first.

    A classifier that begins below chance was trained before, and may have little to gain. Of other losses that is not
    known, so one that just stays is no more than a note. So is one that begins below zero, as that of a policy does.
    A new optimizer begins another training. It goes on with the model of one before if its loss begins lower than that
    began, or rather where that had ended.
    """

    name = "loss not falling"
    only_sampled = False
    needs = f"fewer than {t.FALLING_STEPS} steps with a loss"

    def __init__(self) -> None:
        self._newest = 0  # of the optimizers
        self._done = False  # with what it trains
        self._began = -math.inf  # with which loss those before did
        self._ended = math.inf  # and the last of them
        self._losses: list[float] = []
        self._recent: deque[float] = deque(maxlen=t.FALLING_LAST)
        self._rates: list[float] = []
        self._look_at = t.FALLING_STEPS
        self._chance = 0.0  # that of the loss; zero where it is unknown
        self._target = Target()

    @property
    def unchecked(self) -> str | None:
        """Why nothing was checked, or None."""
        return self._target.moves or super().unchecked

    def look(self, step: Step) -> Iterator[Finding]:
        """Once for each training."""
        self._target = step.target
        if (newest := max(step.optimizers, default=0)) > self._newest:  # another one begins
            self._newest, self._done, self._chance, self._look_at = newest, False, 0.0, t.FALLING_STEPS
            if self._losses:
                self._began = max(self._began, statistics.fmean(self._losses[: t.FALLING_FIRST]))
                self._ended = statistics.fmean(self._recent)
            for some in (self._losses, self._rates, self._recent):
                some.clear()
        loss = step.finite_loss
        if loss is None:
            return
        self._recent.append(loss)
        if self._done:
            return
        self._chance = self._chance or _chance(step, loss)
        self._losses.append(loss)
        self._rates.append(max(step.rates, default=0.0))
        if len(self._losses) < self._look_at:
            return
        if self._target.moves:
            self._done = True
            return
        if self._rates[-1] > self._rates[-t.FALLING_LAST]:  # still warming up
            self._look_at += t.FALLING_STEPS
            return
        self.has_looked = self._done = True
        yield from self._judge(step)

    def _judge(self, step: Step) -> Iterator[Finding]:
        first, last = (
            statistics.fmean(self._losses[: t.FALLING_FIRST]),
            statistics.fmean(self._losses[-t.FALLING_LAST :]),
        )
        chance = self._chance
        rises = last > first + 0.1 * abs(first)
        if first < self._began - 0.1 * abs(self._began):
            return
        if _is_below(self._ended, self._began) and abs(first - self._ended) < abs(first - self._began):
            return
        if _is_below(last, first) or (chance and first < 0.75 * chance and not rises):
            return
        text = f"{last:.4g} over the last {t.FALLING_LAST} of {len(self._losses)} steps, "
        text += f"{first:.4g} over the first {t.FALLING_FIRST}"
        why = "after so many steps a model that learns anything shows it"
        then = "try to overfit one batch; look at the learning rate, the labels and the gradients"
        if (chance or rises) and first >= 0:
            yield Finding(self.name, "warn", step.number, text, None, why, then)
        else:
            then += "; a model that was trained before may just have little to gain, and the loss of a policy rise"
            yield Finding(self.name, "note", step.number, text, None, why, then)


def _chance(step: Step, loss: float) -> float:
    """What the loss is where all classes are thought equally likely; zero where it is more than one loss function."""
    if step.has_more or len({term.function for term in step.terms}) != 1:
        return 0.0
    term = together(step.terms)
    return loss * term.chance / term.mean if term.chance and term.mean > 0 else 0.0


def _is_below(loss: float, other: float) -> bool:
    return loss <= other - t.FALLING_SHARE * abs(other)
