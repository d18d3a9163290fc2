"""How large every value was, in two bytes each: what a picture of a whole run is drawn from.

A level is 200 × log10 of the RMS, so that a ratio is a difference, and the larger of two is what both together show:
values that are not finite are above everything, zeros below every number, and no value at all below these.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenterhook.stats.arithmetic import Numbers
from tenterhook.stats.columns import INDEX
from tenterhook.store.batches import Stream

Codes = NDArray[np.int16]
PER_DECADE = 200
NOTHING, ZERO, NOT_FINITE = -32768, -32767, 32767
_LOWEST, _HIGHEST = -32000, 32000
_NEEDED = ("count", "nan", "pos_inf", "neg_inf", "sumsq")
Place = tuple[str, str, str]  # model, site, what


def levels_of(rows: Numbers) -> Codes:
    """The levels of some rows of statistics."""
    with np.errstate(all="ignore"):
        logs = 0.5 * np.log10(rows.sumsq / np.maximum(rows.finite, 1))
        codes = np.clip(np.nan_to_num(np.round(logs * PER_DECADE)), _LOWEST, _HIGHEST)
    codes[rows.sumsq == 0] = ZERO
    codes[(rows.infinite > 0) | ~np.isfinite(rows.sumsq)] = NOT_FINITE
    codes[rows.count == 0] = NOTHING
    return codes.astype(np.int16)


def stretches(steps: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    """Where the columns of a picture begin, each of which is as many steps, in some sampled ones; none is empty."""
    edges = np.linspace(steps[0], steps[-1] + 1, max(1, columns) + 1)[:-1]
    starts = np.unique(np.searchsorted(steps, np.floor(edges)))
    return starts[starts < len(steps)]


def pool(codes: Codes, starts: NDArray[np.int64]) -> Codes:
    """The largest levels of each stretch, which begin at `starts`."""
    return np.maximum.reduceat(codes, starts, axis=0)


class Grid:
    """The levels of one kind of value: a row for each sampled step, a column for each site."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.codes: Codes = np.full((0, 0), NOTHING, np.int16)
        self._columns: dict[int, int] = {}

    def columns(self, places: Sequence[int]) -> Any:
        """The columns of some places, new ones where they have none: to index with, a slice where that will do."""
        for place in places:
            if place not in self._columns:
                self._columns[place] = len(self.places)
                self.places.append(place)
        found = [self._columns[place] for place in places]
        first = found[0]
        return slice(first, first + len(found)) if found == [*range(first, first + len(found))] else found

    def put(self, at: int, columns: Any, codes: Codes, room: int) -> None:
        """Levels of some columns, in the sampled steps from `at` on; there will be at least `room` of them."""
        have, samples = self.codes.shape, at + len(codes)
        if samples > have[0] or len(self.places) > have[1]:
            size = (max(2 * have[0], samples, room) if samples > have[0] else have[0], max(len(self.places), have[1]))
            larger = np.full(size, NOTHING, np.int16)
            larger[: have[0], : have[1]] = self.codes
            self.codes = larger
        self.codes[at:samples, columns] = codes


class Levels:
    """All levels of one rank, some megabytes however large the run is; `update` reads what has come since."""

    def __init__(self, places: Stream, levels: Stream, stats: Stream) -> None:
        self.places: list[Place] = []
        self.dtypes: list[str] = []
        self.grids: dict[str, Grid] = {}
        self.many = 0  # sampled steps
        self._steps = np.zeros(0, np.int64)
        self._numbers: dict[Place, int] = {}
        self._streams = places, levels, stats
        self._room = 0
        self._layouts: dict[bytes, list[tuple[Grid, Any, Any]]] = {}

    @property
    def steps(self) -> NDArray[np.int64]:
        """The sampled steps, in order."""
        return self._steps[: self.many]

    def update(self) -> bool:
        """Read what is new; whether there was anything."""
        before = self.many
        places, levels, stats = self._streams
        self._room = sum(batch.rows for batch in levels.index()) if not self.many else 0  # to grow is to copy all
        if self._are_missing():
            for batch in stats.news(("step", "model", "site", "what", *_NEEDED)):
                self._work_out(batch)
        else:
            self._know(places.news())
            for batch in levels.news():
                self._take(batch)
        return self.many != before

    def _are_missing(self) -> bool:
        """Whether the run is older than levels, or has lost them: then they are worked out from its statistics.

        A recorder writes places, then statistics, then levels: of a run that has just begun they are about to come.
        """
        places, levels, stats = self._streams
        known = len(stats.index())  # before the others, which may grow meanwhile
        if not known:
            return not stats.path.with_suffix(".index").exists()
        return not levels.index() and (known > 1 or not places.index() or stats.has_ended)

    def pooled(self, what: str, first: float, last: float, columns: int) -> tuple[Codes, NDArray[np.int64], list[int]]:
        """The largest levels in each stretch of time: a row for each, the step it begins with, and the places."""
        low, high = np.searchsorted(self.steps, [first, last + 1])
        grid = self.grids.get(what, Grid())
        low, high = int(low), min(int(high), len(grid.codes))
        if high <= low:
            return np.zeros((0, len(grid.places)), np.int16), self.steps[:0], grid.places
        steps = self.steps[low:high]
        starts = stretches(steps, columns)
        return pool(grid.codes[low:high, : len(grid.places)], starts), steps[starts], grid.places

    def _know(self, batches: Any) -> None:
        for batch in batches:
            for row in batch.to_pylist():
                while len(self.places) <= row["place"]:  # what a damaged batch had said of them is not known
                    self.places.append(("?", f"?{len(self.places)}", "?"))
                    self.dtypes.append("")
                self.places[row["place"]] = (row["model"] or "", row["site"] or "", row["what"] or "")
                self.dtypes[row["place"]] = row["dtype"] or ""

    def _take(self, batch: Any) -> None:
        """A batch of levels, of steps in a row that measured the same values at once."""
        codes = batch["levels"].flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(batch["levels"].value_lengths().to_numpy(zero_copy_only=False))
        places = batch["places"].flatten().to_numpy(zero_copy_only=False)
        if len(places) and places.max() >= len(self.places):  # they have come since the others were read
            self._know(self._streams[0].news())
        sizes = batch["places"].value_lengths()
        news = np.flatnonzero(batch["places"].is_valid().to_numpy(zero_copy_only=False)).tolist()
        starts = np.cumsum([0, *sizes.drop_null().to_pylist()]).tolist()
        steps = batch["step"].to_numpy()
        for k, (begin, end) in enumerate(zip(news, [*news[1:], len(steps)], strict=True)):
            mine = places[starts[k] : starts[k + 1]]
            known = codes[(ends[begin - 1] if begin else 0) : ends[end - 1]].reshape(end - begin, len(mine))
            self._put(steps[begin:end], mine, known)

    def _work_out(self, batch: Any) -> None:
        import pyarrow.compute as pc

        numbers = np.zeros((len(batch), len(INDEX)))
        for name in _NEEDED:
            numbers[:, INDEX[name]] = batch[name].to_numpy(zero_copy_only=False)
        codes = levels_of(Numbers(numbers))
        named = pc.binary_join_element_wise(batch["model"], batch["site"], batch["what"], "\x00").dictionary_encode()
        texts = [(text or "\0\0").split("\0") for text in named.dictionary.to_pylist()]
        mine = np.array([self._number((t[0], t[1], t[2])) for t in texts], np.int64)
        places = mine[named.indices.to_numpy(zero_copy_only=False)]
        steps = batch["step"].to_numpy()
        cuts = np.flatnonzero(np.diff(steps)) + 1
        for begin, end in zip([0, *cuts], [*cuts, len(steps)], strict=True):
            self._put(steps[begin : begin + 1], places[begin:end], codes[begin:end].reshape(1, -1))

    def _number(self, place: Place) -> int:
        if place not in self._numbers:
            self._numbers[place] = len(self.places)
            self.places.append(place)
            self.dtypes.append("")
        return self._numbers[place]

    def _put(self, steps: NDArray[np.int64], places: NDArray[Any], codes: Codes) -> None:
        """Levels of the same places in some steps; a step that goes on in the next batch is one."""
        again = self.many > 0 and len(steps) == 1 and steps[0] == self._steps[self.many - 1]
        at = self.many - 1 if again else self.many
        if not again:
            self.many += len(steps)
            if self.many > len(self._steps):
                self._steps = np.concatenate([self._steps, np.zeros(max(self.many, 64), np.int64)])
            self._steps[at : self.many] = steps
        for grid, its, columns in self._layout(places):
            grid.put(at, columns, codes if its is None else codes[:, its], self._room)

    def _layout(self, places: NDArray[Any]) -> list[tuple[Grid, Any, Any]]:
        """For each kind: its grid, which of these places are of it (None for all), and their columns there."""
        key = places.tobytes()
        if key not in self._layouts:
            by_kind: dict[str, list[int]] = {}
            for i, place in enumerate(places.tolist()):
                what = self.places[place][2] if 0 <= place < len(self.places) else "?"
                by_kind.setdefault(what, []).append(i)
            found = [(self.grids.setdefault(what, Grid()), its) for what, its in by_kind.items()]
            only = len(found) == 1
            self._layouts[key] = [(g, None if only else its, g.columns(places[its].tolist())) for g, its in found]
        return self._layouts[key]
