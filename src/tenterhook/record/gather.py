"""Measuring the values of a step as they come: on a GPU together, on a CPU at once.

On a GPU several tensors take little longer than one; so do small ones where there is no compiler. Meanwhile a value
waits, uncopied. If the model writes into it before it was measured, that one measurement is lost and counted as such,
and the place is measured at once from then on. Modules that are known to write (`inplace=True`) are waited for. A large
value on a CPU does not wait for others: to hold its memory would cost more than is gained, for the model would have to
get fresh memory.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.modes import unrecorded
from tenterhook.platform.tensors import is_zero_tensor
from tenterhook.record.numbers import Block
from tenterhook.stats.cpu import SMALL, measure_large, measure_small
from tenterhook.stats.native import Sheet, is_native, new_sheet
from tenterhook.stats.plain import plain
from tenterhook.values.tree import version_of

_TOGETHER = 128  # tensors per launch
_SHARE = 1 / 50  # of a GPU's memory may wait
_MOST = 20_000  # rows of one micro-batch
_CACHED = 1 << 25  # bytes that may on a CPU, whose cache may still have them when they are measured
_LOW = 1 << 36  # an address below it may be an offset from nowhere
_USUAL = (Tensor, nn.Parameter)
_READY = (torch.float32, torch.bfloat16, torch.float16)
Found = tuple[list[int], Tensor]  # places, and the value that was seen there


class Gather:
    """What was measured between two moments of a training: `blocks`, once it is settled.

    A value of one place or several can be added while a model runs (`add`, and `note` if it is on a device), or many at
    once between its calls (`add_all`, `add_plain`, `add_fixed`).
    """

    def __init__(self, at_once: set[int]) -> None:
        self.blocks: list[Block] = []
        self.skipped = 0  # tensors that cannot be measured
        self.lost = 0  # those that were written into before they were
        self._at_once = at_once  # places that are measured without waiting, since; shared
        self._waiting: list[tuple[list[int], Tensor, int]] = []  # with the version in which it was seen
        self._sheets: list[Sheet] = []  # rows that compiled code has measured
        self._launched: dict[Any, list[tuple[list[list[int]], Tensor, Tensor]]] = {}  # rows that are on devices
        self._bytes = self._rows = self._room = 0

    def add(self, places: list[int], tensor: Tensor, version: int) -> None:
        """Measure a tensor, now if nothing tells of a change (-1); more `places` can be added until it is settled."""
        if self._rows < _MOST and is_plain(tensor):
            self._rows += 1
            if not self._sheets or not self._sheets[-1].add(places, tensor):
                self._new_sheet().add(places, tensor)
        elif tensor.is_cuda and _is_ready(tensor) and not is_of_transform(tensor):
            self.note(places, tensor)
        else:
            self._add_converted(places, tensor, version)

    def note(self, places: list[int], tensor: Tensor) -> None:
        """Add one on a device, with the least that can be done while a model runs: code that runs once in a while is
        slow. Whether its values were noted before, for other places, is found out when all are measured.
        """
        if not self._waiting and torch.cuda.is_current_stream_capturing():  # a CUDA graph: nothing is computed yet
            return
        self._wait(places, tensor, version_of(tensor))

    def add_all(self, places: list[list[int]], tensors: list[Tensor]) -> None:
        """Add many tensors."""
        plain = [i for i, tensor in enumerate(tensors) if is_plain(tensor)]
        self.add_plain([places[i] for i in plain], [tensors[i] for i in plain])
        for i in sorted({*range(len(tensors))}.difference(plain)) if len(plain) < len(tensors) else ():
            self.add(places[i], tensors[i], version_of(tensors[i]))

    def add_plain(
        self,
        places: list[list[int]],
        tensors: list[Tensor],
        minus: list[Tensor] | None = None,
        copies: list[Tensor] | None = None,
    ) -> None:
        """Add many plain ones; each less another, or copied to another in passing."""
        start = 0
        while start < len(tensors):
            sheet = self._sheets[-1] if self._sheets and self._sheets[-1].room else self._new_sheet()
            some = slice(start, start + sheet.room)
            sheet.add_all(places[some], tensors[some], (minus or [])[some], (copies or [])[some])
            start = some.stop

    def add_fixed(self, places: list[list[int]], tensors: list[Tensor], memory: dict[str, Any]) -> None:
        """Add many that stay where they are; on a GPU their table is kept in `memory`."""
        if not tensors or not tensors[0].is_cuda:
            self.add_all(places, tensors)
            return
        what = [(tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in tensors]
        known = memory.get("of") == what
        if not known and not _fits_in_a_plan(tensors):
            self.add_all(places, tensors)
        elif not torch.cuda.is_current_stream_capturing():
            from tenterhook.stats.cuda import Plan

            if not known:
                memory.update(of=what, plan=Plan(tensors))
            with unrecorded():
                self._launched.setdefault(tensors[0].device, []).append((places, *memory["plan"].measure()))

    def _new_sheet(self) -> Sheet:
        self._sheets.append(new_sheet())
        return self._sheets[-1]

    def _add_converted(self, places: list[int], tensor: Tensor, version: int) -> None:
        """Add one that may have to be converted, or is not on a GPU and there is no compiled code."""
        values = readable(tensor) if self._rows < _MOST else None  # more: calls and calls, and never a step
        if values is None:
            self.skipped += 1
        elif values.is_cpu and values.dtype is not torch.float64 and is_native():
            self._rows += 1
            self.add_plain([places], [values.detach().float()])  # its memory may be the tensor's own
        elif values.is_cpu and values.numel() > SMALL:
            self._rows += 1
            numbers, bins = measure_large(_flat(values))
            self.blocks.append(Block([places], np.array([numbers]), np.array([bins])))
        else:
            self._wait(places, values, version if values is tensor else version_of(values))

    def _wait(self, places: list[int], tensor: Tensor, version: int) -> None:
        if self._rows >= _MOST:
            self.skipped += 1
            return
        if not self._waiting:
            self._room = _room(tensor.device)
        self._rows += 1
        self._waiting.append((places, tensor.detach() if tensor.requires_grad else tensor, version))
        self._bytes += tensor.nbytes
        now = version < 0 or (bool(self._at_once) and not self._at_once.isdisjoint(places))
        if now or len(self._waiting) >= _TOGETHER or self._bytes >= self._room:
            self.measure()

    def measure(self) -> None:
        """Measure all that waits."""
        if not self._waiting:
            return
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        seen: dict[tuple[int, int, torch.dtype], list[int]] = {}
        devices: dict[torch.device, list[Found]] = {}
        for places, tensor, version in waiting:
            values = self._still(places, tensor, version)
            if values is None:
                continue
            what = values.data_ptr(), values.numel(), values.dtype
            if what in seen:
                seen[what] += places
                continue
            if what[0] >= _LOW:
                seen[what] = places
            devices.setdefault(values.device, []).append((places, values))
        for device, found in devices.items():
            self._on_device(found) if device.type == "cuda" else self._on_host(found)

    def _still(self, places: list[int], tensor: Tensor, version: int) -> Tensor | None:
        """The values that have waited, unless they were written into, or freed."""
        if (version >= 0 and tensor._version != version) or not has_values(tensor):
            self.lost += 1
            self._at_once.update(places)
            return None
        values = tensor if not tensor.is_cuda or _is_ready(tensor) else readable(tensor)
        self.skipped += values is None
        return values

    def _on_device(self, found: list[Found]) -> None:
        kernel = _kernel()
        if kernel is None:  # there is no Triton: right, but slow
            self._on_host(found)
            return
        with unrecorded():
            rows = kernel([tensor.float() if tensor.dtype is torch.float64 else tensor for _, tensor in found])
        self._launched.setdefault(found[0][1].device, []).append(([places for places, _ in found], *rows))

    def _on_host(self, found: list[Found]) -> None:
        with unrecorded():
            values = [_flat(tensor.cpu()) for _, tensor in found]
            self.blocks.append(Block([places for places, _ in found], *measure_small(values)))

    def settle(self) -> None:
        """Measure what waits, and start copying to the host what was measured elsewhere."""
        self.measure()
        for sheet in self._sheets:
            many = len(sheet.places)
            self.blocks.append(Block(sheet.places, sheet.numbers[:many], sheet.bins[:many]))
        for device, found in self._launched.items():
            with torch.cuda.device(device), unrecorded():
                rows = [torch.cat([one[k] for one in found]) for k in (1, 2)]  # type: ignore[misc]
                self.blocks.append(Block([its for some, _, _ in found for its in some], *rows))
        self._launched = {}

    def clear(self) -> None:
        """The numbers were read, and their memory can be used for others."""
        self.blocks = []
        for sheet in self._sheets:
            sheet.clear()
        self._sheets = []


def is_plain(tensor: Tensor) -> bool:
    """Whether compiled code can read a tensor as it is."""
    return (
        tensor.dtype is torch.float32
        and tensor.is_cpu
        and _is_ready(tensor)
        and not is_of_transform(tensor)
        and (tensor.data_ptr() >= _LOW or has_values(tensor))
        and is_native()
    )


def readable(tensor: Tensor) -> Tensor | None:
    """A tensor, or its values in one that can be read; None where there are none."""
    if _is_ready(tensor) and (tensor.is_cpu or tensor.is_cuda) and not is_of_transform(tensor) and has_values(tensor):
        return tensor
    values = plain(tensor)
    if values is None or not (values.is_cuda or values.is_cpu) or not has_values(values):
        return None
    return values.resolve_neg()


def _is_ready(tensor: Tensor) -> bool:
    """Whether values can be read as they are, of a tensor on a CPU or GPU."""
    return (
        tensor.dtype in _READY
        and type(tensor) in _USUAL
        and is_dense(tensor)
        and tensor.is_contiguous()
        and not tensor.is_neg()  # the imaginary part of a conjugate: its memory has the other sign
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has all its elements in one piece of memory: not if it is sparse, or nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory, which may have been freed: `untyped_storage().resize_(0)`, as FSDP does."""
    if tensor.layout is not torch.strided or tensor.data_ptr() >= _LOW or not tensor.numel():
        return True  # without asking for the storage, which takes longer
    return not is_zero_tensor(tensor) and tensor.untyped_storage().nbytes() > 0


def some_values(parameter: Tensor, most: int) -> Tensor | None:
    """A few values of a parameter, from all over it; None where they cannot be read, or not by one rank alone."""
    if type(parameter.data) is not Tensor or not parameter.is_floating_point() or not has_values(parameter):
        return None
    values = parameter.detach().reshape(-1)
    return values[:: max(1, values.numel() // most)][:most]


def _flat(tensor: Tensor) -> Tensor:
    values = tensor.detach().view(-1)
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


@functools.cache
def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return _CACHED
    return int(torch.cuda.get_device_properties(device).total_memory * _SHARE)


def _fits_in_a_plan(tensors: list[Tensor]) -> bool:
    if not all(tensor.is_cuda and _is_ready(tensor) for tensor in tensors) or len({t.device for t in tensors}) > 1:
        return False
    return _kernel() is not None


@functools.cache
def _kernel() -> Any:
    try:
        from tenterhook.stats.cuda import measure_cuda
    except ImportError:
        return None
    return measure_cuda
