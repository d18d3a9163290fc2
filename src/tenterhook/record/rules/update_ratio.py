"""Updates that are too large or too small for the weights."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.rule import Checked, Finding, PersistentRows
from tenterhook.record.rules._depth import is_weight
from tenterhook.record.step import Floats, Rows, Step

_WARM, _SMALL, _LARGE = 20, 1e-6, 1e-1
_FLOOR = 1e-4  # rms of a weight; below it the ratio means nothing
_LOW = ("bfloat16", "float16")


class UpdateRatio(Checked):
    """RMS of the update ÷ RMS of the weights outside 1e-6 … 1e-1 in 6 of 8 samples after its first 20 steps.

    Too large: not of weights that start at zero, for they have to grow. Too small: only if it was never otherwise,
    for at the end of training gradients and rates are small, and if all weights with that rate are slow, for else it
    is the gradient that is small; or where rounding swallows all of it.
    """

    name = "update-to-weight ratio"
    needs = f"no updates were sampled after the first {_WARM} steps"

    def __init__(self) -> None:
        self._large, self._small = PersistentRows(6, 8), PersistentRows(6, 8)
        self._layout = b""
        self._many = 0
        self._index = np.zeros((2, 0), np.int64)
        self._keys: list[tuple[str, str]] = []
        self._highest: dict[frozenset[int], float] = {}  # by optimizers: their largest rate
        self._low = np.zeros(0, bool)
        # By number of place of the update:
        self._since = np.zeros(0)  # the step at which it was first seen
        self._first = np.zeros(0)  # rms of the weight, at first
        self._most = np.zeros(0)  # ratio
        self._rate = np.zeros(0)

    def look(self, step: Step) -> Iterator[Finding]:
        """Each weight once."""
        updates, values = step.of("update"), step.of("parameter")
        if not len(updates) or step.skipped:
            return
        rows, at = self._rows(updates, values, step)
        if not len(rows):
            return
        which, size, moved = rows.which, values.rms[at], rows.rms
        ratio = moved / np.maximum(size, _FLOOR)
        self._first[which] = np.where(np.isnan(self._first[which]), size, self._first[which])
        self._since[which] = np.fmin(self._since[which], step.number)
        rates = np.array([step.rate[key] or 0.0 for key in self._keys])  # may be those of some samples before
        highest, before = max(step.rates, default=0.0), self._highest.get(step.optimizers, 0.0)
        self._highest[step.optimizers] = max(before, highest)
        counts = (size >= _FLOOR) & (rates > 0) & np.isfinite(ratio)
        rising = rates > self._rate[which]
        self._most[which] = np.where(counts, np.maximum(self._most[which], ratio), self._most[which])
        self._rate[which] = np.maximum(self._rate[which], rates)
        counts &= step.number - self._since[which] >= _WARM
        self.has_looked |= bool(counts.any())
        started = self._first[which] >= 10 * _FLOOR
        for i in self._large.so(which, counts & started & (ratio > _LARGE)):
            then = "lower the learning rate, for all or for this group"
            why = "weights that change by a tenth in a step forget what they have learnt"
            text = f"each update is {ratio[i]:.1e} of the weight; about 1e-3 is usual"
            yield Finding(self.name, "warn", step.number, text, rows.places[i], why, then)
        tiny = counts & (ratio < _SMALL) & ~rising & (rates >= 0.1 * self._rate[which])
        tiny &= 0.1 * before <= highest <= before
        if tiny.any():
            slow = (self._most[which] < 10 * _SMALL) & ~np.isin(rates, rates[ratio >= _SMALL])
            tiny &= self._has_gradient(rows, step) & (slow | (self._low & (moved == 0)))
        for i in self._small.so(which, tiny):
            yield self._too_small(step, rows, i, float(ratio[i]))

    def _too_small(self, step: Step, rows: Rows, i: int, ratio: float) -> Finding:
        place = rows.places[i]
        text = f"each update is {ratio:.1e} of the weight; about 1e-3 is usual"
        why, then = "at that rate a million steps teach it nothing", "raise the learning rate"
        if not ratio:
            text = "none of its values changes, though gradients come"
        if place.dtype in _LOW:
            why = f"an update smaller than half a digit of {place.dtype} is rounded away"
            then = "keep the weights in float32 and use autocast, or raise the learning rate"
        return Finding(self.name, "warn", step.number, text, place, why, then)

    def _rows(self, updates: Rows, values: Rows, step: Step) -> tuple[Rows, NDArray[np.int64]]:
        """The updates of weights, and at which rows of the values these are."""
        layout = updates.layout + values.layout
        if layout != self._layout or len(step.rate) != self._many:
            self._layout, self._many = layout, len(step.rate)
            at = {(place.model, place.site): i for i, place in enumerate(values.places)}
            known = [(i, (p.model, p.site)) for i, p in enumerate(updates.places) if is_weight(p)]
            known = [(i, key) for i, key in known if key in at and key in step.rate]
            self._index = np.array([(i, at[key]) for i, key in known], np.int64).reshape(-1, 2).T
            self._keys = [key for _, key in known]
            places = [updates.places[i] for i, _ in known]
            self._low = np.array([place.dtype in _LOW for place in places], bool)
            self._grow(int(updates.which.max()) + 1)
        return updates.where(self._index[0]), self._index[1]

    def _has_gradient(self, rows: Rows, step: Step) -> NDArray[np.bool_]:
        gradients = step.of("parameter_grad")
        some = {(p.model, p.site) for p, total in zip(gradients.places, gradients.sumsq, strict=True) if total > 0}
        return np.array([(place.model, place.site) in some for place in rows.places], bool)

    def _grow(self, size: int) -> None:
        def longer(values: Floats, fill: float) -> Floats:
            return np.concatenate([values, np.full(max(0, size - len(values)), fill)])

        self._since, self._first = longer(self._since, np.nan), longer(self._first, np.nan)
        self._most = longer(self._most, 0.0)
        self._rate = longer(self._rate, 0.0)
