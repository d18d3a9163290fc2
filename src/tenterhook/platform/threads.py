"""What torch keeps for each thread, so that a second thread can run under what holds in this one.

Relies on: grad mode, inference mode, autocast, the default device and the current CUDA device and stream are kept by
thread; `torch.is_autocast_enabled(kind)` and `torch.get_autocast_dtype(kind)` tell autocast by kind of device;
`torch.get_default_device()` the default device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

Contexts = list[Callable[[], AbstractContextManager[Any]]]
_KINDS = ("cpu", "cuda")


def in_same_state() -> Contexts:
    """Contexts to enter in another thread, so that what holds in this one holds there."""
    contexts: Contexts = [partial(torch.inference_mode, torch.is_inference_mode_enabled())]
    if not torch.is_inference_mode_enabled():
        contexts.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
    for kind in _KINDS:
        if torch.is_autocast_enabled(kind):
            contexts.append(partial(torch.autocast, kind, torch.get_autocast_dtype(kind)))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        contexts.append(partial(torch.cuda.device, torch.cuda.current_device()))
        contexts.append(partial(torch.cuda.stream, torch.cuda.current_stream()))
    if torch.get_default_device() != torch.device("cpu"):
        contexts.append(partial(torch.device, torch.get_default_device()))
    return contexts
