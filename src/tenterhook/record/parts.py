"""What was measured in the parts and micro-batches of a step, and how it becomes a step on the host.

Which parts and micro-batches a step has is said in `assemble.py`. Under a GradScaler the gradients are divided by the
scale; those of micro-batches that do not count, for a step was left out after them, are left out too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenterhook.birth.replay import Replayed
from tenterhook.platform.tensors import Handle
from tenterhook.record import assemble
from tenterhook.record.gather import Gather
from tenterhook.record.numbers import Block, Scalars
from tenterhook.record.places import Place
from tenterhook.record.sources.given import Given
from tenterhook.record.step import Layout, Parameter, Rows, Step, Turn
from tenterhook.stats.arithmetic import Floats, divided, merged
from tenterhook.stats.histograms import Histograms

_LAYOUTS = 16
_TABLES = {"mark": "marks", "clip": "clips", "input size": "input_sizes"}  # of a step, by the key of a number


class Sample:
    """What was measured in one micro-batch of a sampled step."""

    __slots__ = (
        *("batches", "calls", "chains", "dropouts", "frozen", "gather", "has_more", "last", "modes", "silent"),
        "values",
    )

    def __init__(self, at_once: set[int]) -> None:
        self.gather = Gather(at_once)
        self.values: dict[int, Any] = {}
        self.modes: dict[tuple[str, str], bool] = {}
        self.frozen: set[tuple[str, str]] = set()
        self.batches: dict[tuple[str, str], tuple[int, int]] = {}  # of BatchNorms: rows, and values of each channel
        self.silent: set[tuple[str, str]] = set()  # modules in training mode that were called without gradients
        self.chains: list[tuple[tuple[str, str], ...]] = []
        self.dropouts: dict[str, float] = {}  # by the site of the module before
        self.last: Any = None  # the site of the module that was last called
        self.calls: list[Any] = []  # of loss functions
        self.has_more = False  # whether its losses are more than what loss functions gave

    def settle(self) -> None:
        """Nothing more comes: send what there is to the host."""
        self.values.clear()
        self.gather.settle()

    def ready(self) -> bool:
        """Whether all of it is on the host."""
        return all(one.ready() for one in (*self.gather.blocks, *(call.numbers for call in self.calls)))

    def note_in(self, step: Step, losses_count: bool) -> None:
        """Note its facts in a step."""
        step.table("training").update(self.modes)
        step.table("batches").update(self.batches)
        step.table("dropouts").update(self.dropouts)
        step.frozen |= self.frozen
        step.silent |= self.silent
        step.chains += tuple(self.chains)
        step.unmeasured += self.gather.skipped + self.gather.lost
        if losses_count:
            step.terms += tuple(call.read() for call in self.calls if call.in_loss)
            step.has_more |= self.has_more


NOTHING = Sample(set())  # of a micro-batch in which nothing is measured


class Micro(assemble.MicroBatch):
    """A micro-batch with what is known of it: its losses in every step, and more in a sampled one."""

    __slots__ = ("forwards", "given", "sample", "scalars", "scaler")

    def __init__(self) -> None:
        super().__init__()
        self.sample = NOTHING
        self.scalars = Scalars()
        self.given = Given()
        self.forwards = [0, 0]  # calls of models without gradients, and with
        self.scaler = 0  # whose scale it is: the id of a tensor that the scaler keeps; 0 without any

    def settle(self) -> None:
        """Nothing more comes: send what there is to the host."""
        if self.sample is not NOTHING:
            self.sample.settle()
        self.scalars.send()

    def ready(self) -> bool:
        """Whether all numbers are on the host."""
        return self.scalars.ready() and self.sample.ready()

    def note_in(self, step: Step, facts: Mapping[Any, float]) -> list[float]:
        """Note its facts in a step, of which these are the scalars; its losses are given back."""
        without, calls = self.forwards
        step.forwards = step.forwards[0] + without, step.forwards[1] + calls
        counted, losses = self.losses, []
        for key, value in facts.items():
            match key:
                case ("loss", loss) if loss in counted:
                    losses.append(value / (facts.get(("scale", loss)) or 1.0))
                case "scale":
                    step.scale = value
                case (("mark" | "clip" | "input size") as what, *where):
                    step.table(_TABLES[what])[tuple(where)] = value
                case ("old gradient", optimizer):
                    step.table("old_gradients")[optimizer] = value
                case ("bad row", model, site) if value >= 0:
                    step.table("bad_rows")[model, site] = int(value), facts["bad size", model, site]
                case ("dead" | "saturated" as what, place, _):
                    shares = step.table(what)
                    shares[place] = max(value, shares.get(place, value))  # of the uses of one module, the worst
        step.backwards += len(losses)
        return losses


class Part(assemble.Part):
    """A part with what is known of it."""

    __slots__ = ("handles", "optimizers", "parameters", "rates", "sampled", "turns", "unscaled_late")
    micros: list[Micro]  # type: ignore[assignment]

    def __init__(self, is_first: bool, micros: list[Micro]) -> None:
        super().__init__(is_first, micros)  # type: ignore[arg-type]
        self.sampled = False
        self.handles: list[Handle] = []  # of hooks on leaves, which would stay
        self.parameters: list[Parameter] = []
        self.turns: list[Turn] = []
        self.rates: tuple[float, ...] = ()
        self.optimizers: frozenset[int] = frozenset()
        self.unscaled_late = False  # a fused optimizer divides by the scale itself, after we have looked

    def note_in(self, step: Step, measured: "_Measured") -> None:
        """Note its facts in a step, and add its rows."""
        step.rates += self.rates
        step.optimizers |= self.optimizers
        step.turns += tuple(self.turns)
        step.parameters += tuple(self.parameters)
        facts = [micro.scalars.read() for micro in self.micros]
        left_out = [micro.skipped or _fell(self.micros, facts, i) for i, micro in enumerate(self.micros)]
        gradients_from, losses_from = assemble.first_that_count(self, left_out)
        losses: list[float] = []
        for i, micro in enumerate(self.micros):
            step.skipped += left_out[i] + (facts[i].get("skipped", 0) > 0)
            found = micro.note_in(step, facts[i])
            losses += found if i >= losses_from else ()
            if micro.sample is not NOTHING:
                micro.sample.note_in(step, i >= losses_from)
                dropped = () if i >= gradients_from else ("output_grad",)
                scaled = ("output_grad", "parameter_grad") if self.unscaled_late else ("output_grad",)
                for block in micro.sample.gather.blocks:
                    measured.add(block, dropped, scaled, facts[i].get("scale") or 1.0)
        step.losses += (sum(losses),) if losses else ()


class Pending(NamedTuple):
    """A step whose numbers may still be on their way."""

    number: int
    parts: Sequence[Part]
    trains: bool
    sampled: bool  # whether its values were measured
    seconds: float
    time: float
    spent: float
    replayed: Replayed | None = None  # where something that is not finite was made

    def ready(self) -> bool:
        """Whether it can be made without waiting for a device."""
        return all(micro.ready() for part in self.parts for micro in part.micros)

    def make(self, places: Sequence[Place], layouts: dict[bytes, Layout]) -> Step:
        """The step, on the host; the layouts of the last ones are kept."""
        step = Step(self.number, seconds=self.seconds, time=self.time, spent=self.spent, sampled=self.sampled)
        if self.replayed is not None:
            step.replayed = self.replayed
        measured = _Measured(places)
        for part in self.parts:
            part.note_in(step, measured)
        step.loss = sum(step.losses) if step.losses else None
        if self.sampled:
            measured.put_into(step, layouts)
            for micro in (micro for part in self.parts for micro in part.micros):
                micro.sample.gather.clear()
        return step


def _fell(micros: Sequence[Micro], facts: Sequence[Mapping[Any, float]], i: int) -> bool:
    """Whether the scale was lower after a micro-batch than at its start: the script itself left out the step, maybe."""
    before = facts[i].get("scale")
    after = facts[i].get("scale after")
    if not after and i + 1 < len(facts) and micros[i + 1].scaler == micros[i].scaler:
        after = facts[i + 1].get("scale")
    return before is not None and after is not None and after < before


class _Measured:
    """The rows of all micro-batches of a step: whose each is, and the statistics."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._owners: list[NDArray[np.int64]] = []
        self._numbers: list[Floats] = []
        self._histograms: list[Histograms] = []

    def add(self, block: Block, dropped: Sequence[str], scaled: Sequence[str], scale: float) -> None:
        """The rows of a block, each as often as it has places, but of the kinds of values that are dropped."""
        numbers, bins = block.arrays()
        owners = np.array([place for its in block.places for place in its], np.int64)
        rows = np.repeat(np.arange(len(numbers)), [len(its) for its in block.places])
        if dropped:
            kept = ~self._are(dropped, owners)
            owners, rows = owners[kept], rows[kept]
        if scale != 1.0:
            numbers, bins = numbers[rows], bins[rows]
            mask = self._are(scaled, owners)
            numbers[mask], bins[mask] = divided(numbers[mask], bins[mask], scale)
        histograms = Histograms.of(bins)
        if scale == 1.0 and not np.array_equal(rows, np.arange(len(numbers))):
            numbers, histograms = numbers[rows], histograms.in_order(rows)
        self._owners.append(owners)
        self._numbers.append(numbers)
        self._histograms.append(histograms)

    def _are(self, kinds: Sequence[str], owners: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.array([self._places[owner].what in kinds for owner in owners.tolist()], bool)

    def put_into(self, step: Step, layouts: dict[bytes, Layout]) -> None:
        """One row for each place, in their order."""
        if not any(map(len, self._owners)):
            return
        layout = _layout_of(np.concatenate(self._owners), self._places, layouts)
        numbers = np.concatenate(self._numbers)[layout.order]
        histograms = Histograms.joined(self._histograms).in_order(layout.order)
        if len(layout.starts) < len(numbers):
            numbers = merged(numbers, layout.starts)
            histograms = Histograms.of(np.add.reduceat(histograms.dense(), layout.starts))
        step.rows = Rows(layout.places, numbers, histograms)
        step.rows.which = layout.which
        step.calls, step.kinds = layout.calls, layout.kinds


def _layout_of(owners: NDArray[np.int64], places: Sequence[Place], layouts: dict[bytes, Layout]) -> Layout:
    key = owners.tobytes()
    if key not in layouts:
        if len(layouts) >= _LAYOUTS:
            layouts.clear()
        layouts[key] = Layout(owners, places)
    return layouts[key]
