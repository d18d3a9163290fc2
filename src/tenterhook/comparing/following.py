"""b runs, and each of its values is compared with that of a; with `force`, b goes on with the value of a.

Forcing is what tells an error that is made at a place from one that is only passed on: every module gets the inputs
of a, and the code around it the output of a. A difference in an output is then made by the module's own code; one in
an input, by the code of the module around it.
"""

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenterhook.comparing.apart import SAME, Apart, apart, in_range_of
from tenterhook.comparing.leaves import partners, tensors_of, with_tensors
from tenterhook.comparing.source import Event, Key, Source
from tenterhook.comparing.states import Cell, put
from tenterhook.platform.frames import caller_of_module, frame_here
from tenterhook.platform.tensors import has_numbers
from tenterhook.values.tree import Path, can_have_gradient, describe, shape_of


class Spot(NamedTuple):
    """A line of code."""

    source: str  # file:line
    text: str


Layout = Callable[[Any], Any]


@dataclass(slots=True)
class Found:
    """One value of both."""

    key: Key
    apart: Apart  # of the leaf that is farthest apart
    owner: str  # the module whose code has made it, by its name in a
    shape: str = ""
    leaf: Path = ()
    wrote: tuple[bool, bool] = (False, False)  # a and b: whether the module wrote into what it was given
    around: tuple[Key, ...] = ()
    spot: Any = None
    missing: str = ""  # leaves that one side alone has


class Following:
    """The listener of b."""

    def __init__(
        self,
        source: Source,
        *,
        force: bool,
        layouts: Mapping[tuple[str, str], Layout],
        cells: Sequence[Cell],
        view: Callable[[Tensor, Tensor], Tensor] | None = None,
        coarse: float = 0.0,
    ) -> None:
        self._source = source
        self._force = force
        self._layouts = layouts
        self._cells = cells
        self._view = view
        self._coarse = coarse
        self.found: list[Found] = []
        self.only_b: list[Key] = []

    def came(self, event: Event) -> Any:
        """A value of b came. Returns what takes its place, or None."""
        key = event.key
        given = self._source.at(key, event.around)
        if given is None:
            self.only_b.append(key)
            return None
        if key.role == "in" and given.random is not None and self._cells:
            put(self._cells, given.random[: len(self._cells)])
        if key.role == "in" and not (self._force and event.around):  # the model's own inputs are as they were given
            return None
        return self._compare(event, given)

    def _compare(self, event: Event, given: Event) -> Any:
        key = event.key
        layout = self._layouts.get((key.name, key.role))
        mine = tensors_of(given.value if layout is None else layout(given.value))
        theirs = tensors_of(event.value)
        pairs, left, more = partners(mine, theirs)
        leaf: Path = ()
        worst = SAME
        new: dict[Path, Tensor] = {}
        for path, (_, a) in pairs.items():
            b = theirs[path]
            a = _in_shape(a if self._view is None else self._view(a, b), b)
            if key.role == "in" and not _can_take(a, b):
                continue
            found = apart(a, b, self._coarse)
            if found.order > worst.order or worst is SAME:
                worst, leaf = found, path
            if not found.is_equal and self._force and _can_take(a, b):
                new[path] = _as(a.detach(), b)
        missing = [f"{_text(path)} in a alone" for path in left] + [f"{_text(path)} in b alone" for path in more]
        owner = event.owner or (event.around[-1].name if key.role == "in" else key.name)
        shape = describe(theirs.get(leaf, event.value)) if theirs else ""
        what = [] if key.role == "in" else missing
        wrote = (given.wrote, event.wrote)
        spot = _call_site() if key.role == "in" and not worst.is_equal else event.spot
        self.found.append(Found(key, worst, owner, shape, leaf, wrote, event.around, spot, ", ".join(what)))
        if not new:
            return None
        return with_tensors(event.value, new) if "#" not in key.role else None


def _call_site() -> Spot | None:
    """Where the module was called whose input this is."""
    frame = caller_of_module(frame_here())
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    return Spot(f"{file}:{line}", linecache.getline(file, line).strip())


def _can_take(a: Tensor, b: Tensor) -> bool:
    """Whether b could go on with the value of a."""
    alike = can_have_gradient(a) == can_have_gradient(b) and shape_of(a) == shape_of(b)
    return alike and has_numbers(a) and has_numbers(b) and not (a.is_quantized or b.is_quantized)


def _as(a: Tensor, b: Tensor) -> Tensor:
    """A value of a as one of b; its gradient goes on to what b has made."""
    if b.requires_grad and torch.is_grad_enabled():
        return _Forced.apply(b, a)  # type: ignore[no-untyped-call]
    return in_range_of(b, a).to(b.device, b.dtype, copy=True)


class _Forced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor, a: Tensor) -> Tensor:
        return _as(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *grads, None


def _in_shape(a: Tensor, b: Tensor) -> Tensor:
    """A value of a in the shape of b, where only dimensions of size 1 are more or fewer."""
    mine, theirs = shape_of(a), shape_of(b)
    if mine == theirs or [n for n in mine if n != 1] != [n for n in theirs if n != 1]:
        return a
    return a.reshape(theirs)


def _text(path: Path) -> str:
    return "".join(f"[{key}]" for key in path) or "the value"
