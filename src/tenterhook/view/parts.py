"""Rows of statistics as NumPy has them, merged as they are read: what is kept of a long run is small."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenterhook.stats.arithmetic import Floats, merged
from tenterhook.stats.columns import BINS, INDEX, START
from tenterhook.store.levels import Place

Integers = NDArray[np.int64]


class PlaceNumbers:
    """A number for each place that comes."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._known: dict[Place, int] = {}

    def of(self, place: Place) -> int:
        """Its number, a new one where it has none."""
        if place not in self._known:
            self._known[place] = len(self.places)
            self.places.append(place)
        return self._known[place]


@dataclass(frozen=True)
class Parts:
    """The statistics of a place in some steps after another, each made of a row or several."""

    place: Integers
    step: Integers  # the first
    last: Integers
    numbers: Floats
    count: Integers  # of the last row, as all up to `saturated`
    calls: Integers
    dead: Floats  # NaN where it is not known
    saturated: Floats
    sizes: Integers  # how many bins each part has
    bins: Integers  # one after another
    counts: Integers

    @classmethod
    def joined(cls, parts: list["Parts"]) -> "Parts":
        """Those of several batches, by place, and in the order in which they were."""
        if not parts:
            none = np.zeros(0, np.int64)
            floats = np.zeros(0)
            return cls(none, none, none, np.zeros((0, len(START))), none, none, floats, floats, none, none, none)
        all_ = {name: np.concatenate([getattr(one, name) for one in parts]) for name in cls.__dataclass_fields__}
        return cls(**all_).in_order()

    def by_place(self) -> Iterator[tuple[int, "Parts"]]:
        """The parts of each place; they are in this order."""
        offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        for begin, end in pairwise(_cuts(self.place)):
            rows, bins = slice(begin, end), slice(int(offsets[begin]), int(offsets[end]))
            cut = {name: getattr(self, name)[bins if name in ("bins", "counts") else rows] for name in vars(self)}
            yield int(self.place[begin]), Parts(**cut)

    def merged(self, starts: Integers) -> Floats:
        """The numbers of each stretch of parts, which begin at `starts`."""
        return merged(self.numbers, starts)

    def in_order(self) -> "Parts":
        """Those of one place after those of another, else as they are."""
        order = np.argsort(self.place, kind="stable")
        offsets = np.cumsum(self.sizes) - self.sizes
        inside = _ranges(offsets[order], self.sizes[order])
        return Parts(**{k: getattr(self, k)[inside if k in ("bins", "counts") else order] for k in vars(self)})


def parts_of(batch: Any, numbers: PlaceNumbers, most: int = 0) -> Parts:
    """The rows of a batch by place; where `most` is given, merged into at most so many parts of each."""
    rows = _rows(batch, numbers)
    if not most:
        return rows
    starts = np.concatenate([_split(begin, end, most) for begin, end in pairwise(_cuts(rows.place))])
    ends = np.append(starts[1:], len(rows.place)) - 1
    part = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(rows.place))))  # of each row
    dense = np.bincount(np.repeat(part, rows.sizes) * BINS + rows.bins, weights=rows.counts)
    used = np.flatnonzero(dense)
    return Parts(
        place=rows.place[starts],
        step=rows.step[starts],
        last=rows.step[ends],
        numbers=rows.merged(starts),
        count=rows.count[ends],
        calls=rows.calls[ends],
        dead=rows.dead[ends],
        saturated=rows.saturated[ends],
        sizes=np.bincount(used // BINS, minlength=len(starts)),
        bins=used % BINS,
        counts=dense[used].astype(np.int64),
    )


def _rows(batch: Any, numbers: PlaceNumbers) -> Parts:
    steps, many = batch["step"].to_numpy(), len(batch)
    table = np.tile(np.array(START), (many, 1))
    for name, i in INDEX.items():
        if name in batch.schema.names:
            values = batch[name].to_numpy(zero_copy_only=False)
            table[:, i] = np.where(np.isnan(values), START[i], values)
    sizes = np.minimum(*(batch[name].value_lengths().fill_null(0).to_numpy() for name in ("bins", "counts")))
    bins, counts = (_flat(batch[name], sizes) for name in ("bins", "counts"))
    fine = (bins >= 0) & (bins < BINS)
    return Parts(
        place=places_of(batch, numbers),
        step=steps,
        last=steps,
        numbers=table,
        count=table[:, INDEX["count"]].astype(np.int64),
        calls=batch["calls"].fill_null(0).to_numpy().astype(np.int64),
        dead=_floats(batch, "dead"),
        saturated=_floats(batch, "saturated"),
        sizes=np.bincount(np.repeat(np.arange(many), sizes)[fine], minlength=many),
        bins=bins[fine],
        counts=counts[fine],
    ).in_order()


def places_of(batch: Any, numbers: PlaceNumbers, called: Callable[[str], str] = str) -> Integers:
    """The number of the place of each row; `called` may give its model another name."""
    codes, texts = np.zeros(len(batch), np.int64), []
    for name in ("model", "site", "what"):
        column = batch[name].fill_null("").dictionary_encode()
        codes = codes * max(1, len(column.dictionary)) + column.indices.to_numpy(zero_copy_only=False)
        texts.append(batch[name])
    known, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    named = [[text[i].as_py() or "" for text in texts] for i in first.tolist()]
    mine = [numbers.of((called(model), site, what)) for model, site, what in named]
    return np.array(mine, np.int64)[inverse] if len(known) else codes


def _floats(batch: Any, name: str) -> Floats:
    if name not in batch.schema.names:
        return np.full(len(batch), np.nan)
    return np.asarray(batch[name].to_numpy(zero_copy_only=False), np.float64)


def _flat(lists: Any, sizes: Integers) -> Integers:
    """The first so many of each list, one after another."""
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    starts = np.cumsum(lengths) - lengths
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False), np.int64)[_ranges(starts, sizes)]


def _ranges(starts: Integers, sizes: Integers) -> Integers:
    """The numbers from each start on, so many of them, one range after another."""
    before = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)


def _cuts(places: Integers) -> list[int]:
    """Where each place begins, and the end."""
    return [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else [0]


def _split(begin: int, end: int, most: int) -> Integers:
    return np.unique(np.linspace(begin, end, min(most, end - begin) + 1)[:-1].astype(np.int64))
