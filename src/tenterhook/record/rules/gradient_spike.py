"""A gradient far above what it was."""

from bisect import insort
from collections import deque
from collections.abc import Iterator

import numpy as np

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.step import Step

_WINDOW, _WARM, _SIGMAS, _TIMES, _FIRST = 128, 30, 6.0, 10.0, 20
_LAYOUTS = 64


class Past:
    """The last norms, also in order, so that their median costs nothing."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def add(self, norm: float) -> None:
        """One more; the oldest goes."""
        if len(self.first) < _FIRST:
            self.first.append(norm)
        if len(self._last) == _WINDOW:
            self._sorted.remove(self._last.popleft())
        self._last.append(norm)
        insort(self._sorted, norm)

    @property
    def middle(self) -> float:
        """The median."""
        return self._sorted[len(self._sorted) // 2]

    @property
    def spread(self) -> float:
        """The standard deviation, as far as the half in the middle tells it."""
        return 1.4826 * float(np.median(np.abs(np.array(self._sorted) - self.middle)))


class GradientSpike(Checked):
    """The norm of all gradients is ten times its median and six robust standard deviations above it.

    Late in training gradients are near zero, and a hard batch has ten times that; so it must also be twice of what
    was usual in the first steps. Steps in which other parameters have gradients are compared among themselves.
    """

    name = "gradient spike"
    needs = f"fewer than {_WARM} sampled steps with gradients"

    def __init__(self) -> None:
        self._past: dict[bytes, Past] = {}
        self._quiet_until = 0

    def look(self, step: Step) -> Iterator[Finding]:
        """The step at which it comes."""
        rows = step.of("parameter_grad")
        if not len(rows) or step.skipped or rows.infinite.any():
            return
        squares = rows.sumsq
        norm = float(np.sqrt(squares.sum()))
        past = self._past.get(rows.layout)
        if past is None:
            if len(self._past) >= _LAYOUTS:
                self._past.clear()
            past = self._past[rows.layout] = Past()
        if len(past) >= _WARM:
            self.has_looked = True
            middle = past.middle
            if norm > _TIMES * middle and step.number >= self._quiet_until and self._is_spike(norm, past):
                self._quiet_until = step.number + 10
                text = f"gradient norm {norm:.3g}, {middle:.3g} in the middle before; most of it here"
                why = "one such step can undo many"
                then = "look at that batch; clip the gradients (clip_grad_norm_)"
                place = rows.places[int(np.argmax(squares))]
                yield Finding(self.name, "warn", step.number, text, place, why, then)
        past.add(norm)

    def _is_spike(self, norm: float, past: Past) -> bool:
        return norm > past.middle + _SIGMAS * past.spread and norm > 2 * float(np.median(past.first))
