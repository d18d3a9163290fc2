"""A loss far above what it was."""

import math
import statistics
from collections import deque
from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step

_WINDOW, _WARM, _SIGMAS, _TIMES = 128, 64, 6.0, 2.0


class LossSpike(Checked):
    """More than six standard deviations above the mean of the last 128 steps, and twice that mean."""

    name = "loss spike"
    needs = f"fewer than {_WARM} steps with a loss"

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=_WINDOW)
        self._quiet_until = 0

    def look(self, step: Step) -> Iterator[Finding]:
        """The step at which it starts."""
        loss = step.loss
        if loss is None or not math.isfinite(loss):
            return
        if len(self._past) >= _WARM:
            self.has_looked = True
            mean, spread = statistics.fmean(self._past), statistics.pstdev(self._past)
            if loss > mean + _SIGMAS * spread and loss > _TIMES * abs(mean) and step.number >= self._quiet_until:
                self._quiet_until = step.number + _WINDOW
                text = f"loss {loss:.3g}, {mean:.3g} on average before"
                why = "one bad batch or step can undo many"
                then = "look at that batch; lower the learning rate, or clip the gradients"
                yield Finding(self.name, "warn", step.number, text, None, why, then)
        self._past.append(loss)
