"""Batches that are all the same."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.step import Floats, Rows, Step


class SameBatches(Checked):
    """The inputs of six steps in a row have equal statistics, to the last digit."""

    name = "identical batches"
    needs = (
        "the model was not called with numbers in two steps in a row that were sampled (zeros and ones do not count)"
    )

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, bytes, Floats, int]] = {}  # by model; the last: how often alike

    def look(self, step: Step) -> Iterator[Finding]:
        """Each model once, at the sixth."""
        given = step.of("input")
        for model in dict.fromkeys(place.model for place in given.places):
            rows = given.where(np.array([place.model == model for place in given.places]))
            number, layout, numbers, often = self._seen.get(model, (-2, b"", np.zeros(0), 0))
            if often > 4:
                continue
            if step.number == number + 1 and not _says_nothing(rows):
                self.has_looked = True
                often = often + 1 if rows.layout == layout and np.array_equal(rows.numbers, numbers) else 0
                if often == 5:
                    text = "six steps in a row got the same inputs"
                    why = "the model learns these by heart and nothing else"
                    then = "check the loader and its sampler; if you train on the whole set at once, all is well"
                    yield Finding(self.name, "note", step.number, text, rows.places[0], why, then)
            self._seen[model] = (step.number, rows.layout, rows.numbers, often)


def _says_nothing(rows: Rows) -> bool:
    """Whether all values are 0 or 1: the sums of one-hot vectors are the same for any of them."""
    return bool((rows.zeros + rows.sum == rows.count).all() and (rows.sum == rows.sumsq).all())
