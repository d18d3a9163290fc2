"""What running a step again must not change: random numbers, buffers, and what modules keep in attributes."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenterhook.platform.modes import wraps_tensors
from tenterhook.platform.tensors import memory_of


class RandomState(NamedTuple):
    """Of the generators that a forward may draw from; those of Python and NumPy may be left out."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> "RandomState":
        """As it is."""
        numpy = sys.modules.get("numpy.random")
        python = random.getstate(), numpy.get_state() if numpy else None
        return cls(*python, torch.get_rng_state(), _of_devices())

    @classmethod
    def of_torch(cls) -> "RandomState":
        """As it is, in a microsecond instead of forty."""
        return cls(None, None, torch.get_rng_state(), _of_devices())

    def put_back(self) -> None:
        """Make it so again."""
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None and (numpy := sys.modules.get("numpy.random")):
            numpy.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for i, state in enumerate(self.cuda[: torch.cuda.device_count()]):  # on another machine there may be fewer
            torch.cuda.set_rng_state(state, i)


def _of_devices() -> tuple[Tensor, ...]:
    return tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()


@contextmanager
def as_it_was(models: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards buffers, the attributes of modules and generators are as they were."""
    modules = [*dict.fromkeys(module for model in models for module in model.modules())]
    put_back = [_buffers_of(modules), _attributes_of(modules), RandomState.now().put_back]
    try:
        yield
    finally:
        for one in put_back:
            one()


def _buffers_of(modules: list[nn.Module]) -> Callable[[], None]:
    """What gives dense buffers the values that they have now.

    It writes into their memory: they may be expanded, or from inference mode, and a graph may hold their versions.
    """
    each = [one for module in modules for one in module.buffers(recurse=False) if not is_lazy(one)]
    dense = [one for one in each if one.layout is torch.strided and not wraps_tensors(one)]
    memory = {memory_of(one): one.untyped_storage() for one in dense}
    copies = [(storage, storage.clone()) for storage in memory.values()]

    def put_back() -> None:
        for storage, before in copies:
            storage.copy_(before)

    return put_back


def _attributes_of(modules: list[nn.Module]) -> Callable[[], None]:
    """What gives modules the attributes that they have now: a forward may keep a state, or a count, in one."""
    tables = [table for one in modules for table in (vars(one), one._buffers, one._parameters)]
    known = [(table, dict(table)) for table in tables if isinstance(table, dict)]

    def put_back() -> None:
        for table, before in known:
            for new in table.keys() - before.keys():
                del table[new]
            table.update(before)

    return put_back
