"""The first loss of a classifier."""

from collections.abc import Iterator

from tenterhook.record.places import Place
from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._loss import Labels
from tenterhook.record.rules.thresholds import INITIAL_PLUS, INITIAL_TIMES
from tenterhook.record.step import Step

_LARGE = 5.0  # the rms of an input that nobody has normalised


class InitialLoss(Checked):
    """A cross entropy over C classes begins near ln C; 10 % and half a nat above that, the model is sure, and wrong.

    It is that of the loss function itself, over its labels, whatever is made of it and added to it.
    """

    name = "wrong initial loss"
    needs = "the first loss is no cross entropy of torch's loss functions"

    def __init__(self) -> None:
        self._is_over = False

    def look(self, step: Step) -> Iterator[Finding]:
        """At the first step with a loss. Below ln C a model was trained before, which is well."""
        if self._is_over or not step.backwards:
            return
        self._is_over = True
        for _, term in Labels().add(step):
            if term.chance is None:
                continue
            self.has_looked = True
            if term.mean > INITIAL_TIMES * term.chance + INITIAL_PLUS + 1 / max(1.0, term.many):
                chance = f"ln {term.classes} = {term.chance:.3g}"
                text = f"{term.function} {term.mean:.3g} at the first step, where {chance} is chance"
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
