"""Batches that are all the same."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step


class SameBatches(Checked):
    """The inputs of six steps in a row have equal statistics, to the last digit."""

    name = "identical batches"
    needs = "no two steps in a row were sampled"

    def __init__(self) -> None:
        self._last: dict[Any, Any] = {}
        self._number = -2
        self._row = 0

    def look(self, step: Step) -> Iterator[Finding]:
        """Once, at the sixth."""
        rows = step.of("input")
        if not len(rows):
            return
        now = {place.number: rows.numbers[i] for i, place in enumerate(rows.places)}
        if step.number == self._number + 1:
            self.has_looked = True
            same = now.keys() == self._last.keys() and all(np.array_equal(now[k], self._last[k]) for k in now)
            self._row = self._row + 1 if same else 0
            if self._row == 5:
                text = "six steps in a row got the same inputs"
                why = "the model learns these by heart and nothing else"
                then = "check the loader and its sampler; if you train on the whole set at once, all is well"
                yield Finding(self.name, "note", step.number, text, rows.places[0], why, then)
        self._last, self._number = now, step.number
