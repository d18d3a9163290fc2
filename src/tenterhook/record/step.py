"""A step as rules see it: one row of numbers per place, as arrays, and a few facts. No torch here."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.places import Place
from tenterhook.stats import BINS, NUMBERS, Stats

Floats = NDArray[np.float64]


class Histograms:
    """The histograms of some rows, without their zeros: those of row i are at starts[i] … starts[i + 1]."""

    def __init__(self, starts: NDArray[np.int64], bins: NDArray[np.int64], counts: NDArray[np.int32]) -> None:
        self.starts, self.bins, self.counts = starts, bins, counts

    @classmethod
    def of(cls, dense: NDArray[np.int32]) -> "Histograms":
        """From an array with BINS columns."""
        used = np.flatnonzero(dense != 0)
        starts = np.searchsorted(used, np.arange(len(dense) + 1) * BINS)
        return cls(starts, used & BINS - 1, dense.ravel()[used])

    @classmethod
    def joined(cls, some: Sequence["Histograms"]) -> "Histograms":
        """Those of all rows of some."""
        if len(some) == 1:
            return some[0]
        before = np.cumsum([0, *(len(one.bins) for one in some)])
        starts = [one.starts[:-1] + start for one, start in zip(some, before, strict=False)]
        bins, counts = (np.concatenate([getattr(one, name) for one in some]) for name in ("bins", "counts"))
        return cls(np.concatenate([*starts, before[-1:]]), bins, counts)

    def in_order(self, order: NDArray[np.int64]) -> "Histograms":
        """The same with its rows in another order, some of them more than once or left out."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        at = np.repeat(self.starts[:-1][order] - starts[:-1], sizes) + np.arange(starts[-1])
        return Histograms(starts, self.bins[at], self.counts[at])

    def dense(self) -> NDArray[np.int32]:
        """As such an array again."""
        found = np.zeros((len(self.starts) - 1, BINS), np.int32)
        found[np.repeat(np.arange(len(found)), np.diff(self.starts)), self.bins] = self.counts
        return found


class Rows:
    """Some rows of a step: `places` says whose each one is, the columns are arrays of the same length."""

    def __init__(self, places: Sequence[Place], numbers: Floats, histogram: Any) -> None:
        self.places = places
        self.numbers = numbers
        self.sparse = histogram if isinstance(histogram, Histograms) else None
        self._histogram = histogram  # Histograms, or some rows of another Rows; a whole array once it was asked for

    def __len__(self) -> int:
        return len(self.places)

    def __getattr__(self, name: str) -> Floats:
        if name not in NUMBERS:
            raise AttributeError(name)
        return self.numbers[:, NUMBERS.index(name)]

    @property
    def histogram(self) -> NDArray[np.int32]:
        """How many values of each row are in each bin."""
        if isinstance(self._histogram, tuple):
            whole, rows = self._histogram
            self._histogram = whole.histogram[rows]
        elif isinstance(self._histogram, Histograms):
            self._histogram = self._histogram.dense()
        return self._histogram

    def where(self, mask: Any) -> "Rows":
        """Those rows for which the mask holds, or with these indices."""
        kept = np.asarray(mask)
        kept = np.flatnonzero(kept) if kept.dtype == bool else kept
        return Rows([self.places[i] for i in kept.tolist()], self.numbers[kept], (self, kept))

    @functools.cached_property
    def which(self) -> NDArray[np.int64]:
        """The numbers of the places."""
        return np.array([place.number for place in self.places], np.int64)

    @functools.cached_property
    def layout(self) -> bytes:
        """Equal for rows of the same places, so that what is worked out from those can be kept."""
        return self.which.tobytes()

    @property
    def infinite(self) -> Floats:
        """How many values are infinite or NaN."""
        return self.numbers[:, 1:4].sum(1)

    @property
    def finite(self) -> Floats:
        """How many values are neither."""
        return self.count - self.infinite

    @property
    def mean(self) -> Floats:
        """The means of the finite values."""
        return self.sum / np.maximum(self.finite, 1)

    @property
    def rms(self) -> Floats:
        """The roots of the mean squares of the finite values."""
        return np.sqrt(self.sumsq / np.maximum(self.finite, 1))

    @property
    def std(self) -> Floats:
        """The standard deviations of the finite values."""
        square = self.sumsq / np.maximum(self.finite, 1)
        return np.where(self.min == self.max, 0.0, np.sqrt(np.maximum(square - self.mean**2, 0)))

    @property
    def absmax(self) -> Floats:
        """The largest magnitudes."""
        return np.where(self.finite > 0, np.maximum(-self.min, self.max), np.nan)

    def stats(self, row: int) -> Stats:
        """One row by itself."""
        values = dict(zip(NUMBERS, self.numbers[row].tolist(), strict=True))
        for name in ("count", "nan", "pos_inf", "neg_inf", "zeros", "sampled"):
            values[name] = int(values[name])
        bins = {int(k): int(self.histogram[row, k]) for k in np.flatnonzero(self.histogram[row])}
        return Stats(**values, histogram=bins)


Kinds = dict[str, tuple[NDArray[np.int64], list[Place], NDArray[np.int64]]]


def kinds_of(places: Sequence[Place]) -> Kinds:
    """By kind of value: which rows are of it, their places, and the numbers of these."""
    rows: dict[str, list[int]] = {}
    for i, place in enumerate(places):
        rows.setdefault(place.what, []).append(i)
    found = {kind: (np.array(which), [places[i] for i in which]) for kind, which in rows.items()}
    return {kind: (which, its, np.array([p.number for p in its])) for kind, (which, its) in found.items()}


class Layout:
    """Whose the rows of a step are. It is the same for most steps, so that it is worked out once."""

    def __init__(self, owners: NDArray[np.int64], places: Sequence[Place]) -> None:
        self.order = np.argsort(owners, kind="stable")
        which = owners[self.order]
        self.starts = np.flatnonzero(np.concatenate([[True], which[1:] != which[:-1]]))
        self.ids = which[self.starts]
        self.calls = np.diff(np.concatenate([self.starts, [len(which)]]))
        self.places = [places[i] for i in self.ids.tolist()]
        self.kinds = kinds_of(self.places)


NO_ROWS = Rows((), np.zeros((0, len(NUMBERS))), Histograms.of(np.zeros((0, BINS), np.int32)))


class Parameter(NamedTuple):
    """What a step knows about a parameter, beside its numbers."""

    model: str
    site: str
    trainable: bool
    has_gradient: bool
    rate: float | None  # the learning rate of its group; None where no optimizer has it
    size: int


@dataclass
class Step:
    """One step. Where it was not sampled, `rows` is empty and only the loss, the rates and the times are known."""

    number: int
    loss: float | None = None  # the sum of what backward() was called on: what the gradients are the gradients of
    losses: tuple[float, ...] = ()  # the same apart for each optimizer
    rates: tuple[float, ...] = ()
    seconds: float = 0.0
    time: float = 0.0
    spent: float = 0.0
    optimizers: frozenset[int] = frozenset()  # those that stepped, by when they were first seen
    backwards: int = 0
    unmeasured: int = 0  # values of a kind that cannot be measured, or written into before they were
    skipped: int = 0  # optimizer steps that a GradScaler left out
    scale: float | None = None
    sampled: bool = False
    rows: Rows = NO_ROWS
    ids: Any = ()  # per row: the number of its place
    calls: Any = ()  # and how many measurements are in it
    dead: dict[int, float] = field(default_factory=dict)  # by place number: share of units that never fire
    saturated: dict[int, float] = field(default_factory=dict)
    training: dict[tuple[str, str], bool] = field(default_factory=dict)  # of BatchNorms, by model and site
    frozen: set[tuple[str, str]] = field(default_factory=set)  # those of them whose weights are not trained
    parameters: Sequence[Parameter] = ()  # in all of the first samples, later in some
    rate: Mapping[tuple[str, str], float | None] = field(default_factory=dict)  # by model and site, as last looked at
    classes: int | None = None  # of a classifier, where the loss is its mean cross entropy
    kinds: Kinds | None = None  # of the rows, where it is known
    _of: dict[str, Rows] = field(default_factory=dict)

    def of(self, what: str) -> Rows:
        """The rows of one kind, in the order in which the model reaches them."""
        found = self._of.get(what)
        if found is None:
            if self.kinds is None:
                self.kinds = kinds_of(self.rows.places)
            if what not in self.kinds:
                return NO_ROWS
            rows, places, which = self.kinds[what]
            found = self._of[what] = Rows(places, self.rows.numbers[rows], (self.rows, rows))
            found.which = which
        return found

    @functools.cached_property
    def order(self) -> dict[tuple[str, str], int]:
        """By model and site of a module, also of one that gives several values: when the forward comes to its end."""
        found: dict[tuple[str, str], int] = {}
        for place in self.of("output").places:
            found.setdefault((place.model, place.site.partition("[")[0]), place.number)
        return found

    @functools.cached_property
    def gradient_rms(self) -> Floats:
        """Of each row of `of("parameter_grad")`; NaN where not all of it is finite."""
        rows = self.of("parameter_grad")
        return np.where(rows.infinite > 0, np.nan, rows.rms)
