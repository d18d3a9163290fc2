"""What was measured in the parts and micro-batches of a step, and how it becomes a step on the host.

Which parts and micro-batches a step has is said in `assemble.py`. Under a GradScaler the gradients are divided by the
scale; those of micro-batches that do not count, for a step was left out after them, are left out too.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from tenterhook.record import assemble
from tenterhook.record.gather import Gather
from tenterhook.record.numbers import Scalars
from tenterhook.record.places import Place
from tenterhook.record.step import Histograms, Layout, Parameter, Rows, Step
from tenterhook.stats import BINS, NUMBERS

_NOTHING = Gather(set())  # of a step that is not sampled
_LAYOUTS = 16
_MIN, _MAX = NUMBERS.index("min"), NUMBERS.index("max")


class Micro:
    """What was measured in one micro-batch."""

    __slots__ = ("frozen", "gather", "has_scale", "last", "modes", "scalars", "scaler", "token", "values")

    def __init__(self, token: assemble.MicroBatch, at_once: set[int], sampled: bool) -> None:
        self.token = token
        self.gather = Gather(at_once) if sampled else _NOTHING
        self.scalars = Scalars()
        self.values: dict[int, Any] = {}
        self.modes: dict[tuple[str, str], bool] = {}
        self.frozen: set[tuple[str, str]] = set()
        self.last: Any = None  # the site of the module that was last called
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
        return self.scalars.ready() and all(block.ready() for block in self.gather.blocks)


class Part:
    """What was measured in one part."""

    __slots__ = ("classes", "handles", "of", "optimizers", "parameters", "rates", "sampled", "token", "unscaled_late")

    def __init__(self, token: assemble.Part, sampled: bool) -> None:
        self.token = token
        self.sampled = sampled
        self.of: dict[assemble.MicroBatch, Micro] = {}
        self.handles: list[RemovableHandle] = []
        self.parameters: list[Parameter] = []
        self.rates: tuple[float, ...] = ()
        self.optimizers: frozenset[int] = frozenset()
        self.classes: int | None = None
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

    __slots__ = ("number", "parts", "sampled", "seconds", "spent", "time")

    def __init__(self, number: int, parts: list[Part], seconds: float, time: float, spent: float) -> None:
        self.number = number
        self.parts = parts
        self.seconds, self.time, self.spent = seconds, time, spent
        self.sampled = any(part.sampled for part in parts)  # whether its values were measured

    def ready(self) -> bool:
        """Whether it can be made without waiting for a device."""
        return all(micro.ready() for part in self.parts for micro in part.micros)

    def make(self, places: Sequence[Place], layouts: dict[bytes, Layout]) -> Step:
        """The step, on the host; the layouts of the last ones are kept."""
        step = Step(self.number, seconds=self.seconds, time=self.time, spent=self.spent, sampled=self.sampled)
        found_rows: tuple[list[int], list[NDArray[np.float64]], list[Histograms]] = ([], [], [])
        for part in self.parts:
            step.rates += part.rates
            step.optimizers |= part.optimizers
            step.parameters = [*step.parameters, *part.parameters]
            step.classes = step.classes or part.classes
            micros = part.micros
            facts = [dict(micro.scalars.read()) for micro in micros]
            skips = [micro.token.skipped or _fell(micros, facts, i) for i, micro in enumerate(micros)]
            first, first_loss = assemble.first_that_count(part.token, skips)
            losses: list[float] = []
            for i, micro in enumerate(micros):
                step.training.update(micro.modes)
                step.frozen |= micro.frozen
                step.unmeasured += micro.gather.skipped + micro.gather.lost
                found = self._scalars(step, facts[i])
                step.backwards += len(found)
                losses += found if i >= first_loss else []
                step.skipped += skips[i] + (facts[i].get("skipped", 0) > 0)
                _collect(places, micro, facts[i], i < first, part.unscaled_late, found_rows)
            step.losses += (sum(losses),) if losses else ()
        step.loss = sum(step.losses) if step.losses else None
        owners, numbers, histograms = found_rows
        if owners:
            layout = _layout_of(np.array(owners), places, layouts)
            step.ids, step.calls, step.kinds = layout.ids, layout.calls, layout.kinds
            step.rows = Rows(layout.places, *_merged(layout, _joined(numbers), Histograms.joined(histograms)))
            step.rows.which = layout.ids
        for part in self.parts:
            for micro in part.micros:
                micro.gather.clear()
        return step

    def _scalars(self, step: Step, facts: dict[Any, float]) -> list[float]:
        scale = facts.get("scale")
        step.scale = scale if scale is not None else step.scale
        losses = []
        for key, value in facts.items():
            if isinstance(key, tuple) and key[0] != "scale":
                name, which, *_ = key
                if name == "loss":
                    losses.append(value / (facts.get(("scale", which)) or 1.0))
                else:
                    found = getattr(step, name)
                    found[which] = max(value, found.get(which, value))  # of the uses of one module, the worst
        return losses


def _fell(micros: Sequence[Micro], facts: Sequence[dict[Any, float]], i: int) -> bool:
    """Whether the scale was lower after a micro-batch than at its start: the script itself left out the step, maybe."""
    before = facts[i].get("scale")
    after = facts[i].get("scale after")
    if not after and i + 1 < len(facts) and micros[i + 1].scaler == micros[i].scaler:
        after = facts[i + 1].get("scale")
    return before is not None and after is not None and after < before


def _collect(
    places: Sequence[Place],
    micro: Micro,
    facts: dict[Any, float],
    left_out: bool,
    late: bool,
    into: tuple[Any, Any, Any],
) -> None:
    """The rows of a micro-batch, each as often as it has places, with gradients as they are without a scale."""
    scaled = {"output_grad", "parameter_grad"} if late else {"output_grad"}
    scale = facts.get("scale") or 1.0
    owners, numbers, histograms = into
    for block in micro.gather.blocks:
        its = [place for some in block.places for place in some]
        row_numbers, row_bins = block.arrays()
        which = None  # of the block's rows are those of the places
        if len(its) != len(block.places):
            which = np.repeat(np.arange(len(block.places)), [len(some) for some in block.places])
        if left_out:
            kept = [i for i, place in enumerate(its) if places[place].what != "output_grad"]
            its, which = [its[i] for i in kept], np.arange(len(its))[kept] if which is None else which[kept]
        if which is not None:
            row_numbers = row_numbers[which]
        if scale != 1.0:
            row_bins, which = row_bins if which is None else row_bins[which], None
            mask = np.array([places[place].what in scaled for place in its], bool)
            row_numbers[mask], row_bins[mask] = divided(row_numbers[mask], row_bins[mask], scale)
        sparse = Histograms.of(row_bins.astype(np.int32, copy=False))
        owners += its
        numbers.append(row_numbers)
        histograms.append(sparse if which is None else sparse.in_order(which))


def divided(
    numbers: NDArray[np.float64], bins: NDArray[np.int32], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """What the numbers would be if all values were divided; a scale is a power of two, so the bins just move."""
    numbers = numbers.copy()
    for name, power in (("sum", 1), ("sumsq", 2), ("min", 1), ("max", 1)):
        numbers[:, NUMBERS.index(name)] /= scale**power
    shift = round(math.log2(scale))
    halves = bins.reshape(-1, 2, BINS // 2)
    moved = np.zeros_like(halves)
    moved[:, :, 0], moved[:, :, 255] = halves[:, :, 0], halves[:, :, 255]
    to = np.clip(np.arange(1, 255) - shift, 0, 254)  # what falls below the smallest is counted with zero
    for k, bin_ in enumerate(to, 1):
        moved[:, :, bin_] += halves[:, :, k]
    return numbers, moved.reshape(bins.shape)


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _layout_of(owners: NDArray[np.int64], places: Sequence[Place], layouts: dict[bytes, Layout]) -> Layout:
    key = owners.tobytes()
    if key not in layouts:
        if len(layouts) >= _LAYOUTS:
            layouts.clear()
        layouts[key] = Layout(owners, places)
    return layouts[key]


def _merged(layout: Layout, numbers: NDArray[np.float64], histograms: Histograms) -> tuple[Any, Histograms]:
    """One row for each place, in their order: the numbers and the histograms."""
    numbers, histograms = numbers[layout.order], histograms.in_order(layout.order)
    starts = layout.starts
    if len(starts) == len(numbers):
        return numbers, histograms
    merged = np.add.reduceat(numbers, starts)
    merged[:, _MIN] = np.minimum.reduceat(numbers[:, _MIN], starts)
    merged[:, _MAX] = np.maximum.reduceat(numbers[:, _MAX], starts)
    return merged, Histograms.of(np.add.reduceat(histograms.dense(), starts))
