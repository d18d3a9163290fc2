"""Trainings that train nothing at all."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import place_of
from tenterhook.record.rules.thresholds import NOTHING_PASSES, NOTHING_SAMPLES
from tenterhook.record.step import Step


class NothingTrained(Checked):
    """No optimizer steps after many backward passes, or no parameter of those that do requires a gradient."""

    name = "nothing is trained"
    needs = f"fewer than {NOTHING_SAMPLES} sampled steps of an optimizer"

    def __init__(self) -> None:
        self._frozen = 0  # samples in a row in which an optimizer had nothing to train

    def look(self, step: Step) -> Iterator[Finding]:
        """Once of each kind."""
        if step.backwards - step.skipped >= NOTHING_PASSES and not step.optimizers:
            yield self._without_steps(step)
        if step.parameters:
            yield from self._all_frozen(step)

    def _without_steps(self, step: Step) -> Finding:
        self.has_looked = True
        text = f"{step.backwards:,} backward passes, and no step of an optimizer"
        why = "the weights stay what they were at the start"
        return Finding(self.name, "error", step.number, text, None, why, "call optimizer.step() after backward()")

    def _all_frozen(self, step: Step) -> Iterator[Finding]:
        optimized = [one for one in step.parameters if one.steps]
        trains = any(one.trainable for one in optimized)
        self.has_looked |= trains
        self._frozen = self._frozen + 1 if optimized and not trains else 0
        if self._frozen == NOTHING_SAMPLES:
            self.has_looked = True
            text = "no parameter of the optimizer requires a gradient"
            why = "the weights stay what they were at the start"
            then = "call requires_grad_(True) on what is to be trained"
            place = place_of(optimized[0].model, optimized[0].site, step)
            yield Finding(self.name, "error", step.number, text, place, why, then)
