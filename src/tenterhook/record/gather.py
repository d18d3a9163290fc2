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
from numpy.typing import NDArray
from torch import Tensor, nn

from tenterhook.platform.checkpoints import unrecorded
from tenterhook.platform.functorch import is_wrapped
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


class Block:
    """Some rows of numbers; `places` says whose each row is, which can be several. On its way from a GPU, maybe."""

    def __init__(self, places: list[list[int]], numbers: Any, histogram: Any) -> None:
        self.places = places
        self.event: Any = None
        self.numbers, self.histogram = numbers, histogram
        if isinstance(numbers, Tensor):
            self.numbers, self.histogram = _to_host(numbers), _to_host(histogram)
            self.event = torch.cuda.Event()
            self.event.record()

    def ready(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self.event is None or self.event.query()

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """The numbers and the histograms."""
        if self.event is None:
            return self.numbers, self.histogram
        self.event.synchronize()
        return self.numbers.numpy(), self.histogram.numpy()


class Scalars:
    """Single numbers, each with a key: on a CPU read at once, on a device together."""

    __slots__ = ("_found", "_sent", "_waiting")

    def __init__(self) -> None:
        self._found: list[tuple[Any, float]] = []
        self._waiting: list[tuple[Any, Tensor]] = []
        self._sent: list[tuple[list[Any], Tensor, Any]] = []

    def add(self, key: Any, value: Tensor) -> None:
        """Keep a number of one element."""
        if value.is_cpu:
            self._found.append((key, value.item()))
        else:
            self._waiting.append((key, value.detach().double().reshape(1).clone()))

    def send(self) -> None:
        """Start the copies to the host."""
        if not self._waiting:
            return
        for device in {value.device for _, value in self._waiting}:
            keys = [key for key, value in self._waiting if value.device == device]
            host = _to_host(torch.cat([value for _, value in self._waiting if value.device == device]))
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._sent.append((keys, host, event))
        self._waiting = []

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return all(event is None or event.query() for _, _, event in self._sent)

    def read(self) -> list[tuple[Any, float]]:
        """Each key with its number."""
        found = list(self._found)
        for keys, host, event in self._sent:
            if event is not None:
                event.synchronize()
            found += zip(keys, host.tolist(), strict=True)
        return found


class Gather:
    """What was measured between two moments of a training: `blocks`, once it is settled."""

    def __init__(self, at_once: set[int]) -> None:
        self.blocks: list[Block] = []
        self.skipped = 0  # tensors that cannot be measured
        self.lost = 0  # those that were written into before they were
        self._at_once = at_once  # places that are measured without waiting, since; shared
        self._noted: list[tuple[list[int], Tensor, int]] = []  # on a device: not yet looked at
        self._waiting: list[tuple[list[int], Tensor, int]] = []
        self._large: list[tuple[list[int], tuple[Any, Any]]] = []
        self._sheets: list[Sheet] = []
        self._launched: dict[Any, list[tuple[list[list[int]], Tensor, Tensor]]] = {}  # rows that are on devices
        self._bytes = self._rows = self._room = 0

    def add(self, places: list[int], tensor: Tensor, version: int) -> None:
        """Measure a tensor, now if nothing tells of a change (-1); more `places` can be added until it is settled."""
        if self._rows < _MOST and is_plain(tensor):
            self._rows += 1
            if not self._sheets or not self._sheets[-1].add(places, tensor):
                self._new_sheet().add(places, tensor)
            return
        self._take(places, tensor, version)
        now = version < 0 or (bool(self._at_once) and not self._at_once.isdisjoint(places))
        if self._waiting and (now or len(self._waiting) >= _TOGETHER or self._bytes >= self._room):
            self.measure()

    def note(self, places: list[int], tensor: Tensor) -> None:
        """The same for one on a device, with the least that can be done while a model runs: code that runs once in a
        while is slow. Whether its values were noted before, for other places, is found out when all are measured.
        """
        version = version_of(tensor)
        if not self._noted:
            if torch.cuda.is_current_stream_capturing():  # a CUDA graph: nothing is computed yet
                return
            self._room = _room(tensor.device)
        self._noted.append((places, tensor.detach() if tensor.requires_grad else tensor, version))
        self._bytes += tensor.nbytes
        now = version < 0 or (bool(self._at_once) and not self._at_once.isdisjoint(places))
        if now or len(self._noted) >= _TOGETHER or self._bytes >= self._room:
            self.measure()

    def add_all(self, places: list[list[int]], tensors: list[Tensor]) -> None:
        """The same for many tensors."""
        plain = [i for i, tensor in enumerate(tensors) if is_plain(tensor)]
        self.add_plain([places[i] for i in plain], [tensors[i] for i in plain])
        if len(plain) < len(tensors):
            rest = set(range(len(tensors))).difference(plain)
            for i in sorted(rest):
                self._take(places[i], tensors[i], version_of(tensors[i]))

    def add_plain(
        self,
        places: list[list[int]],
        tensors: list[Tensor],
        minus: list[Tensor] | None = None,
        copies: list[Tensor] | None = None,
    ) -> None:
        """The same for plain ones; each less another, or copied to another in passing."""
        start = 0
        while start < len(tensors):
            sheet = self._sheets[-1] if self._sheets and self._sheets[-1].room else self._new_sheet()
            some = slice(start, start + sheet.room)
            sheet.add_all(places[some], tensors[some], (minus or [])[some], (copies or [])[some])
            start = some.stop

    def add_fixed(self, places: list[list[int]], tensors: list[Tensor], memory: dict[str, Any]) -> None:
        """The same for tensors that stay where they are; on a GPU their table is kept in `memory`."""
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

    def _take(self, places: list[int], tensor: Tensor, version: int) -> None:
        if self._rows >= _MOST:  # calls and calls, and never a step
            self.skipped += 1
            return
        self._rows += 1
        usual = tensor.dtype in _READY and type(tensor) in _USUAL and (tensor.is_cuda or tensor.is_cpu)
        usual = usual and tensor.layout is torch.strided and not tensor.is_nested
        if not (usual and tensor.is_contiguous()) or is_wrapped(tensor) or not has_values(tensor):
            values = plain(tensor)
            if values is None or not (values.is_cuda or values.is_cpu) or not has_values(values):
                self.skipped += 1
                return
            tensor, version = values, version_of(values)
        if tensor.is_cpu and tensor.dtype is not torch.float64 and is_native():
            self.add_plain([places], [tensor.detach().float()])  # its memory may be the tensor's own
            return
        if tensor.is_cpu and tensor.numel() > SMALL:
            self._large.append((places, measure_large(_flat(tensor))))
            return
        if not self._waiting:
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # a CUDA graph: nothing is computed yet
            self._room = _room(tensor.device)
        self._waiting.append((places, tensor.detach() if tensor.requires_grad else tensor, version))
        self._bytes += tensor.nbytes

    def _look_at_noted(self) -> dict[int, list[tuple[list[int], Tensor]]]:
        """By device, those that can be measured as they are; the others wait with the rest."""
        noted, self._noted = self._noted, []
        known: dict[tuple[int, int, torch.dtype], list[int]] = {}
        ready: dict[int, list[tuple[list[int], Tensor]]] = {}
        for places, tensor, version in noted:
            if version >= 0 and tensor._version != version:
                self._lose(places)
                continue
            address, size = tensor.data_ptr() if tensor.layout is torch.strided else 0, tensor.numel()
            if not (
                tensor.dtype in _READY
                and address >= _LOW
                and tensor.is_contiguous()
                and not tensor.is_nested
                and self._rows < _MOST
            ):
                self._take(places, tensor, version)
            elif (same := known.get((address, size, tensor.dtype))) is not None:
                same += places
            else:
                known[address, size, tensor.dtype] = places
                self._rows += 1
                ready.setdefault(tensor.get_device(), []).append((places, tensor))
        return ready

    def measure(self) -> None:
        """Measure all that waits."""
        for found in self._look_at_noted().values() if self._noted else ():
            self._on_device(found[0][1].device, found)
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        devices: dict[Any, list[tuple[list[int], Tensor]]] = {}
        for places, tensor, version in waiting:
            if (version >= 0 and tensor._version != version) or not has_values(tensor):
                self._lose(places)
            else:
                devices.setdefault(tensor.device, []).append((places, tensor))
        for device, found in devices.items():
            self._on_device(device, found)

    def _lose(self, places: list[int]) -> None:
        """A value was written into, or freed, before it was measured."""
        self.lost += 1
        self._at_once.update(places)

    def _on_device(self, device: torch.device, found: list[tuple[list[int], Tensor]]) -> None:
        kernel = _kernel() if device.type == "cuda" else None
        if kernel is None:  # also where there is no Triton: right, but slow
            self._on_host(found)
            return
        with unrecorded():
            rows = kernel([tensor.float() if tensor.dtype is torch.float64 else tensor for _, tensor in found])
        self._launched.setdefault(device, []).append(([places for places, _ in found], *rows))

    def _on_host(self, found: list[tuple[list[int], Tensor]]) -> None:
        with unrecorded():
            values = [_flat(tensor.cpu()) for _, tensor in found]
            self.blocks.append(Block([places for places, _ in found], *measure_small(values)))

    def settle(self) -> None:
        """Measure what waits, and start copying to the host what was measured elsewhere."""
        if not self._rows and not self._noted and not self._sheets and not self._launched:
            return
        self.measure()
        for sheet in self._sheets:
            many = len(sheet.places)
            self.blocks.append(Block(sheet.places, sheet.numbers[:many], sheet.bins[:many]))
        if self._large:
            numbers, bins = (np.array([row[k] for _, row in self._large]) for k in (0, 1))
            self.blocks.append(Block([its for its, _ in self._large], numbers, bins))
            self._large = []
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
        and type(tensor) in _USUAL
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_nested
        and not is_wrapped(tensor)
        and not tensor.is_neg()
        and (tensor.data_ptr() >= _LOW or has_values(tensor))
        and is_native()
    )


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory, which may have been freed: `untyped_storage().resize_(0)`, as FSDP does."""
    if tensor.data_ptr() >= _LOW or not tensor.numel():
        return True  # without asking for the storage, which takes longer
    return not tensor._is_zerotensor() and tensor.untyped_storage().nbytes() > 0


def _flat(tensor: Tensor) -> Tensor:
    values = tensor.detach().view(-1)
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


@functools.cache
def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return _CACHED
    return int(torch.cuda.get_device_properties(device).total_memory * _SHARE)


def _is_usual(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in _READY and type(tensor) in _USUAL and tensor.is_contiguous()


def _fits_in_a_plan(tensors: list[Tensor]) -> bool:
    if not all(map(_is_usual, tensors)) or len({tensor.device for tensor in tensors}) > 1:
        return False
    return _kernel() is not None


@functools.cache
def _kernel() -> Any:
    try:
        from tenterhook.stats.cuda import measure_cuda
    except ImportError:
        return None
    return measure_cuda


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
