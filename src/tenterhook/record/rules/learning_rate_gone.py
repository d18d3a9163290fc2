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
        self._rates: dict[frozenset[int], _Rate] = {}  # by optimizers

    def look(self, step: Step) -> Iterator[Finding]:
        """Once for each set of optimizers."""
        if not step.rates or not step.optimizers:
            return
        rate = self._rates.get(step.optimizers)
        if rate is None:
            rate = self._rates[step.optimizers] = _Rate()
        now = max(step.rates)
        gone = rate.follow(now)
        self.has_looked = self.has_looked or rate.steps >= RATE_STEPS
        if gone:
            text = f"{now:.2g} for {gone} steps, and {rate.highest:.2g} before"
            why = "the weights hardly change any more, so these steps teach the model nothing"
            then = "look whether the scheduler steps once for each batch where once for each epoch was meant"
            yield Finding(self.name, "warn", step.number - gone + 1, text, None, why, then)


class _Rate:
    """A learning rate over time."""

    def __init__(self) -> None:
        self.highest = 0.0
        self.steps = self._gone = 0  # the latter: steps in a row in which it was
        self._told = False

    def follow(self, rate: float) -> int:
        """For how many steps it has been gone, once that is to be told. An optimizer that finds its own has NaN."""
        self.steps += 1
        self.highest = max(self.highest, rate)
        self._gone = self._gone + 1 if rate < RATE_GONE * self.highest else 0
        if self._told or self._gone < max(RATE_STEPS, RATE_SHARE * self.steps):
            return 0
        self._told = True
        return self._gone
