"""Gradients that are exactly zero."""

from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding, Persistent
from tenterhook.record._step import Step


class ZeroGradients(Checked):
    """All of a parameter's gradient is zero in 5 of 8 samples. Of several, the one nearest to the loss is named."""

    name = "all-zero gradients"
    needs = "no gradients of parameters were sampled"

    def __init__(self) -> None:
        self._often = Persistent()

    def look(self, step: Step) -> Iterator[Finding]:
        """One finding for all that turn up in the same step: a dead layer silences everything before it."""
        rows = step.of("parameter_grad")
        self.has_looked |= len(rows) > 0
        flagged = []
        silent = (rows.zeros == rows.count) & (rows.count > 0)
        for place, zero in zip(rows.places, silent.tolist(), strict=True):
            zero = zero and step.rate.get((place.model, place.site)) != 0
            if self._often.so(place.number, zero):
                flagged.append(place)
        if flagged:
            nearest = max(flagged, key=lambda p: step.reached.get((p.model, p.site.rpartition(".")[0]), p.number))
            others = f", and that of {len(flagged) - 1} more before it" if len(flagged) > 1 else ""
            text = f"its gradient is exactly zero{others}"
            why = "they do not learn, whatever weight decay and momentum do to them"
            then = "look for a dead ReLU, a detach(), a mask or a zero weight between it and the loss"
            yield Finding(self.name, "warn", step.number, text, nearest, why, then)
