"""What was measured in the parts and micro-batches of a step, and how it becomes a step on the host.

Which parts and micro-batches a step has is said in `assemble.py`. Under a GradScaler the gradients are divided by the
scale; those of micro-batches that do not count, for a step was left out after them, are left out too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from tenterhook.record import assemble
from tenterhook.record.gather import Gather
from tenterhook.record.numbers import Block, Scalars
from tenterhook.record.places import Place
from tenterhook.record.sources.given import Given
from tenterhook.record.step import Layout, Parameter, Rows, Step, Turn
from tenterhook.stats.arithmetic import Floats, divided, merged
from tenterhook.stats.histograms import Histograms

_NOTHING = Gather(set())  # of a step that is not sampled
_LAYOUTS = 16
_TABLES = {"mark": "marks", "clip": "clips", "input size": "input_sizes"}  # of a step, by the key of a number


class Micro:
    """What was measured in one micro-batch."""

    __slots__ = (
        *("batches", "calls", "chains", "dropouts", "forwards", "frozen", "gather", "given", "has_more", "has_scale"),
        *("last", "modes", "scalars", "scaler", "silent", "token", "values"),
    )

    def __init__(self, token: assemble.MicroBatch, at_once: set[int], sampled: bool) -> None:
        self.token = token
        self.gather = Gather(at_once) if sampled else _NOTHING
        self.scalars = Scalars()
        self.values: dict[int, Any] = {}
        self.modes: dict[tuple[str, str], bool] = {}
        self.frozen: set[tuple[str, str]] = set()
        self.batches: dict[tuple[str, str], tuple[int, int]] = {}  # of BatchNorms: rows, and values of each channel
        self.silent: set[tuple[str, str]] = set()  # modules in training mode that were called without gradients
        self.chains: list[tuple[tuple[str, str], ...]] = []
        self.dropouts: dict[str, float] = {}  # by the site of the module before
        self.last: Any = None  # the site of the module that was last called
        self.calls: list[Any] = []  # of loss functions
        self.given = Given()
        self.forwards = [0, 0]  # calls of models without gradients, and with
        self.has_more = False  # whether its losses are more than what loss functions gave
        self.has_scale = False
        self.scaler = 0  # whose scale it is: the id of a tensor that the scaler keeps

    def settle(self) -> None:
        """Nothing more comes: send what there is to the host."""
        if self.gather is not _NOTHING:
            self.values.clear()
            self.gather.settle()
        self.scalars.send()

    def ready(self) -> bool:
        """Whether all numbers are on the host."""
        blocks = (*self.gather.blocks, *(call.numbers for call in self.calls))
        return self.scalars.ready() and all(block.ready() for block in blocks)


class Part:
    """What was measured in one part."""

    __slots__ = ("handles", "of", "optimizers", "parameters", "rates", "sampled", "token", "turns", "unscaled_late")

    def __init__(self, token: assemble.Part, sampled: bool) -> None:
        self.token = token
        self.sampled = sampled
        self.of: dict[assemble.MicroBatch, Micro] = {}
        self.handles: list[RemovableHandle] = []
        self.parameters: list[Parameter] = []
        self.turns: list[Turn] = []
        self.rates: tuple[float, ...] = ()
        self.optimizers: frozenset[int] = frozenset()
        self.unscaled_late = False  # a fused optimizer divides by the scale itself, after we have looked

    @property
    def micros(self) -> list[Micro]:
        """Those that count; what led to a step that raised does not."""
        return [self.of[micro] for micro in self.token.micros]

    def close(self) -> None:
        """Nothing more comes: send what there is to the host."""
        for handle in self.handles:
            handle.remove()
        self.of[self.token.micros[-1]].settle()


class Pending:
    """A step whose numbers may still be on their way."""

    __slots__ = ("number", "parts", "sampled", "seconds", "spent", "time", "trains")

    def __init__(self, whole: assemble.WholeStep, parts: list[Part], seconds: float, time: float, spent: float) -> None:
        self.number, self.trains = whole.number, whole.trains
        self.parts = parts
        self.seconds, self.time, self.spent = seconds, time, spent
        self.sampled = any(part.sampled for part in parts)  # whether its values were measured

    def ready(self) -> bool:
        """Whether it can be made without waiting for a device."""
        return all(micro.ready() for part in self.parts for micro in part.micros)

    def make(self, places: Sequence[Place], layouts: dict[bytes, Layout]) -> Step:
        """The step, on the host; the layouts of the last ones are kept."""
        step = Step(self.number, seconds=self.seconds, time=self.time, spent=self.spent, sampled=self.sampled)
        measured = _Measured(places)
        for part in self.parts:
            step.rates += part.rates
            step.turns = [*step.turns, *part.turns]
            step.optimizers |= part.optimizers
            step.parameters = [*step.parameters, *part.parameters]
            losses: list[float] = []
            for batch in _read(part):
                losses += batch.tell(step)
                batch.collect(measured, part.unscaled_late)
            step.losses += (sum(losses),) if losses else ()
        step.loss = sum(step.losses) if step.losses else None
        measured.put_into(step, layouts)
        for part in self.parts:
            for micro in part.micros:
                micro.gather.clear()
        return step


@dataclass(frozen=True, slots=True)
class _Batch:
    """A micro-batch whose numbers are on the host."""

    micro: Micro
    facts: dict[Any, float]  # its scalars
    was_left_out: bool  # the step after it
    gradients_count: bool
    losses_count: bool

    def tell(self, step: Step) -> list[float]:
        """Note its facts in the step, all but the losses that count."""
        micro, facts = self.micro, self.facts
        counted = micro.token.losses
        step.training.update(micro.modes)
        step.frozen |= micro.frozen
        step.silent |= micro.silent
        step.chains = [*step.chains, *micro.chains]
        step.batches.update(micro.batches)
        step.dropouts.update(micro.dropouts)
        step.unmeasured += micro.gather.skipped + micro.gather.lost
        step.skipped += self.was_left_out + (facts.get("skipped", 0) > 0)
        step.scale = facts.get("scale", step.scale)
        step.forwards = tuple(map(sum, zip(step.forwards, micro.forwards, strict=True)))
        if self.losses_count:
            step.terms += [call.read() for call in micro.calls if call.in_loss]
            step.has_more |= micro.has_more
        losses = []
        for key, value in facts.items():
            match key:
                case ("loss", loss) if loss in counted:
                    losses.append(value / (facts.get(("scale", loss)) or 1.0))
                case (("mark" | "clip" | "input size") as what, *where):
                    getattr(step, _TABLES[what])[tuple(where)] = value
                case ("old gradient", optimizer):
                    step.old_gradients[optimizer] = value
                case ("bad row", model, site) if value >= 0:
                    step.bad_rows[model, site] = int(value), facts["bad size", model, site]
                case ("dead" | "saturated" as what, place, _):
                    shares = getattr(step, what)
                    shares[place] = max(value, shares.get(place, value))  # of the uses of one module, the worst
        step.backwards += len(losses)
        return losses if self.losses_count else []

    def collect(self, measured: "_Measured", unscaled_late: bool) -> None:
        """Add its rows, with gradients as they are without a scale."""
        scaled = ("output_grad", "parameter_grad") if unscaled_late else ("output_grad",)
        scale = self.facts.get("scale") or 1.0
        for block in self.micro.gather.blocks:
            measured.add(block, () if self.gradients_count else ("output_grad",), scaled, scale)


def _read(part: Part) -> list[_Batch]:
    """The micro-batches of a part, and what counts of each."""
    micros = part.micros
    facts = [dict(micro.scalars.read()) for micro in micros]
    left_out = [micro.token.skipped or _fell(micros, facts, i) for i, micro in enumerate(micros)]
    gradients_from, losses_from = assemble.first_that_count(part.token, left_out)
    return [
        _Batch(micro, facts[i], left_out[i], i >= gradients_from, i >= losses_from) for i, micro in enumerate(micros)
    ]


def _fell(micros: Sequence[Micro], facts: Sequence[dict[Any, float]], i: int) -> bool:
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
