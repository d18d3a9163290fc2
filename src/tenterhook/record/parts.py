"""What happens between two steps of an optimizer, and how it becomes a step on the host.

A part is what came since an optimizer last stepped, cut into micro-batches by the backward passes. A step is made of
the parts of all optimizers that step in turn: a GAN's two parts are one step. Under a GradScaler the gradients are
divided by the scale; where it left out a step after a micro-batch, the gradients up to there had overflowed, and are
left out too, and so are the losses, unless another optimizer has stepped in its turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from tenterhook.record.gather import Block, Gather, Scalars
from tenterhook.record.places import Place
from tenterhook.record.step import Layout, Parameter, Rows, Step
from tenterhook.stats.arithmetic import Floats, divided, merged
from tenterhook.stats.histograms import Histograms

_NOTHING = Gather(set())  # of a step that is not sampled
_LAYOUTS = 16


class Micro:
    """One forward and its backward."""

    __slots__ = (
        *("asking", "called", "frozen", "gather", "has_scale", "last"),
        *("modes", "scalars", "scaler", "tasks", "values", "was_left_out", "watched"),
    )

    def __init__(self, at_once: set[int], sampled: bool) -> None:
        self.gather = Gather(at_once) if sampled else _NOTHING
        self.scalars = Scalars()
        self.values: dict[int, Any] = {}
        self.tasks: set[int] = set()  # its backward passes
        self.watched: set[int] = set()  # those of them that are seen in steps that are not sampled, too
        self.asking: set[int] = set()  # and those of autograd.grad()
        self.modes: dict[tuple[str, str], bool] = {}
        self.frozen: set[tuple[str, str]] = set()
        self.last: Any = None  # the hook of the module that was last called
        self.has_scale = False
        self.scaler = 0  # whose scale it is: the id of a tensor that the scaler keeps
        self.called = False  # whether a model was
        self.was_left_out = False  # whether a GradScaler has left out the step after it, of one optimizer or more

    def settle(self) -> None:
        """Nothing more comes: send what there is to the host."""
        if self.gather is not _NOTHING:
            self.values.clear()
            self.gather.settle()
        self.scalars.send()

    def ready(self) -> bool:
        """Whether all numbers are on the host."""
        return self.scalars.ready() and all(block.ready() for block in self.gather.blocks)


class Part:
    """Everything since an optimizer last stepped."""

    __slots__ = (
        *("classes", "handles", "keeps_last", "micros", "optimizers"),
        *("parameters", "rates", "sampled", "unscaled_late"),
    )

    def __init__(self, at_once: set[int], sampled: bool) -> None:
        self.sampled = sampled
        self.micros = [Micro(at_once, sampled)]
        self.handles: list[RemovableHandle] = []
        self.parameters: list[Parameter] = []
        self.rates: tuple[float, ...] = ()
        self.optimizers: frozenset[int] = frozenset()
        self.classes: int | None = None
        self.keeps_last = False  # whether losses before the last step that was left out count: another one was not
        self.unscaled_late = False  # a fused optimizer divides by the scale itself, after we have looked

    def is_watched(self) -> bool:
        """Whether all its backward passes are seen if it is not sampled, too."""
        first = self.micros[0]
        if first.watched == first.tasks and len(self.micros) == 1:  # as nearly always
            return bool(first.watched)
        return bool(first.watched) and all(micro.watched >= micro.tasks for micro in self.micros)

    def close(self) -> None:
        """Nothing more comes: send what there is to the host."""
        for handle in self.handles:
            handle.remove()
        self.micros[-1].settle()


class Pending:
    """A step whose numbers may still be on their way."""

    __slots__ = ("number", "parts", "sampled", "seconds", "spent", "time")

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: list[Part] = []
        self.seconds = self.time = self.spent = 0.0
        self.sampled = False  # whether its values were measured

    def ready(self) -> bool:
        """Whether it can be made without waiting for a device."""
        return all(micro.ready() for part in self.parts for micro in part.micros)

    def make(self, places: Sequence[Place], layouts: dict[bytes, Layout]) -> Step:
        """The step, on the host; the layouts of the last ones are kept."""
        step = Step(self.number, seconds=self.seconds, time=self.time, spent=self.spent, sampled=self.sampled)
        measured = _Measured(places)
        for part in self.parts:
            step.rates += part.rates
            step.optimizers |= part.optimizers
            step.parameters = [*step.parameters, *part.parameters]
            step.classes = step.classes or part.classes
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
        step.training.update(micro.modes)
        step.frozen |= micro.frozen
        step.unmeasured += micro.gather.skipped + micro.gather.lost
        step.skipped += self.was_left_out + (facts.get("skipped", 0) > 0)
        step.scale = facts.get("scale", step.scale)
        losses = []
        for key, value in facts.items():
            match key:
                case ("loss", backward):
                    losses.append(value / (facts.get(("scale", backward)) or 1.0))
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
    """The micro-batches of a part, and what counts of each.

    A part is one or more attempts at a step: each but the last ended with a step that was left out. The gradients and
    the losses of the last one count; where it has no backward pass, since another optimizer stepped after that of the
    attempt before, so do the losses of that one.
    """
    micros = part.micros
    facts = [dict(micro.scalars.read()) for micro in micros]
    left_out = [micro.was_left_out or _fell(micros, facts, i) for i, micro in enumerate(micros)]
    attempts = [0, *(i + 1 for i, was in enumerate(left_out) if was)]  # where each begins
    gradients_from = losses_from = attempts[-1]
    if part.keeps_last and len(attempts) > 1 and not any(micro.tasks for micro in micros[gradients_from:]):
        losses_from = attempts[-2]
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
