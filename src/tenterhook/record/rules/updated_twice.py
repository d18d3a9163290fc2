"""Parameters that several optimizers step."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules._depth import place_of
from tenterhook.record.rules.thresholds import REPEATED_STEPS, REPEATED_STEPS_OF
from tenterhook.record.step import Step


class UpdatedTwice(Checked):
    """A parameter is stepped twice with the same gradient: by two optimizers, or by one that has it twice."""

    name = "updated twice"
    needs = "no step of an optimizer was sampled"

    def __init__(self) -> None:
        self._often = Persistent(REPEATED_STEPS, REPEATED_STEPS_OF)

    def look(self, step: Step) -> Iterator[Finding]:
        """Once, with the first of the parameters."""
        self.has_looked |= bool(step.turns)
        twice = next((turn.twice for turn in step.turns if turn.twice), None)
        if self._often.so("any", twice is not None) and twice is not None:
            text = "two optimizers, or one that has it twice, step it with the same gradient"
            why = "its learning rate is as if doubled, and the two do not know of one another"
            then = "give it to one optimizer only, also where layers share it"
            yield Finding(self.name, "warn", step.number, text, place_of(*twice, step), why, then)
