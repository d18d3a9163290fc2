"""Where two runs, or two ranks of one, are apart, and from which step on.

How far is told by levels, which are there for every sample: a difference is 200 × log10 of the factor between two
sizes, so that it is a level, too: 0 is the same to about one percent, and the largest shows. Where it begins is told by
the statistics themselves, beyond what rounding does to them; of a long run some are read, spread evenly, and levels
tell of the rest. Only steps that both have sampled are compared.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenterhook.store.batches import Batch, spread
from tenterhook.store.levels import (
    NOT_FINITE,
    NOTHING,
    PER_DECADE,
    ZERO,
    Codes,
    Grid,
    Levels,
    Place,
    pool,
    stretches,
)
from tenterhook.view.losses import Steps
from tenterhook.view.parts import PlaceNumbers, places_of

if TYPE_CHECKING:
    from tenterhook.view.answers import Answers

_SAME = 1  # so many levels apart, equal values may be by rounding
_FARTHEST = 32000  # where one is zero
_ROWS = 2048  # at once
_MOST_BATCHES = 64  # of which the statistics are read
_ROUNDING = 1e-4  # of the size of the values
_STATISTICS = ("nan", "pos_inf", "neg_inf", "mean", "rms", "min", "max")
_RMS = _STATISTICS.index("rms")
_READ = ("step", "model", "site", "what", "count", "nan", "pos_inf", "neg_inf", "sum", "sumsq", "min", "max")


class First(NamedTuple):
    """Where a place begins to differ: a statistic, and what it is in each."""

    step: int
    statistic: str
    a: float
    b: float


class Partings:
    """The first difference of each place, and what share of the batches was read for it; `update` reads what is new."""

    def __init__(self, a: "Answers", b: "Answers") -> None:
        self.first: dict[Place, First] = {}  # as the places are called in both
        self.share = 1.0
        self._both = a, b
        self._seen = 0, 0  # batches of each
        self._read: set[int] = set()  # batches of the first
        self._numbers = PlaceNumbers()

    def update(self) -> None:
        """Read what has come since."""
        a, b = self._both
        for kind in a.levels.grids:
            both = Differences.of(a.levels, b.levels, kind)
            for name, first in zip(both.names, both.first, strict=True):
                if first is not None:
                    self._keep((*name, kind), first)
        mine, theirs = (one.run.stream("stats", one.rank) for one in (a, b))
        index, others = mine.index(), theirs.index()
        lows = np.searchsorted([batch.last for batch in others], [batch.first for batch in index]).tolist()
        highs = np.searchsorted([batch.first for batch in others], [batch.last for batch in index], "right").tolist()
        fresh = [i for i in range(len(index)) if i >= self._seen[0] or highs[i] > self._seen[1]]
        chosen = [fresh[k] for k in spread(len(fresh), _MOST_BATCHES)]
        self._seen = len(index), len(others)
        self._read.update(chosen)
        self.share = len(self._read) / max(1, len(index))
        known: dict[Batch, Any] = {}  # of the other, which the next batch may need again
        for i in chosen:
            near = others[lows[i] : highs[i]]
            known = {batch: known[batch] if batch in known else theirs.read(batch, _READ) for batch in near}
            one = mine.read(index[i], _READ) if near else None
            for other in known.values():
                if one is not None and other is not None:
                    self._compare(_values(one, self._numbers, a.levels), _values(other, self._numbers, b.levels))

    def _keep(self, place: Place, first: First) -> None:
        known = self.first.get(place)
        if known is None or first.step <= known.step:
            self.first[place] = first

    def _compare(self, a: "_Values", b: "_Values") -> None:
        places = len(self._numbers.places)
        _, at, other = np.intersect1d(a.steps * places + a.places, b.steps * places + b.places, return_indices=True)
        x, y = a.numbers[at], b.numbers[other]
        with np.errstate(all="ignore"):
            size = np.maximum(np.maximum(np.abs(x), np.abs(y)), np.maximum(x[:, [_RMS]], y[:, [_RMS]]))
            size[:, :3] = 0  # of counts
            apart = ~((x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= _ROUNDING * size))
        rows = np.flatnonzero(apart.any(1))
        rows = rows[np.unique(a.places[at[rows]], return_index=True)[1]]  # the first of each place: they are by step
        for row in rows.tolist():
            statistic = int(apart[row].argmax())
            first = First(
                int(a.steps[at[row]]), _STATISTICS[statistic], float(x[row, statistic]), float(y[row, statistic])
            )
            self._keep(self._numbers.places[int(a.places[at[row]])], first)


class Differences(NamedTuple):
    """How far the levels of one kind of value are apart."""

    steps: NDArray[np.int64]  # that both have sampled
    places: list[int]  # of the first, that both have
    codes: Codes  # a row for each step, a column for each place
    first: list[First | None]  # of each place, by levels alone
    names: list[tuple[str, str]]  # model and site of each place, as both call it

    @classmethod
    def of(cls, a: Levels, b: Levels, what: str) -> "Differences":
        """From one to the other."""
        mine, theirs = a.grids.get(what, Grid()), b.grids.get(what, Grid())
        there = {name: column for column, name in enumerate(_names(b, theirs))}
        both = [(i, there[name], name) for i, name in enumerate(_names(a, mine)) if name in there]
        steps, at, other = np.intersect1d(a.steps[: len(mine.codes)], b.steps[: len(theirs.codes)], return_indices=True)
        codes = np.full((len(steps), len(both)), NOTHING, np.int16)
        columns, others = (np.array([one[k] for one in both], np.int64) for k in (0, 1))
        for begin in range(0, len(steps), _ROWS):
            part = slice(begin, begin + _ROWS)
            codes[part] = _apart(mine.codes[np.ix_(at[part], columns)], theirs.codes[np.ix_(other[part], others)])
        first: list[First | None] = [None] * len(both)
        for k in np.flatnonzero((codes > 0).any(0)).tolist():
            row = int((codes[:, k] > 0).argmax())
            values = (
                _value(grid.codes[i, j])
                for grid, i, j in ((mine, at[row], columns[k]), (theirs, other[row], others[k]))
            )
            first[k] = First(int(steps[row]), "rms", *values)
        return cls(steps, [mine.places[i] for i in columns.tolist()], codes, first, [name for _, _, name in both])

    def pooled(self, first: float, last: float, columns: int) -> tuple[Codes, NDArray[np.int64]]:
        """The largest in each stretch of time, and the steps with which these begin."""
        low, high = np.searchsorted(self.steps, [first, last + 1])
        steps = self.steps[low:high]
        if not len(steps):
            return np.zeros((0, len(self.places)), np.int16), steps
        starts = stretches(steps, columns)
        return pool(self.codes[low:high], starts), steps[starts]


def told(a: "Answers", b: "Answers", partings: Partings, kinds: tuple[str, ...]) -> dict[str, Any]:
    """For each kind of value that both have: the first difference, and at how many places there is one."""
    found: dict[str, Any] = {}
    for kind in kinds:
        both = Differences.of(a.levels, b.levels, kind)
        if not len(both.steps) or not both.places:
            continue
        known = [
            (partings.first[key], i) for i, name in enumerate(both.names) if (key := (*name, kind)) in partings.first
        ]
        found[kind] = {"compared": len(both.places), "differ": len(known), "steps": len(both.steps)}
        if known:
            first, i = min(known, key=lambda one: (one[0].step, one[1]))
            model, site, _ = a.levels.places[both.places[i]]
            found[kind]["first"] = {"model": model, "site": site, "at": first}
    return {"kinds": found, "share": partings.share, "loss": of_losses(a.steps, b.steps)}


def of_losses(a: Steps, b: Steps) -> dict[str, Any] | None:
    """The first step in which the losses differ by more than rounding, and both; None where none is in both."""
    (steps, mine), (others, theirs) = a.losses, b.losses
    _, at, other = np.intersect1d(steps, others, return_indices=True)
    x, y = mine[at], theirs[other]
    known = ~(np.isnan(x) & np.isnan(y))
    if not known.any():
        return None
    with np.errstate(all="ignore"):
        same = (x == y) | (np.abs(x - y) <= _ROUNDING * np.maximum(np.abs(x), np.abs(y)))
    apart = np.flatnonzero(known & ~same)
    if not len(apart):
        return {"steps": int(known.sum())}
    k = int(apart[0])
    return {"steps": int(known.sum()), "first": {"step": int(steps[at[k]]), "a": float(x[k]), "b": float(y[k])}}


class _Values(NamedTuple):
    steps: NDArray[np.int64]
    places: NDArray[np.int64]
    numbers: NDArray[np.float64]  # a column for each of _STATISTICS


def _values(batch: Any, numbers: PlaceNumbers, levels: Levels) -> _Values:
    alone = _is_alone(levels)
    column = {name: batch[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in _READ[4:]}
    finite = column["count"] - column["nan"] - column["pos_inf"] - column["neg_inf"]
    with np.errstate(all="ignore"):
        column["mean"], column["rms"] = column["sum"] / finite, np.sqrt(column["sumsq"] / finite)
    places = places_of(batch, numbers, lambda model: "" if alone else model)
    return _Values(batch["step"].to_numpy(), places, np.stack([column[name] for name in _STATISTICS], axis=1))


def _is_alone(levels: Levels) -> bool:
    """Whether there is one model only, which may have another name in another run."""
    return len({model for model, _, _ in levels.places}) == 1


def _names(levels: Levels, grid: Grid) -> list[tuple[str, str]]:
    """What the columns are called in both."""
    alone = _is_alone(levels)
    return [("" if alone else levels.places[place][0], levels.places[place][1]) for place in grid.places]


def _value(code: Any) -> float:
    if code in (ZERO, NOT_FINITE):
        return 0.0 if code == ZERO else np.nan
    return float(f"{10 ** (float(code) / PER_DECADE):.3g}")


def _apart(a: Codes, b: Codes) -> Codes:
    """The levels of the factors between some levels."""
    found = np.minimum(np.abs(a.astype(np.int32) - b), _FARTHEST)
    found[found <= _SAME] = 0
    odd = (a == NOT_FINITE) != (b == NOT_FINITE)
    found[odd] = NOT_FINITE
    found[((a == ZERO) != (b == ZERO)) & ~odd] = _FARTHEST
    found[(a == NOTHING) | (b == NOTHING)] = NOTHING
    return found.astype(np.int16)
