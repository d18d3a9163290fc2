"""One of several processes runs a step again: the others know nothing of it, and nothing may wait for them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tenterhook.platform.fsdp import is_sharded


def rank_of_several() -> int | None:
    """Which of several processes this is."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.get_rank() if several else None


def waits_for_others(models: Iterable[nn.Module]) -> str:
    """Why these cannot run in one process alone, as far as that shows before they run."""
    for module in (one for model in models for one in model.modules()):
        if is_sharded(module):
            return f"its {type(module).__name__} is sharded: a forward gathers parameters from all processes"
        if isinstance(module, nn.SyncBatchNorm) and module.training and rank_of_several() is not None:
            return "its SyncBatchNorm waits for the batches of all processes"
    return ""


def wrappers_of(model: nn.Module) -> list[Any]:
    """What has the gradients of a model averaged over processes."""
    return [one for one in model.modules() if isinstance(one, DistributedDataParallel)]


@contextmanager
def alone(models: Iterable[nn.Module]) -> Iterator[None]:
    """What is inside DistributedDataParallel runs without waiting for other processes."""
    wrappers = {one for model in models for one in wrappers_of(model)}
    for one in wrappers:
        one.__dict__["forward"] = one.module.__call__
    try:
        yield
    finally:
        for one in wrappers:
            one.__dict__.pop("forward", None)
