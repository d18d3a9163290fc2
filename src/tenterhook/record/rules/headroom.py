"""Values near the limits of a low-precision format."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.rule import Checked, Finding, PersistentRows
from tenterhook.record.step import Floats, Rows, Step

_MAX = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_SUBNORMAL = {"float16": -14, "float8_e4m3fn": -6, "float8_e5m2": -14}  # below 2 to this
_GRADIENTS = ("output_grad", "parameter_grad")


class Headroom(Checked):
    """float16 and float8: the largest value above 0.9 of what the format holds, or a tenth of a gradient subnormal.

    A mask is often filled with the lowest number of the format, which is no overflow. That an output has small values
    does no harm (most of a softmax is small); that a gradient has them does, where no loss scale lifts them.
    """

    name = "low-precision headroom"
    needs = "no values in float16 or float8 (bfloat16 has the range of float32)"

    def __init__(self) -> None:
        self._large, self._small = PersistentRows(3, 8), PersistentRows(3, 8)
        self._layout = b""
        self._low = np.zeros(0, np.int64)

    def look(self, step: Step) -> Iterator[Finding]:
        """Each place once of each kind."""
        if not len(step.rows) or step.skipped:
            return
        if step.rows.layout != self._layout:
            self._layout = step.rows.layout
            low = [i for i, p in enumerate(step.rows.places) if p.dtype in _MAX and p.what != "update"]
            self._low = np.array(low, np.int64)
        if not len(self._low):
            return
        self.has_looked = True
        rows = step.rows.where(self._low)
        scale = np.array([(step.scale or 1.0) if place.what == "output_grad" else 1.0 for place in rows.places])
        yield from self._too_large(step, rows, scale)
        yield from self._too_small(step, rows, scale)

    def _too_large(self, step: Step, rows: Rows, scale: Floats) -> Iterator[Finding]:
        limit = np.array([_MAX[place.dtype] for place in rows.places])
        lowest, highest = -rows.min * scale, rows.max * scale
        most = np.maximum(np.where(lowest >= limit, 0.0, lowest), highest)
        for i in self._large.so(rows.which, (most > 0.9 * limit) & (rows.finite > 0)):
            place = rows.places[i]
            text = f"the largest value is {most[i]:.5g}, and {place.dtype} ends at {limit[i]:.5g}"
            then = "use bfloat16, or scale down what comes in"
            yield Finding(self.name, "warn", step.number, text, place, "a little more is infinity", then)

    def _too_small(self, step: Step, rows: Rows, scale: Floats) -> Iterator[Finding]:
        rows, scale = rows.where(kept := _are_gradients(rows)), scale[kept]
        if not len(rows):
            return
        bins = rows.histogram.reshape(-1, 2, 256).sum(1)
        limits = np.array([_SUBNORMAL[place.dtype] for place in rows.places])
        last = np.clip(limits + 126 - np.round(np.log2(scale)), 0, 255).astype(np.int64)
        small = np.cumsum(bins[:, 1:], 1)[np.arange(len(rows)), np.maximum(last - 1, 0)] * (last > 0)
        share = small / np.maximum(bins[:, 1:].sum(1), 1)
        for i in self._small.so(rows.which, share > 0.1):
            place = rows.places[i]
            text = (
                f"{share[i]:.0%} of the values that are not zero are too small for {place.dtype} to hold their digits"
            )
            then = "use bfloat16, or a GradScaler with a larger scale"
            yield Finding(self.name, "note", step.number, text, place, "they lose digits, or become zero", then)


def _are_gradients(rows: Rows) -> NDArray[np.bool_]:
    return np.array([place.what in _GRADIENTS for place in rows.places], bool)
