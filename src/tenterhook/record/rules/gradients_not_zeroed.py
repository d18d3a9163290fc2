"""Gradients that add up from step to step."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules.thresholds import OLD_GRADIENTS, OLD_GRADIENTS_OF
from tenterhook.record.step import Step


class GradientsNotZeroed(Checked):
    """What a step has used is still there, unchanged, when the next backward pass begins, and is added to.

    Accumulation sets it back after each step, and so is not meant.
    """

    name = "gradients not zeroed"
    needs = "no two steps of an optimizer in a row were seen, with a backward pass in between"
    only_sampled = False

    def __init__(self) -> None:
        self._often = Persistent(OLD_GRADIENTS, OLD_GRADIENTS_OF)

    def look(self, step: Step) -> Iterator[Finding]:
        """Once for each optimizer."""
        for optimizer, size in step.old_gradients.items():
            self.has_looked = True
            if self._often.so(optimizer, size > 0):
                text = f"the gradients of a step are still there when the next begins, in {OLD_GRADIENTS} steps"
                why = "each step takes the sum of all gradients so far"
                then = "call optimizer.zero_grad() after each step, or before backward()"
                yield Finding(self.name, "warn", step.number, text, None, why, then)
