"""Where two runs, or two ranks of one, are apart: by levels, which tell sizes to about one percent.

A difference is 200 × log10 of the factor between two sizes: another level, where 0 is the same and the largest shows.
Only steps that both have sampled are compared. `tenterhook compare` reads the exact statistics.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenterhook.store.levels import NOT_FINITE, NOTHING, ZERO, Codes, Grid, Levels, pool, stretches
from tenterhook.view.losses import Steps

_SAME = 1  # so many levels apart, equal values may be by rounding
_FARTHEST = 32000  # where one is zero
_ROWS = 2048  # at once
_PERCENT = 0.012  # the same of losses


class Differences(NamedTuple):
    """Of one kind of value."""

    steps: NDArray[np.int64]  # that both have sampled
    places: list[int]  # of the first, that both have
    codes: Codes  # a row for each step, a column for each place
    first: list[tuple[int, int, int] | None]  # of each place: the first step that differs, and its two levels
    names: list[tuple[str, str]]  # model and site of each place

    @classmethod
    def of(cls, a: Levels, b: Levels, what: str) -> "Differences":
        """From one to the other."""
        mine, theirs = a.grids.get(what, Grid()), b.grids.get(what, Grid())
        there = {name: column for column, name in enumerate(_names(b, theirs))}
        both = [(i, there[name]) for i, name in enumerate(_names(a, mine)) if name in there]
        steps, at, other = np.intersect1d(a.steps[: len(mine.codes)], b.steps[: len(theirs.codes)], return_indices=True)
        codes = np.full((len(steps), len(both)), NOTHING, np.int16)
        columns, others = np.array(both, np.int64).reshape(-1, 2).T
        for begin in range(0, len(steps), _ROWS):
            part = slice(begin, begin + _ROWS)
            codes[part] = _apart(mine.codes[np.ix_(at[part], columns)], theirs.codes[np.ix_(other[part], others)])
        first: list[tuple[int, int, int] | None] = []
        for k, (i, j) in enumerate(both):
            rows = np.flatnonzero(codes[:, k] > 0)[:1].tolist()
            known = [(int(steps[r]), int(mine.codes[at[r], i]), int(theirs.codes[other[r], j])) for r in rows]
            first.append(known[0] if known else None)
        places = [mine.places[i] for i, _ in both]
        return cls(steps, places, codes, first, [a.places[place][:2] for place in places])

    def pooled(self, first: float, last: float, columns: int) -> tuple[Codes, NDArray[np.int64]]:
        """The largest in each stretch of time, and the steps with which these begin."""
        low, high = np.searchsorted(self.steps, [first, last + 1])
        steps = self.steps[low:high]
        if not len(steps):
            return np.zeros((0, len(self.places)), np.int16), steps
        starts = stretches(steps, columns)
        return pool(self.codes[low:high], starts), steps[starts]

    def told(self) -> dict[str, Any] | None:
        """The first difference, and of how many places there is one; None where there was nothing to compare."""
        if not len(self.steps) or not self.places:
            return None
        known = [(one[0], i) for i, one in enumerate(self.first) if one is not None]
        told: dict[str, Any] = {"compared": len(self.places), "differ": len(known), "steps": len(self.steps)}
        if known:
            _, i = min(known)
            model, site = self.names[i]
            told["first"] = {"model": model, "site": site, "at": self.first[i]}
        return told


def of_losses(a: Steps, b: Steps) -> dict[str, Any] | None:
    """The first step in which the losses differ by more than levels tell, and both; None where none is in both."""
    (mine, theirs), at, other = (a.losses, b.losses), *_joined(a.losses[0], b.losses[0])
    x, y = mine[1][at], theirs[1][other]
    known = ~(np.isnan(x) & np.isnan(y))
    if not known.any():
        return None
    with np.errstate(all="ignore"):
        same = (x == y) | (np.abs(x - y) <= _PERCENT * np.maximum(np.abs(x), np.abs(y)))
    apart = np.flatnonzero(known & ~same)
    if not len(apart):
        return {"steps": int(known.sum())}
    k = int(apart[0])
    return {"steps": int(known.sum()), "first": {"step": int(mine[0][at[k]]), "a": float(x[k]), "b": float(y[k])}}


def _joined(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    _, at, other = np.intersect1d(a, b, return_indices=True)
    return at, other


def _names(levels: Levels, grid: Grid) -> list[tuple[str, str]]:
    """What the columns are called in both: a model that is the only one may have another name there."""
    alone = len({model for model, _, _ in levels.places}) == 1
    return [("" if alone else levels.places[place][0], levels.places[place][1]) for place in grid.places]


def _apart(a: Codes, b: Codes) -> Codes:
    """The levels of the factors between some levels."""
    found = np.minimum(np.abs(a.astype(np.int32) - b), _FARTHEST)
    found[found <= _SAME] = 0
    odd = (a == NOT_FINITE) != (b == NOT_FINITE)
    found[odd] = NOT_FINITE
    found[((a == ZERO) != (b == ZERO)) & ~odd] = _FARTHEST
    found[(a == NOTHING) | (b == NOTHING)] = NOTHING
    return found.astype(np.int16)
