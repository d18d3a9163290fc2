"""Sigmoids and tanhs at the ends of their range."""

from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding, Persistent
from tenterhook.record._step import Step


class Saturation(Checked):
    """Over half of the values within 0.03 of an end, in 5 of 8 samples. The last layer's are to be there."""

    name = "saturated sigmoid or tanh"
    needs = "no Sigmoid or Tanh module was called before the last layer"

    def __init__(self) -> None:
        self._often = Persistent()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each layer once."""
        if not step.saturated:
            return
        # A sigmoid behind the last weights makes the answer, and a sure answer is no fault.
        holders = {p.site.rpartition(".")[0] for p in step.parameters}
        last = max((p.number for p in step.of("output").places if p.site in holders), default=-1)
        for place in step.of("output").places:
            share = step.saturated.get(place.number)
            if share is None or place.number > last:
                continue
            self.has_looked = True
            if self._often.so(place.number, share > 0.5):
                text = f"{share:.0%} of its values are within 0.03 of an end of the range"
                why = "its gradient there is nearly zero, so what is before it hardly learns"
                then = "scale down the weights before it, or normalise what comes in"
                yield Finding(self.name, "warn", step.number, text, place, why, then)
