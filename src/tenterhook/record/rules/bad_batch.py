"""The row of a batch that a loss became NaN by."""

import math
from collections import deque
from collections.abc import Iterator

from tenterhook.record.places import Place
from tenterhook.record.rule import Finding, OfLosses
from tenterhook.record.rules.thresholds import BAD_BATCH_STEPS
from tenterhook.record.step import Step


class BadBatch(OfLosses):
    """A loss that is no number, where an input or a target of that step, or of one just before, has a row far off.

    On a GPU inputs are looked at in sampled steps; on a CPU also where a loss jumps.
    """

    name = "bad batch"
    needs = "no loss was seen: no backward() on a scalar"

    def __init__(self) -> None:
        self._bad: deque[Step] = deque(maxlen=BAD_BATCH_STEPS)
        self._is_over = False

    def look(self, step: Step) -> Iterator[Finding]:
        """At the first loss that is no number."""
        self.count(step)
        if step.bad_rows:
            self._bad.append(step)
        if step.loss is None or self._is_over:
            return
        self.has_looked = True
        if math.isfinite(step.loss) or step.skipped:
            return
        self._is_over = True
        recent = [one for one in self._bad if step.number - one.number <= BAD_BATCH_STEPS]
        for model, site in recent[0].bad_rows if recent else ():
            yield self._finding(recent[0], model, site)

    def _finding(self, step: Step, model: str, site: str) -> Finding:
        row, size = step.bad_rows[model, site]
        text = f"row {row} of this batch has values up to {size:.2g}, 10,000 times those of other rows"
        if not math.isfinite(size):
            text = f"row {row} of this batch has a number that is not finite"
        why = "one such row makes the loss NaN, and by that all weights"
        then = "look at that example; leave it out, or check the data with torch.isfinite when it is loaded"
        return Finding(self.name, "error", step.number, text, Place(-1, model, site, "input", ""), why, then)
