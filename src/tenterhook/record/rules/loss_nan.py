"""A loss that is no number."""

import math
from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step


class LossNan(Checked):
    """NaN or Inf, except where a GradScaler left the step out."""

    name = "loss is NaN"
    needs = "no loss was seen: no backward() on a scalar"

    def __init__(self) -> None:
        self._found = False

    def look(self, step: Step) -> Iterator[Finding]:
        """Once."""
        if step.loss is None or self._found:
            return
        self.has_looked = True
        if not math.isfinite(step.loss) and not step.skipped:
            self._found = True
            then = "see the first non-finite value above" if step.sampled else "run again with --every 1"
            yield Finding(self.name, "error", step.number, f"loss {step.loss}", None, "nothing is learnt from it", then)
