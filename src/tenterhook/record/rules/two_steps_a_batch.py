"""Steps that are made twice with one gradient."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules.thresholds import REPEATED_STEPS, REPEATED_STEPS_OF
from tenterhook.record.step import Step


class TwoStepsABatch(Checked):
    """An optimizer steps again, and there was no backward pass since."""

    name = "two steps a batch"
    needs = "no step of an optimizer was sampled"

    def __init__(self) -> None:
        self._often = Persistent(REPEATED_STEPS, REPEATED_STEPS_OF)

    def look(self, step: Step) -> Iterator[Finding]:
        """Once for each optimizer."""
        for turn in step.turns:
            self.has_looked = True
            if self._often.so(turn.optimizer, turn.repeats):
                text = f"an optimizer has stepped again without a backward pass since, {REPEATED_STEPS} times"
                why = "the same gradient is used twice, as if the learning rate were higher"
                then = "call step() once; with a GradScaler, scaler.step(optimizer) does"
                yield Finding(self.name, "warn", step.number, text, None, why, then)
