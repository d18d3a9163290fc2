"""What losses are made of: the calls of torch's loss functions, measured in sampled steps.

All is computed where the tensors are, and sent to the host together; nobody waits for it.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.losses import FAMILIES, made_by, note_term, terms_of
from tenterhook.platform.modes import without_subclasses
from tenterhook.platform.tensors import has_numbers
from tenterhook.record.gather import is_dense
from tenterhook.record.guard import Guard, guarded
from tenterhook.record.measuring import Measuring
from tenterhook.record.numbers import Arrival
from tenterhook.record.sources.given import TARGET, bad_row, leak_of
from tenterhook.record.terms import MEASURED, Term

_ROWS, _NUMBERS = 64, 1 << 20  # of the inputs, that are looked at
_MOST_CLASSES = 1 << 18
_LEAKS = 20  # calls in which the targets are looked for in the inputs
_JUMP, _SMALL = 10.0, 1e-3  # a loss may be that many times the one before; below, it is as good as zero
_keys = itertools.count()


@dataclass(eq=False, slots=True)
class Call:
    """One call of a loss function, in a step that is sampled."""

    function: str
    classes: int
    plain: bool
    smoothing: float
    made_by: str
    numbers: Arrival
    in_loss: bool = False  # whether a backward pass was called on something made of it

    def read(self) -> Term:
        """On the host."""
        numbers = self.numbers.array()
        head = dict(zip(MEASURED, numbers[: len(MEASURED)].tolist(), strict=True))
        family, labels = FAMILIES[self.function], numbers[len(MEASURED) :]
        known = (self.function, family, self.classes, self.plain, self.smoothing, self.made_by)
        return Term(*known, labels=labels, **head)


class Losses:
    """Notes the calls with the micro-batch in which they come, and which of them a loss is made of."""

    def __init__(self, guard: Guard, measuring: Measuring) -> None:
        self.guard = guard
        self._measuring = measuring
        self._key = f"tenterhook.term.{next(_keys)}"  # in graphs
        self._calls = 0
        self._last = math.inf  # loss

    def called(self, function: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        """A loss function has returned."""
        if not self.guard.on or not torch.is_grad_enabled():
            return
        measuring = self._measuring
        measuring.micro.given.add((function.__name__, TARGET), args[1] if len(args) > 1 else kwargs.get("target"))
        if measuring.sampled:
            self._measure(function, args, kwargs, output)

    @guarded
    def _measure(self, function: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        given = _bound(function, args, kwargs)
        tensors = [one for one in (output, *given.values()) if isinstance(one, Tensor)]
        if not given or not output.requires_grad or not all(map(_can_be_read, tensors)):
            return
        micro = self._measuring.micro
        self._calls += 1
        inputs = micro.given.inputs() if self._calls <= _LEAKS else []
        with torch.no_grad(), without_subclasses():
            call = _measured(function.__name__, given, output, inputs)
        if note_term(output, self._key, call):  # else another loss function has called this one
            micro.sample.calls.append(call)

    def reached(self, loss: Tensor) -> None:
        """A backward pass is called on this loss: which terms are in it, and is it of a bad batch?"""
        micro, sampled = self._measuring.micro, self._measuring.sampled
        if sampled:
            calls, more = terms_of((loss,), self._key)
            for call in calls:
                call.in_loss = True
            micro.sample.has_more |= more
        if self._is_bad(loss) if loss.is_cpu else sampled:
            for where, tensor in micro.given.all():
                if tensor.is_floating_point() and tensor.dim() and tensor.numel() and _can_be_read(tensor):
                    row, size = bad_row(tensor)
                    micro.scalars.add(("bad row", *where), row)
                    micro.scalars.add(("bad size", *where), size)

    def _is_bad(self, loss: Tensor) -> bool:
        """Whether a loss on a CPU, where nobody has to wait for it, is far above the one before, or no number."""
        before, self._last = self._last, loss.item()
        return not abs(self._last) <= _JUMP * max(abs(before), _SMALL)


@functools.lru_cache(64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _bound(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name; none where the reduction is asked for in the way of old."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    return {} if given.get("size_average") is not None or given.get("reduce") is not None else given


def _can_be_read(tensor: Tensor) -> bool:
    """Whether it has numbers here: not in a vmap, and not of a class that computes in its own way, as a DTensor."""
    usual = is_dense(tensor) and not is_of_transform(tensor) and has_numbers(tensor)
    return usual and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _measured(function: str, given: dict[str, Any], output: Tensor, inputs: list[Tensor]) -> Call:
    """Start to measure a call."""
    x, y = given.get("input"), given.get("target")
    family, device = FAMILIES[function], output.device
    nothing = torch.full((), torch.nan, dtype=torch.float32, device=device)
    classes, labels, count, looks = 0, nothing.new_empty(0), nothing, [nothing] * 5
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.numel() and y.numel() and family != "other":
        classes = {"classes": x.shape[1 if x.dim() > 1 else 0], "binary": 2}.get(family, 0)
        labels, count = _labels(x, y, given, family)
        looks = [
            *_look_at_rows(x, family, nothing),
            leak_of(inputs, y, family, classes, given.get("ignore_index", -100)),
        ]
    has_weights = given.get("pos_weight") is not None or (given.get("weight") is not None and family != "classes")
    mean = output.detach().float().sum()
    if given.get("reduction", "mean") != "mean":
        mean = mean / count
    numbers = [one.double().view(1) for one in (mean, count, *looks)]
    plain = family != "other" and not has_weights and classes <= _MOST_CLASSES
    smoothing = float(given.get("label_smoothing", 0.0))
    origin = made_by(x) if isinstance(x, Tensor) else ""
    return Call(function, classes, plain, smoothing, origin, Arrival(torch.cat([*numbers, labels.double()])))


def _labels(x: Tensor, y: Tensor, given: dict[str, Any], family: str) -> tuple[Tensor, Tensor]:
    """How often each class is among the targets, or what is to be known of values; and how many targets count."""
    y = y.detach()
    if family == "values":
        values = y.double() if y.is_cpu else y.float()
        number = torch.full_like(values.sum(), y.numel())
        return torch.stack([number, values.sum(), values.square().sum()]), number
    if family == "binary":
        ones = y.float().sum()
        return torch.stack([y.numel() - ones, ones]), torch.full_like(ones, y.numel())
    dim = 1 if x.dim() > 1 else 0
    many = x.shape[dim]
    if many > _MOST_CLASSES:
        nothing = torch.full((), torch.nan, dtype=torch.float32, device=y.device)
        return nothing.new_empty(0), nothing
    if y.is_floating_point():  # probabilities
        counts = y.float().movedim(dim, -1).reshape(-1, many).sum(0)
    else:
        counts = torch.zeros(many, dtype=torch.float32, device=y.device)
        which = y.reshape(-1)
        counts.index_add_(0, which.clamp(0, many - 1), (which != given.get("ignore_index", -100)).float())
    weight = given.get("weight")
    counts = counts if weight is None else counts * weight.detach().float()
    return counts, counts.sum()


def _look_at_rows(x: Tensor, family: str, nothing: Tensor) -> list[Tensor]:
    """Of some inputs: the least and the largest, and how far rows are from probabilities and from their logarithms."""
    if family != "classes":
        return [*x.detach().reshape(-1)[: _ROWS * _ROWS].float().aminmax(), nothing, nothing]
    rows = x.detach() if x.dim() > 1 else x.detach()[None]
    rows = rows[:_ROWS].movedim(1, -1)
    rows = rows.reshape(-1, rows.shape[-1])[: max(1, min(_ROWS, _NUMBERS // rows.shape[-1]))].float()
    return [*rows.aminmax(), (rows.sum(1) - 1).abs().max(), rows.logsumexp(1).abs().max()]
