"""What happens between two steps of an optimizer, and how it becomes a step on the host.

A part is what came since an optimizer last stepped, cut into micro-batches by the backward passes. A step is made of
the parts of all optimizers that step in turn: a GAN's two parts are one step. Under a GradScaler the gradients are
divided by the scale; where it left out a step after a micro-batch, the gradients up to there had overflowed, and are
left out too, and so are the losses, unless another optimizer has stepped in its turn.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from tenterhook.record.gather import Gather, Scalars
from tenterhook.record.places import Place
from tenterhook.record.step import Histograms, Layout, Parameter, Rows, Step
from tenterhook.stats import BINS, NUMBERS

_NOTHING = Gather(set())  # of a step that is not sampled
_LAYOUTS = 16
_MIN, _MAX = NUMBERS.index("min"), NUMBERS.index("max")


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
        found_rows: tuple[list[int], list[NDArray[np.float64]], list[Histograms]] = ([], [], [])
        for part in self.parts:
            step.rates += part.rates
            step.optimizers |= part.optimizers
            step.parameters = [*step.parameters, *part.parameters]
            step.classes = step.classes or part.classes
            facts = [dict(micro.scalars.read()) for micro in part.micros]
            skips = [micro.was_left_out or _fell(part.micros, facts, i) for i, micro in enumerate(part.micros)]
            ends = [0, *(i + 1 for i, many in enumerate(skips) if many)]  # up to the last one, they were left out
            keeps = part.keeps_last and not any(micro.tasks for micro in part.micros[ends[-1] :])
            lost = ends[-2] if keeps and len(ends) > 1 else ends[-1]
            losses: list[float] = []
            for i, micro in enumerate(part.micros):
                step.training.update(micro.modes)
                step.frozen |= micro.frozen
                step.unmeasured += micro.gather.skipped + micro.gather.lost
                found = self._scalars(step, facts[i])
                step.backwards += len(found)
                losses += found if i >= lost else []
                step.skipped += skips[i] + (facts[i].get("skipped", 0) > 0)
                _collect(places, micro, facts[i], i < ends[-1], part.unscaled_late, found_rows)
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
