"""A loss that is no number."""

import math
from collections.abc import Iterator

from tenterhook.record.rule import Finding, OfLosses
from tenterhook.record.step import Step

_SKIPS = 16


class LossNan(OfLosses):
    """NaN or Inf, except where a GradScaler left the step out: there it may be the scale that overflowed."""

    name = "loss is NaN"
    needs = "no loss was seen: no backward() on a scalar"

    def __init__(self) -> None:
        self._found = False
        self._skips = 0

    def look(self, step: Step) -> Iterator[Finding]:
        """Once."""
        self.count(step)
        if step.loss is None or self._found:
            return
        self.has_looked = True
        if math.isfinite(step.loss):
            self._skips = 0
            return
        self._skips += step.skipped
        if not step.skipped or self._skips > _SKIPS:
            self._found = True
            text, why = f"the loss is {step.loss}", "nothing is learnt from it"
            yield Finding(self.name, "error", step.number, text, None, why, self._then(step))

    def _then(self, step: Step) -> str:
        if not step.sampled:
            return "run again with --every 1 (every=1 for watch) to see where it comes from"
        outputs = step.of("output")
        if outputs.infinite.any():
            return "see where the first value that is not finite came up"
        if not len(outputs):
            return "look for a log, a division or a square root in the loss, and in the model, which was not recorded"
        return "all that the model gave was finite: look for a log, a division or a square root in the loss"
