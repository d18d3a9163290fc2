"""Gradients that get lost on their way to the first layers."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record.rule import Finding, Persistent
from tenterhook.record.rules._depth import OfLayers, steepest
from tenterhook.record.step import Step

_RATIO, _SMALL = 1e-3, 1e-5


class VanishingGradients(OfLayers):
    """The RMS of the gradients of the first quarter of the layers is below 1e-3 of the last quarter's, and below 1e-5.

    The output is left out, for it may begin small on purpose, and all gradients before it are as small then.
    One layer of the first that gets through is enough: the other branch may start at zero on purpose.
    """

    name = "vanishing gradients"
    needs = "no model with four or more layers of weights got gradients"

    def __init__(self) -> None:
        super().__init__()
        self._often = Persistent()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each way to an output once; the layer before which it drops most is named."""
        for places, rms in self._layers.gradients(step):
            if len(places) < 4:
                continue
            self.has_looked = True
            hidden = rms[:-1]
            quarter = max(2, len(hidden) // 4)
            first, last = float(hidden[:quarter].max()), float(np.median(hidden[-quarter:]))
            # Exactly zero is another rule's: nothing vanished, something is dead.
            small = 0 < first < _SMALL and first < _RATIO * last
            if self._often.so(places[-1].number, small):
                lost = steepest(rms)
                text = f"rms {first:.1e} in the first layers, {last:.1e} in the last before the output; "
                text += f"it drops most between {places[lost + 1].site} and here"
                why = "the first layers hardly learn"
                then = "add residual connections or normalisation, or initialise for the activation that is used"
                yield Finding(self.name, "warn", step.number, text, places[lost], why, then)
