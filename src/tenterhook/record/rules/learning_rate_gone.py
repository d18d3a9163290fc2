"""A learning rate that has decayed to nothing, while the training goes on."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules.thresholds import RATE_GONE, RATE_SHARE, RATE_STEPS
from tenterhook.record.step import Step


class LearningRateGone(Checked):
    """Below 1e-4 of what it was for 50 steps and 5 % of all so far: more than the end of a schedule.

    The highest of all groups counts, for those optimizers that step together.
    """

    name = "learning rate gone"
    only_sampled = False
    needs = f"fewer than {RATE_STEPS} steps of an optimizer with a learning rate"

    def __init__(self) -> None:
        self._highest: dict[frozenset[int], float] = {}  # by optimizers
        self._steps: dict[frozenset[int], int] = {}
        self._gone: dict[frozenset[int], int] = {}  # steps in a row
        self._told: set[frozenset[int]] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Once for each set of optimizers."""
        which = step.optimizers
        rate = max((one for one in step.rates if one == one), default=None)  # NaN: it finds its own
        if rate is None or not which or which in self._told:
            return
        steps = self._steps[which] = self._steps.get(which, 0) + 1
        highest = self._highest[which] = max(rate, self._highest.get(which, 0.0))
        self.has_looked |= steps >= RATE_STEPS
        gone = self._gone[which] = self._gone.get(which, 0) + 1 if rate < RATE_GONE * highest else 0
        if gone >= max(RATE_STEPS, RATE_SHARE * steps):
            self._told.add(which)
            text = f"{rate:.2g} for {gone} steps, and {highest:.2g} before"
            why = "the weights hardly change any more, so these steps teach the model nothing"
            then = "look whether the scheduler steps once for each batch where once for each epoch was meant"
            yield Finding(self.name, "warn", step.number - gone + 1, text, None, why, then)
