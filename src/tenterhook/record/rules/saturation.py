"""Sigmoids and tanhs at the ends of their range."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.step import Step


class Saturation(Checked):
    """Over half of the values within 0.03 of an end, in 5 of 8 samples. The last layer's are to be there."""

    name = "saturated sigmoid or tanh"
    needs = "no Sigmoid or Tanh module was called before the last layer"

    def __init__(self) -> None:
        self._often = Persistent()
        self._first: float | None = None

    def look(self, step: Step) -> Iterator[Finding]:
        """Each layer once."""
        if not step.saturated:
            return
        self._first = step.loss if self._first is None else self._first
        # A sigmoid behind the last weights makes the answer, and a sure answer is no fault.
        holders = {(model, site.rpartition(".")[0] or ".") for model, site in step.rate}
        last = {key[0]: number for key, number in sorted(step.order.items(), key=lambda one: one[1]) if key in holders}
        for place in step.of("output").places:
            share = step.saturated.get(place.number)
            if share is None or place.number > last.get(place.model, -1):
                continue
            self.has_looked = True
            if self._often.so(place.number, share > 0.5):
                text = f"{share:.0%} of its values are within 0.03 of an end of the range"
                why = "its gradient there is nearly zero, so what is before it hardly learns"
                then = "make the weights before it smaller, or normalise what comes in"
                yield Finding(self.name, self._severity(step), step.number, text, place, why, then)

    def _severity(self, step: Step) -> str:
        """While the loss falls, it is learning all the same: many a trained tanh is at its ends."""
        if self._first is None or step.loss is None:
            return "warn"
        return "note" if step.loss < 0.5 * self._first else "warn"
