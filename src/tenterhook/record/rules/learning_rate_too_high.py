"""Weights that grow many times over within a few steps."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import is_weight
from tenterhook.record.rules.thresholds import GROWTH_FEWEST, GROWTH_FLOOR, GROWTH_STEPS, GROWTH_TIMES
from tenterhook.record.step import Floats, Step
from tenterhook.say import counted


class LearningRateTooHigh(Checked):
    """The RMS of a model's weights, in the middle of them, is 6 times what it was up to 20 steps before.

    Weights that begin near zero are left out, for they have to grow.
    """

    name = "learning rate too high"
    needs = "no two samples of weights within 20 steps"

    def __init__(self) -> None:
        self._past: dict[str, deque[tuple[int, bytes, Floats]]] = {}
        self._told: set[str] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each model once."""
        rows = step.of("parameter")
        models: dict[str, list[int]] = {}
        for i, place in enumerate(rows.places if not step.skipped else ()):
            if is_weight(place):
                models.setdefault(place.model, []).append(i)
        for model, which in models.items():
            some, past = np.array(which), self._past.setdefault(model, deque())
            layout, rms = rows.which[some].tobytes(), rows.rms[some]
            while past and (past[0][0] < step.number - GROWTH_STEPS or past[0][1] != layout):
                past.popleft()
            growth, i = _growth(past[0][2], rms) if past else (0.0, 0)
            past.append((step.number, layout, rms))
            self.has_looked |= len(past) > 1
            if growth > GROWTH_TIMES and model not in self._told:
                self._told.add(model)
                steps = counted(step.number - past[0][0], "step")
                text = f"the weights grew {growth:.3g} times in {steps}; most of all this one"
                why = "what they had learnt, or were initialised with, is lost"
                then = "lower the learning rate, tenfold at first; warm it up"
                yield Finding(self.name, "warn", step.number, text, rows.places[which[i]], why, then)


def _growth(before: Floats, now: Floats) -> tuple[float, int]:
    """How many times weights have grown, in the middle; and which has most."""
    counts = before > GROWTH_FLOOR
    if counts.sum() < GROWTH_FEWEST:
        return 0.0, 0
    times = np.where(counts, now / np.where(counts, before, 1.0), 0.0)
    return float(np.median(times[counts])), int(np.argmax(np.nan_to_num(times)))
