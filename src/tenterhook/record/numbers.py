"""Numbers on their way to the host: those of a GPU are copied while the training goes on."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Arrival:
    """The numbers of one tensor, which nobody has to wait for."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._event = _to_host(numbers.detach()), None
        if numbers.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return self._event is None or self._event.query()

    def array(self) -> NDArray[Any]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.cpu().numpy()


class Block:
    """Some rows of numbers and of histograms, as arrays or tensors; `places` says whose each row is, maybe several."""

    def __init__(self, places: list[list[int]], *tables: Any) -> None:
        self.places = places
        self._tables = [Arrival(one) if isinstance(one, Tensor) else one for one in tables]

    def ready(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return all(one.ready() for one in self._tables if isinstance(one, Arrival))

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """The numbers and the histograms."""
        numbers, histograms = (one.array() if isinstance(one, Arrival) else one for one in self._tables)
        return numbers, histograms


class Scalars:
    """Single numbers, each with a key: on a CPU read at once, on a device together."""

    __slots__ = ("_found", "_sent", "_waiting")

    def __init__(self) -> None:
        self._found: dict[Any, float] = {}
        self._waiting: list[tuple[Any, Tensor]] = []
        self._sent: list[tuple[list[Any], Arrival]] = []

    def add(self, key: Any, value: Tensor) -> None:
        """Keep a number of one element."""
        if value.is_cpu:
            self._found[key] = value.item()
        else:
            self._waiting.append((key, value.detach().double().reshape(1).clone()))

    def send(self) -> None:
        """Start the copies to the host."""
        for device in {value.device for _, value in self._waiting}:
            keys = [key for key, value in self._waiting if value.device == device]
            numbers = torch.cat([value for _, value in self._waiting if value.device == device])
            self._sent.append((keys, Arrival(numbers)))
        self._waiting = []

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return all(numbers.ready() for _, numbers in self._sent)

    def read(self) -> dict[Any, float]:
        """Each key with its number."""
        for keys, numbers in self._sent:
            self._found.update(zip(keys, numbers.array().tolist(), strict=True))
        return self._found


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that does not wait for the device."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
