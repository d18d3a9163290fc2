"""Values near the limits of a low-precision format."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tenterhook.record._rule import Checked, Finding, Persistent
from tenterhook.record._step import Step

_MAX = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_SUBNORMAL = {"float16": -14, "float8_e4m3fn": -6, "float8_e5m2": -14}


class Headroom(Checked):
    """float16 and float8: the largest value above 0.9 of what the format holds, or a tenth of the values subnormal."""

    name = "low-precision headroom"
    needs = "no values in float16 or float8 (bfloat16 has the range of float32)"

    def __init__(self) -> None:
        self._often = Persistent(3, 8)

    def look(self, step: Step) -> Iterator[Finding]:
        """Each place once of each kind."""
        low = [(i, place) for i, place in enumerate(step.rows.places) if place.dtype in _MAX]
        self.has_looked |= bool(low)
        for i, place in low:
            dtype = place.dtype
            scale = (step.scale or 1.0) if place.what == "output_grad" else 1.0
            most = step.rows.absmax[i] * scale
            if self._often.so((place.number, "max"), bool(most > 0.9 * _MAX[dtype])):
                text = f"largest value {most:.3g} of {_MAX[dtype]:.5g} that {dtype} holds"
                then = "use bfloat16, or scale what comes in"
                yield Finding(self.name, "warn", step.number, text, place, "the next step up is infinity", then)
            share = self._subnormal(step.rows.histogram[i], step.rows.sampled[i], _SUBNORMAL[dtype], scale)
            if self._often.so((place.number, "small"), share > 0.1):
                text = f"{share:.0%} of the values are too small for {dtype} to hold all their digits"
                then = "use bfloat16, or a larger loss scale"
                yield Finding(self.name, "warn", step.number, text, place, "they lose digits, or become zero", then)

    def _subnormal(self, bins: NDArray[np.int32], sampled: float, limit: int, scale: float) -> float:
        last = limit + 126 - round(np.log2(scale))
        small = bins.reshape(2, 256)[:, 1 : max(last + 1, 1)].sum()
        return float(small / sampled) if sampled else 0.0
