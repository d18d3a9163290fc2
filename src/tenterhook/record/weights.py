"""The parameters of an optimizer: measured just before it steps, with their gradients, and what it added to them."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tenterhook.platform.foreach import foreach_mul, foreach_sub
from tenterhook.record.gather import Gather, is_plain
from tenterhook.record.models import Models
from tenterhook.record.places import Places

T = TypeVar("T")
NONE: Mapping[int, Tensor] = MappingProxyType({})
_KEEP = 1 << 26  # bytes for copies of parameters
_SELDOM = 10  # samples after which it is asked again whether there is room for copies


class Weights:
    """What is known of one optimizer's parameters: whose they are, and their places."""

    def __init__(self, models: Models, places: Places, what: frozenset[str], everything: bool) -> None:
        self._models, self._places, self._what = models, places, what
        self._all = everything  # whether those that belong to no known model count too
        self._known: tuple[int, ...] = ()
        self._mine: list[int] = []  # which of the optimizer's parameters
        self._tensors: list[Tensor] = []
        self._numbers: dict[str, list[list[int]]] = {"update": []}  # by kind, once it was looked at
        self._old: dict[int, Tensor] = {}  # by row: the values before the step, where its update is wanted
        self._kept: dict[int, Tensor] = {}
        self._samples = 0
        self._has_room = True
        self._memory: dict[str, Any] = {}

    def look(self, *groups: Sequence[Tensor]) -> None:
        """Find out whose the parameters of these groups are, again where something was added since."""
        groups = tuple([p for p in group if not is_lazy(p)] for group in groups)  # once they have values they are new
        tensors = [p for group in groups for p in group]
        state = (len(self._models.all), *map(id, tensors))
        if state != self._known:
            self._known, self._kept = state, {}
            if any(self._models.parameter(p) is None for p in tensors):
                self._models.look()  # a layer may have been exchanged
            self._name_all(groups)
        self._tensors = [tensors[k] for k in self._mine]  # until the step is over; they are not ours to keep

    def _name_all(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._numbers = {"parameter": [], "parameter_grad": [], "update": []}
        each = [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group)]
        self._mine = [k for k, one in enumerate(each) if self._name(*one)]

    def _name(self, group: int, i: int, parameter: Tensor) -> bool:
        known = self._models.parameter(parameter)
        if known is None and not self._all:
            return False  # watch() was given the model; this is of another one, or was not asked for
        model, site, kind = known or ("optimizer", f"group{group}[{i}]", "Parameter")
        for what, numbers in self._numbers.items():
            numbers.append([self._places.number(model, site, what, kind, parameter.dtype)])
        return True

    def before(self, gather: Gather, asked: Mapping[int, Tensor] = NONE) -> None:
        """Measure the parameters and their gradients, which may be those asked for, and keep copies for the updates."""
        self._samples += 1
        tensors, numbers = self._tensors, self._numbers
        found = [asked.get(id(tensor), tensor.grad) for tensor in tensors]
        graded = [i for i, grad in enumerate(found) if grad is not None]
        moved = self._moved(graded) if "update" in self._what else []
        self._old = {}
        if "parameter" in self._what:
            self._measure_values(gather, moved)
        if "parameter_grad" in self._what:
            gather.add_all(_at(graded, numbers["parameter_grad"]), _at(graded, found))  # type: ignore[arg-type]
        self._copy([i for i in moved if i not in self._old])
        gather.measure()  # the step writes into the parameters

    def _measure_values(self, gather: Gather, moved: list[int]) -> None:
        """Measure the parameters; plain ones whose update is wanted are copied in passing."""
        tensors, numbers = self._tensors, self._numbers["parameter"]
        self._old = {i: self._room_for(i) for i in moved if is_plain(tensors[i])}
        gather.add_plain(_at(self._old, numbers), _at(self._old, tensors), copies=[*self._old.values()])
        rest = [i for i in range(len(tensors)) if i not in self._old]
        gather.add_fixed(_at(rest, numbers), _at(rest, tensors), self._memory)

    def _copy(self, rows: list[int]) -> None:
        if rows:
            with torch.no_grad():
                copies = foreach_mul(_at(rows, self._tensors), 1.0)
            self._old.update(zip(rows, copies, strict=True))

    def after(self, gather: Gather) -> None:
        """Measure what the step has added."""
        numbers = self._numbers["update"]
        tensors, old = self._tensors, self._old
        self._old, self._tensors = {}, []
        old = {i: one for i, one in old.items() if _is_like(tensors[i], one)}  # else the step has exchanged it
        plain = [i for i in old if is_plain(tensors[i]) and is_plain(old[i])]
        gather.add_plain(_at(plain, numbers), _at(plain, tensors), minus=[old[i] for i in plain])
        if rest := sorted(old.keys() - plain):
            with torch.no_grad():
                updates = foreach_sub(_at(rest, tensors), [old[i] for i in rest])
            gather.add_all(_at(rest, numbers), list(updates))

    def _moved(self, graded: list[int]) -> list[int]:
        """The rows whose update is wanted: sparse and sharded ones would be an operation of all ranks."""
        tensors = self._tensors
        moved = [i for i in graded if type(tensors[i].data) is Tensor and tensors[i].is_floating_point()]
        if self._samples % _SELDOM == 1:  # asking a device takes a while
            self._has_room = self._affordable(moved)
        return moved if self._has_room else []

    def _room_for(self, i: int) -> Tensor:
        """Where a copy of a parameter goes. Memory that is not new costs nothing, so some of it is kept."""
        kept, tensor = self._kept.get(i), self._tensors[i]
        if kept is not None and kept.shape == tensor.shape:
            return kept
        room = torch.empty_like(tensor, requires_grad=False)
        if sum(one.nbytes for one in self._kept.values()) + room.nbytes < _KEEP:
            self._kept[i] = room
        return room

    def _affordable(self, moved: list[int]) -> bool:
        """Whether there is room for a copy of the weights while the optimizer steps."""
        need: dict[torch.device, int] = {}
        for i in moved:
            tensor = self._tensors[i]
            need[tensor.device] = need.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
        return all(size < _free(device) / 4 for device, size in need.items())


def _at(rows: Iterable[int], some: list[T]) -> list[T]:
    return [some[i] for i in rows]


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.device == other.device


def _free(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return math.inf
