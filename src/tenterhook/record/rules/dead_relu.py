"""ReLU units that never fire."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.step import Step

_HALF, _MOST = 0.5, 0.9


class DeadRelu(Checked):
    """A unit is dead if it is zero for all samples of eight sampled batches; half of a layer, twice, is a finding.

    Behind a layer that gives nothing but zeros every input is the same, so half of the next is dead too: that one is
    not named.
    """

    name = "dead ReLU"
    needs = "no ReLU module was called in 8 sampled steps (those written as a function are not seen)"

    def __init__(self) -> None:
        self._twice = Persistent(2, 2)
        self._dead: dict[str, int] = {}  # by model: the first layer that is dead as a whole

    def look(self, step: Step) -> Iterator[Finding]:
        """Each layer once."""
        if not step.dead:
            return
        self.has_looked = True
        for place in step.of("output").places:
            share = step.dead.get(place.number)
            if share is None or not self._twice.so(place.number, share > _HALF):
                continue
            if place.number > self._dead.get(place.model, place.number):
                continue
            if share > _MOST:
                self._dead[place.model] = place.number
            text = f"{share:.0%} of its units were zero for every sample of 8 batches, and of the 8 before"
            why = "no gradient passes a dead unit: it stays dead"
            then = "lower the learning rate, check the bias and the scale of what comes in, or use LeakyReLU"
            usual = "note" if step.target.moves else "warn"  # in reinforcement learning many units come to lie idle
            yield Finding(self.name, "error" if share > _MOST else usual, step.number, text, place, why, then)
