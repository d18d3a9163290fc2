"""Gradients that grow, with depth or with time."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record._places import Place
from tenterhook.record._rule import Checked, Finding, Persistent
from tenterhook.record._step import Rows, Step
from tenterhook.record.rules._depth import by_model, in_order, steepest, weights

_FIRST = 20


class ExplodingGradients(Checked):
    """With depth: 1000 times from the last layers to the first, above 1e-2. With time: 100 times the first samples."""

    name = "exploding gradients"
    needs = "no gradients of parameters were sampled"

    def __init__(self) -> None:
        self._deep, self._late = Persistent(), Persistent(3, 5)
        self._most: dict[str, list[float]] = {}

    def look(self, step: Step) -> Iterator[Finding]:
        """Each model once of each kind."""
        for rows in by_model(weights(step.of("parameter_grad"))):
            if rows.infinite.any():
                continue
            self.has_looked = True
            yield from self._in_time(step, rows)
            yield from self._in_depth(step, in_order(rows, step))

    def _in_depth(self, step: Step, rows: Rows) -> Iterator[Finding]:
        places, rms = rows.places, rows.rms
        if len(places) < 4:
            return
        quarter = max(1, len(places) // 4)
        first, last = float(np.median(rms[:quarter])), float(np.median(rms[-quarter:]))
        if self._deep.so(places[0].model, first > 1e3 * last and first > 1e-2):
            text = f"rms {last:.1e} in the last layers, {first:.1e} in the first; it grows most here"
            yield self._finding(step, text, places[steepest(rms)])

    def _in_time(self, step: Step, rows: Rows) -> Iterator[Finding]:
        places, rms = rows.places, rows.rms
        if not len(places):
            return
        model, most = places[0].model, float(rms.max())
        past = self._most.setdefault(model, [])
        if len(past) < _FIRST:
            past.append(most)
            return
        usual = float(np.max(past))
        if self._late.so(model, most > 100 * usual > 0):
            text = f"rms {most:.1e}, at most {usual:.1e} in the first {_FIRST} samples; largest here"
            yield self._finding(step, text, places[int(np.argmax(rms))])

    def _finding(self, step: Step, text: str, place: Place) -> Finding:
        why = "updates overshoot, and the next step is worse"
        then = "lower the learning rate, clip the gradients, or initialise with smaller weights"
        return Finding(self.name, "warn", step.number, text, place, why, then)
