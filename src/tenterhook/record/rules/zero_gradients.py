"""Gradients that are exactly zero."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.places import Place
from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import depth
from tenterhook.record.step import Rows, Step

_NEVER, _AGAIN = 8, 24


class ZeroGradients(Checked):
    """All of a parameter's gradient is zero: in the first 8 samples, or in 24 in a row where there was one before.

    A dead layer silences all before it: the one nearest to the loss is named. Where gradients get to the first layers
    all the same, only a branch is idle: that is a note after 24, for an expert may wait long for a token.
    """

    name = "all-zero gradients"
    needs = "no gradients of parameters were sampled"

    def __init__(self) -> None:
        self._silent = np.zeros(0, np.int64)  # by number of place: samples in a row
        self._before = np.zeros(0, bool)  # whether there was a gradient once
        self._told: set[int] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """One finding for each model with all that turn up in the same step."""
        rows = step.of("parameter_grad")
        if not len(rows) or step.skipped:
            return
        self.has_looked = True
        silent = self._count(step, rows)
        if silent.any():
            others = rows.where(~silent).places
            new = self._new(rows, {(place.model, place.site) for place in others})
            for model in dict.fromkeys(place.model for place in new):
                yield from self._judge(step, *(_of(model, some) for some in (new, others)))

    def _judge(self, step: Step, found: list[Place], others: list[Place]) -> Iterator[Finding]:
        """Those of one model, unless they are a branch that may be idle for longer."""
        beside = _is_beside(step, found, others)
        if not beside or min(self._silent[place.number] for place in found) >= _AGAIN:
            self._told.update(place.number for place in found)
            yield self._finding(step, found, beside)

    def _count(self, step: Step, rows: Rows) -> NDArray[np.bool_]:
        """Count the samples for which each row has been silent: those that are now."""
        which = rows.which
        self._grow(int(which.max()) + 1)
        silent = (rows.zeros == rows.count) & (rows.count > 0)
        if silent.any():
            rates = [step.rate.get((place.model, place.site)) for place in rows.places]
            silent &= np.array([rate != 0 for rate in rates])  # a LoRA's A has none before B has moved
        self._silent[which] = np.where(silent, self._silent[which] + 1, 0)
        self._before[which] |= rows.zeros != rows.count
        return silent

    def _new(self, rows: Rows, alive: set[tuple[str, str]]) -> list[Place]:
        """Those that have been silent for too long, and were not told of yet."""
        which = rows.which
        long = rows.where(self._silent[which] >= np.where(self._before[which], _AGAIN, _NEVER))
        new = [place for place in long.places if place.number not in self._told]
        return [place for place in new if (place.model, _weight_of(place.site)) not in alive]

    def _finding(self, step: Step, found: list[Place], beside: bool) -> Finding:
        nearest = max(_cut_off(step, found), key=lambda place: (depth(place, step), -place.number))
        names = ", ".join(place.site for place in found if place is not nearest)
        more = f", and so is that of {_shortened(names)}" if names else ""
        text = f"its gradient is exactly zero{more}"
        why = "they do not learn, whatever weight decay and momentum do to them"
        then = "look for a dead ReLU, a round() or argmax(), a mask or a zero weight between it and the loss"
        if beside:
            then += "; if this branch is to be idle, all is well"
        return Finding(self.name, "note" if beside else "warn", step.number, text, nearest, why, then)

    def _grow(self, size: int) -> None:
        more = size - len(self._silent)
        if more > 0:
            self._silent = np.concatenate([self._silent, np.zeros(more, np.int64)])
            self._before = np.concatenate([self._before, np.zeros(more, bool)])


def _of(model: str, places: Sequence[Place]) -> list[Place]:
    return [place for place in places if place.model == model]


def _weight_of(site: str) -> str:
    """Of a bias, the weight beside it: where that gets gradients, those of the bias cancel, as in a critic."""
    return site.removesuffix("bias") + "weight" if site.endswith("bias") else ""


def _shortened(names: str, most: int = 80) -> str:
    return names if len(names) <= most else names[:most].rpartition(",")[0] + " …"


def _is_beside(step: Step, found: list[Place], others: list[Place]) -> bool:
    """Whether gradients get to layers before the first of these, so that these are a branch."""
    first = min((at for place in found if (at := depth(place, step)) >= 0), default=-1)
    return any(0 <= depth(place, step) < first for place in others)


def _cut_off(step: Step, found: list[Place]) -> list[Place]:
    """Those that no gradient comes to. One that gets some, but nothing except zeros as input, is behind the fault."""
    rows = step.of("output_grad")
    alive = rows.where(rows.zeros < rows.count).places
    sites = {(place.model, place.site.partition("[")[0]) for place in alive}
    cut = [place for place in found if (place.model, place.site.rpartition(".")[0] or ".") not in sites]
    return cut or found
