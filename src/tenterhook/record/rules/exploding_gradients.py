"""Gradients that grow, with depth or with time."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record.places import Place
from tenterhook.record.rule import Finding, Persistent
from tenterhook.record.rules._depth import OfLayers, steepest
from tenterhook.record.step import Floats, Step

_FIRST, _RATIO, _TIMES = 5, 1e3, 100.0
_LARGE, _LARGE_LATER = 1e-2, 1e-1  # rms; what is smaller does no harm, however it has grown


class ExplodingGradients(OfLayers):
    """With depth: 1000 times from the last layers to the first. With time: 100 times the most of the first samples."""

    name = "exploding gradients"
    needs = "no gradients of weights were sampled"

    def __init__(self) -> None:
        super().__init__()
        self._deep, self._late = Persistent(), Persistent(3, 5)
        self._most: dict[int, list[float]] = {}

    def look(self, step: Step) -> Iterator[Finding]:
        """Each way to an output once of each kind."""
        for places, rms in self._layers.gradients(step):
            most = float(rms.max())
            if most == most:  # else some of it is not finite, which is another rule's
                self.has_looked = True
                yield from self._in_time(step, places, rms, most)
                yield from self._in_depth(step, places, rms, most)

    def _in_depth(self, step: Step, places: list[Place], rms: Floats, most: float) -> Iterator[Finding]:
        if most < _LARGE or len(places) < 4:
            self._deep.so(places[-1].number, False)
            return
        kept = np.flatnonzero(rms)  # a head that is not in use says nothing
        rms = rms[kept]
        quarter = max(1, len(rms) // 4)
        first, last = float(np.median(rms[:quarter])), float(np.median(rms[-quarter:]))
        grows = len(rms) >= 4 and first > _RATIO * last and first > _LARGE
        if self._deep.so(places[-1].number, grows):
            at = len(rms) - 2 - steepest(rms[::-1])
            text = f"rms {last:.1e} in the last layers, {first:.1e} in the first; "
            text += f"it grows most between {places[kept[at + 1]].site} and here"
            why = "the first layers are thrown about while the last stand still"
            yield self._finding(step, text, places[kept[at]], why)

    def _in_time(self, step: Step, places: list[Place], rms: Floats, most: float) -> Iterator[Finding]:
        past = self._most.setdefault(places[-1].number, [])
        if len(past) < _FIRST:
            past.append(most)
            return
        usual = max(past)
        if self._late.so(places[-1].number, most > _TIMES * usual and most > _LARGE_LATER):
            text = f"rms {most:.1e}, at most {usual:.1e} in the first {_FIRST} samples; largest here"
            why = "updates overshoot, and the next step is worse"
            yield self._finding(step, text, places[int(np.argmax(rms))], why)

    def _finding(self, step: Step, text: str, place: Place, why: str) -> Finding:
        then = "lower the learning rate, clip the gradients, or initialise with smaller weights"
        return Finding(self.name, "warn", step.number, text, place, why, then)
