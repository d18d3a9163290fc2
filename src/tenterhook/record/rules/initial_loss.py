"""The first loss of a classifier."""

import math
from collections.abc import Iterator

from tenterhook.record.places import Place
from tenterhook.record.rule import Checked, Finding
from tenterhook.record.step import Step

_LARGE = 5.0  # the rms of an input that nobody has normalised


class InitialLoss(Checked):
    """A mean cross entropy over C classes begins near ln C; above 1.25 of that the model is sure of what is wrong."""

    name = "wrong initial loss"
    needs = "the loss is not a mean cross entropy"

    def look(self, step: Step) -> Iterator[Finding]:
        """At the first step. Below ln C a model was trained before, which is well."""
        if step.number or step.loss is None or not step.classes or step.classes < 2:
            return
        self.has_looked = True
        expected = math.log(step.classes)
        if step.loss / max(1, step.backwards) > 1.25 * expected + 0.1:  # micro-batches may not have been divided
            text = f"loss {step.loss:.3g} at the first step, where ln {step.classes} = {expected:.3g} is chance"
            why = "the first steps go into unlearning confident guesses"
            place, then = self._cause(step)
            yield Finding(self.name, "warn", step.number, text, place, why, then)

    def _cause(self, step: Step) -> tuple[Place | None, str]:
        inputs = step.of("input")
        for place, rms in zip(inputs.places, inputs.rms.tolist(), strict=True):
            if rms > _LARGE and "float" in place.dtype:
                return place, f"normalise the inputs: their rms is {rms:.3g}, and should be about 1"
        last = [place for place in step.of("output").places if place.kind.startswith(("Linear", "Conv"))]
        return last[-1] if last else None, "make the initial weights of the last layer smaller"
