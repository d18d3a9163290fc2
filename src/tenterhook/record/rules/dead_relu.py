"""ReLU units that never fire."""

from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step


class DeadRelu(Checked):
    """A unit is dead if it is zero for all samples of eight sampled batches; half of a layer is a finding."""

    name = "dead ReLU"
    needs = "no ReLU module was called in 8 sampled steps (those written as a function are not seen)"

    def __init__(self) -> None:
        self._told: set[int] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each layer once."""
        self.has_looked |= bool(step.dead)
        for place in step.of("output").places if step.dead else ():
            share = step.dead.get(place.number, 0.0)
            if share > 0.5 and place.number not in self._told:
                self._told.add(place.number)
                text = f"{share:.0%} of its units were zero for every sample of 8 batches"
                why = "no gradient passes a dead unit: it stays dead"
                then = "lower the learning rate, check the bias and the scale of what comes in, or use LeakyReLU"
                yield Finding(self.name, "error" if share > 0.9 else "warn", step.number, text, place, why, then)
