"""A step as rules see it: one row of numbers per place, as arrays, and a few facts. No torch here."""

import functools
import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.places import Place
from tenterhook.record.terms import Term
from tenterhook.stats.arithmetic import Floats as Floats
from tenterhook.stats.arithmetic import Numbers
from tenterhook.stats.columns import BINS, TABLE
from tenterhook.stats.histograms import Histograms

if TYPE_CHECKING:
    from tenterhook.birth.replay import Replayed
    from tenterhook.record.rules._loss import Target


class Rows(Numbers):
    """Some rows of a step: `places` says whose each one is, the columns are arrays of the same length."""

    def __init__(self, places: Sequence[Place], numbers: Floats, histograms: Histograms, at: Any = None) -> None:
        super().__init__(numbers)
        self.places = places
        self._histograms, self._at = histograms, at  # those of the whole step, and which of them: taken when asked for

    def __len__(self) -> int:
        return len(self.places)

    @functools.cached_property
    def histograms(self) -> Histograms:
        """Those of these rows."""
        return self._histograms if self._at is None else self._histograms.in_order(self._at)

    @functools.cached_property
    def histogram(self) -> NDArray[np.int32]:
        """How many values of each row are in each bin."""
        return self.histograms.dense()

    def where(self, mask: Any) -> "Rows":
        """Those rows for which the mask holds, or with these indices."""
        kept = np.asarray(mask)
        kept = np.flatnonzero(kept) if kept.dtype == bool else kept
        return self.at(kept, [self.places[i] for i in kept.tolist()])

    def at(self, kept: NDArray[np.int64], places: Sequence[Place]) -> "Rows":
        """The rows with these indices, of these places."""
        return Rows(places, self.numbers[kept], self._histograms, kept if self._at is None else self._at[kept])

    @functools.cached_property
    def which(self) -> NDArray[np.int64]:
        """The numbers of the places."""
        return np.array([place.number for place in self.places], np.int64)

    @functools.cached_property
    def layout(self) -> bytes:
        """Equal for rows of the same places, so that what is worked out from those can be kept."""
        return self.which.tobytes()


class Kind(NamedTuple):
    """The rows of a step that are of one kind of value."""

    rows: NDArray[np.int64]  # their indices
    places: list[Place]
    which: NDArray[np.int64]  # the numbers of the places


class Layout:
    """Where the rows of a step come from, worked out once for all steps that measure the same values in the same order.

    `owners` are the numbers of the places that were measured, several times perhaps; a step has a row for each place.
    """

    def __init__(self, owners: NDArray[np.int64], places: Sequence[Place]) -> None:
        self.order = np.argsort(owners, kind="stable")  # brings what is merged into one row together
        in_order = owners[self.order]
        self.starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
        self.which = in_order[self.starts]
        self.calls = np.diff(np.concatenate([self.starts, [len(in_order)]]))
        self.places = [places[number] for number in self.which.tolist()]
        rows: dict[str, list[int]] = {}
        for i, place in enumerate(self.places):
            rows.setdefault(place.what, []).append(i)
        self.kinds = {
            what: Kind(np.array(its), [self.places[i] for i in its], self.which[its]) for what, its in rows.items()
        }


_NONE: Mapping[Any, Any] = MappingProxyType({})
NO_ROWS = Rows((), np.zeros((0, len(TABLE))), Histograms.of(np.zeros((0, BINS), np.int32)))


class Parameter(NamedTuple):
    """What a step knows about a parameter, beside its numbers."""

    model: str
    site: str
    trainable: bool
    has_gradient: bool
    rate: float | None  # the learning rate of its group; None where no optimizer has it
    size: int
    steps: bool = True  # whether that optimizer has stepped
    is_training: bool = True  # whether its model is in training mode
    identity: int = 0  # another one where the parameter was exchanged


class Turn(NamedTuple):
    """What is known of a step of one optimizer."""

    optimizer: int  # 1 is the first that has ever stepped
    repeats: bool  # with the gradients of its step before, after which no backward pass came
    twice: tuple[str, str] | None  # model and site of a parameter that was stepped with the same gradient already


class Step:
    """One step. Where it was not sampled, `rows` is empty and only the loss, the rates and the times are known."""

    loss: float | None = None  # the sum of what backward() was called on: what the gradients are the gradients of
    losses: tuple[float, ...] = ()  # the same apart for each optimizer
    rates: tuple[float, ...] = ()
    seconds: float = 0.0
    time: float = 0.0
    spent: float = 0.0
    optimizers: frozenset[int] = frozenset()  # those that stepped: 1 is the first that ever has
    backwards: int = 0
    unmeasured: int = 0  # values of a kind that cannot be measured, or written into before they were
    skipped: int = 0  # optimizer steps that a GradScaler left out
    scale: float | None = None
    sampled: bool = False
    rows: Rows = NO_ROWS
    calls: Any = ()  # per row: how many measurements are in it
    dead: Mapping[int, float] = _NONE  # by place number: share of units that never fire
    saturated: Mapping[int, float] = _NONE
    training: Mapping[tuple[str, str], bool] = _NONE  # of BatchNorms, by model and site
    frozen: Set[tuple[str, str]] = frozenset()  # those of them whose weights are not trained
    parameters: tuple[Parameter, ...] = ()  # in all of the first samples, later in some
    rate: Mapping[tuple[str, str], float | None] = _NONE  # by model and site, as last looked at
    marks: Mapping[tuple[str, str], float] = _NONE  # of parameters that nothing seems to train
    terms: tuple[Term, ...] = ()  # what of the loss came from torch's loss functions, if sampled
    batches: Mapping[tuple[str, str], tuple[int, int]] = _NONE  # rows, and values of each channel
    silent: Set[tuple[str, str]] = frozenset()  # modules that were called in training mode under no_grad
    dropouts: Mapping[str, float] = _NONE  # probabilities, by the site of the module before
    # By how (norm or value) and the limit: how large the norm was by it, or the share of values beyond it.
    clips: Mapping[tuple[str, float], float] = _NONE
    input_sizes: Mapping[tuple[str, str], float] = _NONE  # of layers that get data: largest column
    # In some of the first samples: for each output of a model, the layers that lead to it, by model and site.
    chains: tuple[tuple[tuple[str, str], ...], ...] = ()
    turns: tuple[Turn, ...] = ()  # if sampled
    old_gradients: Mapping[int, float] = _NONE  # by optimizer: what of the step before was added to
    has_more: bool = False  # whether something else is in the loss, too
    forwards: tuple[int, int] = (0, 0)  # calls of models without gradients, and with
    # By model and input: the row of a batch that is far from the others, and the largest number in it.
    bad_rows: Mapping[tuple[str, str], tuple[int, float]] = _NONE
    kinds: Mapping[str, Kind] = _NONE  # of the rows
    replayed: "Replayed | None" = None  # where a value that is not finite was made, once a replay has shown it
    target: "Target"  # what losses are measured against, as far as is known; of the judge

    def __init__(self, number: int, loss: float | None = None, **known: Any) -> None:
        self.number, self.loss = number, loss
        self.__dict__.update(known)

    def table(self, name: str) -> dict[Any, Any]:
        """One of its mappings, to add something to; most steps have none."""
        found: dict[Any, Any] = self.__dict__.setdefault(name, {})
        return found

    @property
    def finite_loss(self) -> float | None:
        """The loss; None where it is unknown, or no number."""
        return self.loss if self.loss is not None and math.isfinite(self.loss) else None

    def of(self, what: str) -> Rows:
        """The rows of one kind, in the order in which the model reaches them."""
        if what not in self.kinds:
            return NO_ROWS
        taken = self.table("_of")
        if what not in taken:
            kind = self.kinds[what]
            taken[what] = self.rows.at(kind.rows, kind.places)
            taken[what].which = kind.which
        found: Rows = taken[what]
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
