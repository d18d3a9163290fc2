"""A loss that rises far above the first one, within the first steps."""

import math
from collections.abc import Iterator

from tenterhook.record.rule import Finding, OfLosses
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import together
from tenterhook.record.step import Step
from tenterhook.record.terms import best_guess


class EarlyBlowUp(OfLosses):
    """Within 20 steps the loss is five times the first one, or that of guessing if that is more; thrice in a row.

    No more than a note where the target of the loss moves.
    """

    name = "early blow-up"
    needs = "no first loss above zero was seen: no backward() on a scalar"

    def __init__(self) -> None:
        self._number = self._often = 0
        self._optimizers: frozenset[int] = frozenset()  # so far
        self._usual = 0.0  # the first loss, or that of guessing
        self._began = 0  # at which step it rose
        self._told = False

    def look(self, step: Step) -> Iterator[Finding]:
        """Once; a new optimizer begins another training."""
        self.count(step)
        if self._told or (self._number >= t.BLOW_UP_STEPS and step.optimizers <= self._optimizers):
            return
        if not step.optimizers <= self._optimizers:
            self._optimizers, self._number, self._often, self._usual = self._optimizers | step.optimizers, 0, 0, 0.0
        if step.loss is None:
            return
        self._usual = self._usual or _usual(step)
        self._number += 1
        if self._usual > 0:
            self.has_looked = True
            yield from self._judge(step, step.loss)

    def _judge(self, step: Step, loss: float) -> Iterator[Finding]:
        high = loss > t.BLOW_UP_TIMES * self._usual  # also for infinity, not for NaN
        if high and not self._often:
            self._began = step.number
        gone = not math.isfinite(loss) and self._often > 0  # it rose, and ended so; a NaN by itself has another cause
        self._often = self._often + 1 if (high or gone) and not step.skipped else 0
        if self._often < t.BLOW_UP_LAST and not gone:
            return
        self._told = True
        text = f"the loss is {loss:.3g} after {self._number} steps, and {self._usual:.3g} was where it began"
        why = "steps this large destroy what the weights began with, and training rarely recovers"
        then = "lower the learning rate ten times or more, warm it up, or clip the gradients"
        moves = step.target.moves
        severity, then = ("note", f"{moves}; if that is so, it may rise") if moves else ("warn", then)
        yield Finding(self.name, severity, self._began, text, None, why, then)


def _usual(step: Step) -> float:
    """The first loss, or what it would be with the best guess; zero where neither is above zero."""
    loss = step.finite_loss or 0.0
    if loss <= 0 or step.has_more or len({term.function for term in step.terms}) != 1 or not step.terms[0].plain:
        return max(loss, 0.0)
    term = together(step.terms)
    guess = max(best_guess(term, term.labels) or 0.0, term.chance or 0.0)
    return max(loss, loss * guess / term.mean) if term.mean > 0 else loss
