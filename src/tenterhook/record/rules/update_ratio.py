"""Updates that are too large or too small for the weights."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record._rule import Checked, Finding, Persistent
from tenterhook.record._step import Step
from tenterhook.record.rules._depth import weights

_WARM, _SMALL, _LARGE = 20, 1e-6, 1e-1


class UpdateRatio(Checked):
    """RMS of the update ÷ RMS of the weights outside 1e-6 … 1e-1 in 6 of 8 samples after the first 20 steps."""

    name = "update-to-weight ratio"
    needs = f"no updates were sampled after the first {_WARM} steps"

    def __init__(self) -> None:
        self._often = Persistent(6, 8)

    def look(self, step: Step) -> Iterator[Finding]:
        """Each weight once; those that start near zero, and rates of zero, do not count."""
        if step.number < _WARM or not step.sampled:
            return
        updates, values = weights(step.of("update")), step.of("parameter")
        rms = {(p.model, p.site): value for p, value in zip(values.places, values.rms, strict=True)}
        gradients = step.of("parameter_grad")
        graded = {(p.model, p.site) for p, total in zip(gradients.places, gradients.sumsq, strict=True) if total > 0}
        for place, moved in zip(updates.places, updates.rms, strict=True):
            key = (place.model, place.site)
            size = rms.get(key, 0.0)
            if size < 1e-4 or not step.rate.get(key) or key not in graded or not np.isfinite(moved):
                continue
            self.has_looked = True
            ratio = moved / size
            if self._often.so((key, "large"), ratio > _LARGE):
                then = "lower the learning rate, for all or for this group"
                why = "weights that change by a tenth in a step forget what they have learnt"
                yield Finding(self.name, "warn", step.number, f"update {ratio:.1e} of the weight", place, why, then)
            if self._often.so((key, "small"), ratio < _SMALL):
                then = "raise the learning rate; with bfloat16 weights keep a float32 copy in the optimizer"
                why = "at that rate nothing is learnt in a million steps"
                text = f"update {ratio:.1e} of the weight" if moved else "no value of it changes, though gradients come"
                yield Finding(self.name, "warn", step.number, text, place, why, then)
