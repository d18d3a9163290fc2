"""The first loss of a classifier."""

import math
from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step


class InitialLoss(Checked):
    """A mean cross entropy over C classes begins near ln C; far above that the model is surely wrong of something."""

    name = "wrong initial loss"
    needs = "the loss is not a mean cross entropy"

    def look(self, step: Step) -> Iterator[Finding]:
        """At the first step. Below ln C a model was trained before, which is well."""
        if step.number or step.loss is None or not step.classes or step.classes < 2:
            return
        self.has_looked = True
        expected = math.log(step.classes)
        if step.loss > 1.25 * expected + 0.1:
            text = f"loss {step.loss:.3g} at the first step, where ln {step.classes} = {expected:.3g} is chance"
            why = "the first steps go into unlearning confident guesses"
            then = "scale down the initial weights of the last layer; check that inputs are normalised"
            yield Finding(self.name, "warn", step.number, text, None, why, then)
