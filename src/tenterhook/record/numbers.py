"""Numbers on their way to the host: those of a GPU are copied while the training goes on."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Block:
    """Some rows of numbers; `places` says whose each row is, which can be several. On its way from a GPU, maybe."""

    def __init__(self, places: list[list[int]], numbers: Any, histogram: Any) -> None:
        self.places = places
        self.event: Any = None
        self.numbers, self.histogram = numbers, histogram
        if isinstance(numbers, Tensor):
            self.numbers, self.histogram = to_host(numbers), to_host(histogram)
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


class Arrival:
    """Some numbers of one tensor, which nobody has to wait for."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._event = to_host(numbers.detach()), None
        if numbers.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return self._event is None or self._event.query()

    def array(self) -> NDArray[np.float64]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.double().cpu().numpy()


class Scalars:
    """Single numbers, each with a key: on a CPU read at once, on a device together."""

    __slots__ = ("_found", "_sent", "_waiting")

    def __init__(self) -> None:
        self._found: dict[Any, float] = {}
        self._waiting: list[tuple[Any, Tensor]] = []
        self._sent: list[tuple[list[Any], Tensor, Any]] = []

    def add(self, key: Any, value: Tensor) -> None:
        """Keep a number of one element."""
        if value.is_cpu:
            self._found[key] = value.item()
        else:
            self._waiting.append((key, value.detach().double().reshape(1).clone()))

    def send(self) -> None:
        """Start the copies to the host."""
        if not self._waiting:
            return
        for device in {value.device for _, value in self._waiting}:
            keys = [key for key, value in self._waiting if value.device == device]
            host = to_host(torch.cat([value for _, value in self._waiting if value.device == device]))
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._sent.append((keys, host, event))
        self._waiting = []

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return all(event is None or event.query() for _, _, event in self._sent)

    def read(self) -> dict[Any, float]:
        """Each key with its number."""
        for keys, host, event in self._sent:
            if event is not None:
                event.synchronize()
            self._found.update(zip(keys, host.tolist(), strict=True))
        return self._found


def to_host(tensor: Tensor) -> Tensor:
    """A copy that does not wait for the device."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
