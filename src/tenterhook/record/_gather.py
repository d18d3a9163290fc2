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
from tenterhook._tree import version_of
from tenterhook.stats._cpu import SMALL, Floats, histograms, measure_large, measure_small
from tenterhook.stats._plain import plain

_TOGETHER = 64  # tensors per launch
_BYTES = 1 << 30  # that may wait
_USUAL = (Tensor, nn.Parameter)
_READY = (torch.float32, torch.bfloat16, torch.float16)


class Block:
    """Some rows of numbers; `places` says whose each row is, which can be several. On its way from a GPU, maybe."""

    def __init__(self, places: list[list[int]], numbers: Any, histogram: Any) -> None:
        self.places = places
        self.event: Any = None
        self.numbers: Any
        self.histogram: Any
        if isinstance(numbers, Tensor):
            self.numbers, self.histogram = _to_host(numbers), _to_host(histogram)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.numbers, self.histogram = numbers, histogram

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
    """Single numbers on a device, each with a key; read together."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._values: list[Tensor] = []
        self._host: list[tuple[list[int], Tensor, Any]] = []

    def add(self, key: Any, value: Tensor) -> None:
        """Keep a number of one element."""
        self.keys.append(key)
        self._values.append(value.detach().double().reshape(1).clone())

    def send(self) -> None:
        """Start the copies to the host."""
        for device in {value.device for value in self._values}:
            rows = [i for i, value in enumerate(self._values) if value.device == device]
            host = _to_host(torch.cat([self._values[i] for i in rows]))
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._host.append((rows, host, event))

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return all(event is None or event.query() for _, _, event in self._host)

    def read(self) -> list[tuple[Any, float]]:
        """Each key with its number."""
        found: dict[int, float] = {}
        for rows, host, event in self._host:
            if event is not None:
                event.synchronize()
            found.update(zip(rows, host.tolist(), strict=True))
        return [(key, found[i]) for i, key in enumerate(self.keys)]


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
        self._bytes = 0

    def add(self, places: list[int], tensor: Tensor) -> None:
        """Measure a tensor; to `places` more can be added until it is settled."""
        if tensor.is_cuda:
            if not torch.cuda.is_current_stream_capturing():
                self._add_waiting(places, tensor)
            return
        if tensor.dtype is torch.float32 and type(tensor) in _USUAL and tensor.is_contiguous() and tensor.is_cpu:
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

    def _add_waiting(self, places: list[int], tensor: Tensor) -> None:
        version = 0
        if type(tensor) is Tensor and tensor.dtype in _READY and tensor.is_contiguous():
            version = version_of(tensor)
        else:
            values = plain(tensor)
            if values is None:
                self.skipped += 1
                return
            version, tensor = version_of(values), values.float() if values.dtype is torch.float64 else values
        self._waiting.append((places, tensor, version))
        self._bytes += tensor.numel() * tensor.element_size()
        now = tensor.is_inference() or not self._at_once.isdisjoint(places)
        if now or len(self._waiting) >= _TOGETHER or self._bytes >= _BYTES:
            self._launch()

    def _launch(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        devices: dict[Any, list[tuple[list[int], Tensor]]] = {}
        for places, tensor, version in waiting:
            if version_of(tensor) != version:
                self.lost += 1
                self._at_once.update(places)
            else:
                devices.setdefault(tensor.device, []).append((places, tensor))
        for device, found in devices.items():
            measure = _kernel()
            if measure is None:  # no Triton: right, but slow
                self._large += [(places, measure_large(tensor.float().cpu())) for places, tensor in found]
                continue
            with torch.cuda.device(device), unrecorded():
                rows = measure([tensor for _, tensor in found])
                self.blocks.append(Block([places for places, _ in found], *rows))

    def settle(self) -> None:
        """Measure all that waits."""
        if self._waiting:
            self._launch()
        if self._small:
            small, self._small = self._small, []
            self.blocks.append(Block([p for p, _ in small], *measure_small([t for _, t in small])))
        if self._large:
            large, self._large = self._large, []
            numbers = np.array([row[0] for _, row in large])
            self.blocks.append(Block([p for p, _ in large], numbers, histograms([row[1] for _, row in large])))


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
