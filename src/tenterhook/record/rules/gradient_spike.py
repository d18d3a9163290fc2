"""A gradient far above what it was."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step

_WINDOW, _WARM, _SIGMAS, _TIMES = 128, 30, 6.0, 10.0


class GradientSpike(Checked):
    """The norm of all gradients is ten times its median, and six robust standard deviations above it."""

    name = "gradient spike"
    needs = f"fewer than {_WARM} sampled steps with gradients"

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=_WINDOW)
        self._quiet_until = 0

    def look(self, step: Step) -> Iterator[Finding]:
        """The step at which it comes."""
        rows = step.of("parameter_grad")
        if not len(rows) or rows.infinite.any():
            return
        norm = float(np.sqrt(rows.sumsq.sum()))
        if len(self._past) >= _WARM:
            self.has_looked = True
            middle = float(np.median(self._past))
            spread = 1.4826 * float(np.median(np.abs(np.array(self._past) - middle)))
            if norm > _TIMES * middle and norm > middle + _SIGMAS * spread and step.number >= self._quiet_until:
                self._quiet_until = step.number + 10
                worst = int(np.argmax(rows.sumsq))
                text = f"gradient norm {norm:.3g}, {middle:.3g} in the middle before; most of it here"
                why = "one such step can undo many"
                then = "clip the gradients (clip_grad_norm_); look at that batch"
                yield Finding(self.name, "warn", step.number, text, rows.places[worst], why, then)
        self._past.append(norm)
