"""Batches that are all the same."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Floats, Rows, Step


class SameBatches(Checked):
    """The inputs of six steps in a row have equal statistics, to the last digit."""

    name = "identical batches"
    needs = (
        "the model was not called with numbers in two steps in a row that were sampled (zeros and ones do not count)"
    )

    def __init__(self) -> None:
        self._last: Floats = np.zeros(0)
        self._layout = b""
        self._number = -2
        self._row = 0

    def look(self, step: Step) -> Iterator[Finding]:
        """Once, at the sixth."""
        rows = step.of("input")
        if not len(rows) or self._row > 4:
            return
        if step.number == self._number + 1 and not _says_nothing(rows):
            self.has_looked = True
            same = rows.layout == self._layout and np.array_equal(rows.numbers, self._last)
            self._row = self._row + 1 if same else 0
            if self._row == 5:
                text = "six steps in a row got the same inputs"
                why = "the model learns these by heart and nothing else"
                then = "check the loader and its sampler; if you train on the whole set at once, all is well"
                yield Finding(self.name, "note", step.number, text, rows.places[0], why, then)
        self._last, self._layout, self._number = rows.numbers, rows.layout, step.number


def _says_nothing(rows: Rows) -> bool:
    """Whether all values are 0 or 1: the sums of one-hot vectors are the same for any of them."""
    return bool((rows.zeros + rows.sum == rows.count).all() and (rows.sum == rows.sumsq).all())
