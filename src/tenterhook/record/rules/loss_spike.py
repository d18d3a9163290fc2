"""A loss far above what it was."""

import math
import statistics
from collections import deque
from collections.abc import Iterator

from tenterhook.record.rule import Finding, OfLosses
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import Target
from tenterhook.record.step import Step


class LossSpike(OfLosses):
    """More than six standard deviations above the mean of the last 128 steps, and twice that mean.

    Late in training the loss is near zero and one hard batch is a hundred times that; so it must also rise by a tenth
    of what the loss was at the start. The losses of small batches have long tails: their logarithms must agree.
    Not checked where the target of the loss moves.
    """

    name = "loss spike"
    needs = f"fewer than {t.SPIKE_WARM} steps with a loss"

    def __init__(self) -> None:
        self._target = Target()
        self._past: deque[float] = deque(maxlen=t.SPIKE_WINDOW)
        self._sum = 0.0
        self._first: list[float] = []
        self._quiet_until = 0
        self._newest = 0  # of the optimizers

    @property
    def unchecked(self) -> str | None:
        """Why not all was checked, or None."""
        return self._target.moves or super().unchecked

    def look(self, step: Step) -> Iterator[Finding]:
        """The step at which it starts."""
        loss = step.finite_loss
        self.count(step)
        self._target = step.target
        if loss is None:
            return
        if (newest := max(step.optimizers, default=0)) > self._newest:  # another training begins
            self._newest = newest
            self._past.clear()
            self._first.clear()
            self._sum = 0.0
        if len(self._past) >= t.SPIKE_WARM:
            self.has_looked = True
            mean = self._sum / len(self._past)
            # The spread is only worked out for the few that pass this.
            high = loss > t.SPIKE_TIMES * abs(mean) and step.number >= self._quiet_until
            if high and self._is_spike(loss) and not self._target.moves:
                self._quiet_until = step.number + t.SPIKE_WINDOW
                text = f"loss {loss:.3g}, {mean:.3g} on average before"
                why = "one bad batch or step can undo many"
                then = "look at that batch; lower the learning rate, or clip the gradients"
                yield Finding(self.name, "warn", step.number, text, None, why, then)
        self._keep(loss)

    def _is_spike(self, loss: float) -> bool:
        mean, spread = statistics.fmean(self._past), statistics.pstdev(self._past)
        if loss < mean + t.SPIKE_SIGMAS * spread or loss - mean < t.SPIKE_SHARE * abs(statistics.fmean(self._first)):
            return False
        if min(self._past) <= 0:
            return True
        logs = [math.log(one) for one in self._past]
        return math.log(loss) > statistics.fmean(logs) + t.SPIKE_LOG_SIGMAS * statistics.pstdev(logs)

    def _keep(self, loss: float) -> None:
        if len(self._first) < t.SPIKE_FIRST:
            self._first.append(loss)
        self._sum += loss - (self._past[0] if len(self._past) == t.SPIKE_WINDOW else 0.0)
        self._past.append(loss)
