"""Measuring the values of a step as they come: small ones and those on a GPU are measured together, a little later.

On a GPU a value waits, uncopied, until there are enough for one launch. If the model writes into it meanwhile, that
one measurement is lost and counted as such, and the place is measured at once from then on.
"""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tenterhook._replay import unrecorded
from tenterhook.stats._cpu import SMALL, Floats, histograms, measure_large, measure_small
from tenterhook.stats._plain import plain

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_TOGETHER = 128  # tensors per launch
_SHARE = 1 / 50  # of a device's memory may wait
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
        self._at_once = at_once  # places that are, since; shared
        self._large: list[tuple[list[int], tuple[list[float], Floats]]] = []
        self._small: list[tuple[list[int], Floats]] = []
        self._waiting: list[tuple[list[int], Tensor, int]] = []
        self._measured: dict[Any, list[tuple[list[list[int]], Tensor, Tensor]]] = {}  # on devices
        self._bytes = 0

    def add(self, places: list[int], tensor: Tensor) -> None:
        """Measure a tensor; to `places` more can be added until it is settled."""
        if tensor.is_cuda:
            self._add_waiting(places, tensor)
            return
        usual = tensor.dtype is torch.float32 and type(tensor) in _USUAL and tensor.is_cpu
        if usual and tensor.is_contiguous() and not is_wrapped(tensor):
            values: Tensor | None = tensor.detach().view(-1)
        else:
            values = plain(tensor)
        if values is None or not values.is_cpu:
            self.skipped += 1
            return
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        if values.numel() <= SMALL:
            self._small.append((places, values.numpy().copy()))
        else:
            self._large.append((places, measure_large(values)))

    def add_all(self, places: list[list[int]], tensors: list[Tensor]) -> None:
        """The same for many tensors that nobody writes into meanwhile."""
        for its, tensor in zip(places, tensors, strict=True):
            if tensor.is_cuda:
                self._wait_for(its, tensor)
            else:
                self.add(its, tensor)
        if self._waiting:
            self._launch()

    def add_fixed(self, places: list[list[int]], tensors: list[Tensor], memory: dict[str, Any]) -> None:
        """The same for tensors that stay where they are; what is worked out once is kept in `memory`."""
        addresses = [tensor.data_ptr() for tensor in tensors] if tensors and tensors[0].is_cuda else []
        plan = memory.get("plan")
        if not addresses or plan is None or plan.addresses != addresses:
            if (
                not addresses
                or not all(map(_is_usual, tensors))
                or len({t.device for t in tensors}) > 1
                or not _kernel()
            ):
                self.add_all(places, tensors)
                return
            from tenterhook.stats._cuda import Plan

            plan = memory["plan"] = Plan(tensors)
        if not torch.cuda.is_current_stream_capturing():
            with unrecorded():
                self._measured.setdefault(tensors[0].device, []).append((places, *plan.measure()))

    def _add_waiting(self, places: list[int], tensor: Tensor) -> None:
        self._wait_for(places, tensor)
        now = tensor.is_inference() or not self._at_once.isdisjoint(places)
        if now or len(self._waiting) >= _TOGETHER or self._bytes >= _room(tensor.device):
            self._launch()

    def _wait_for(self, places: list[int], tensor: Tensor) -> None:
        if not self._waiting and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph: nothing is computed yet
        usual = tensor.dtype in _READY and type(tensor) in _USUAL
        if not (usual and tensor.is_contiguous()) or is_wrapped(tensor):
            values = plain(tensor)
            if values is None:
                self.skipped += 1
                return
            tensor = values.float() if values.dtype is torch.float64 else values
        self._waiting.append((places, tensor, -1 if tensor.is_inference() else tensor._version))
        self._bytes += tensor.nbytes

    def _launch(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        devices: dict[Any, list[tuple[list[int], Tensor]]] = {}
        for places, tensor, version in waiting:
            if version >= 0 and tensor._version != version:
                self.lost += 1
                self._at_once.update(places)
            else:
                devices.setdefault(tensor.device, []).append((places, tensor))
        for device, found in devices.items():
            measure = _kernel()
            if measure is None:  # no Triton: right, but slow
                self._large += [(places, measure_large(tensor.float().cpu())) for places, tensor in found]
                continue
            with unrecorded():
                rows = measure([tensor for _, tensor in found])
            self._measured.setdefault(device, []).append(([places for places, _ in found], *rows))

    def settle(self) -> None:
        """Measure all that waits."""
        if self._waiting:
            self._launch()
        for device, found in self._measured.items():
            with torch.cuda.device(device), unrecorded():
                numbers, bins = (torch.cat([one[k] for one in found]) for k in (1, 2))  # type: ignore[misc]
                self.blocks.append(Block([its for some, _, _ in found for its in some], numbers, bins))
        self._measured = {}
        if self._small:
            small, self._small = self._small, []
            self.blocks.append(Block([p for p, _ in small], *measure_small([t for _, t in small])))
        if self._large:
            large, self._large = self._large, []
            rows, samples = zip(*(row for _, row in large), strict=True)
            self.blocks.append(Block([p for p, _ in large], np.array(rows, float), histograms(samples)))


@functools.cache
def _room(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory * _SHARE)


def _is_usual(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in _READY and type(tensor) in _USUAL and tensor.is_contiguous()


@functools.cache
def _kernel() -> Any:
    try:
        from tenterhook.stats._cuda import measure_cuda
    except ImportError:
        return None
    return measure_cuda


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
