"""Gradients that get lost on their way to the first layers."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record._rule import Checked, Finding, Persistent
from tenterhook.record._step import Step
from tenterhook.record.rules._depth import by_model, in_order, steepest, weights


class VanishingGradients(Checked):
    """The RMS of the first quarter of the weights' gradients is below 1e-3 of that of the last, and below 1e-5."""

    name = "vanishing gradients"
    needs = "no model with four or more layers of weights got gradients"

    def __init__(self) -> None:
        self._often = Persistent()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each model once; the layer where it drops most is named."""
        for rows in by_model(weights(step.of("parameter_grad"))):
            rows = in_order(rows, step)
            if len(rows) < 4:
                continue
            self.has_looked = True
            quarter = max(1, len(rows) // 4)
            rms = rows.rms
            first, last = float(np.median(rms[:quarter])), float(np.median(rms[-quarter:]))
            # Exactly zero is another rule's: nothing vanished, something is dead.
            if self._often.so(rows.places[0].model, 0 < first < 1e-3 * last and first < 1e-5):
                lost = steepest(rms)
                text = f"rms {first:.1e} in the first layers, {last:.1e} in the last; it drops most before here"
                why = "the first layers hardly learn"
                then = "add residual connections or normalisation, or initialise for the activation that is used"
                yield Finding(self.name, "warn", step.number, text, rows.places[lost], why, then)
