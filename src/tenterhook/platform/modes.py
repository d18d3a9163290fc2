"""Modes that a program has pushed: what we do must not be seen by them.

Relies on: `torch._C._len_torch_dispatch_stack`, `torch._C._len_torch_function_stack`, `torch._C.DisableTorchFunction`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tenterhook.platform.checkpoints import unrecorded

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def any_mode() -> bool:
    """Whether a mode sees what is done now."""
    return bool(_dispatch_modes() or _function_modes())


@contextmanager
def without_modes() -> Iterator[None]:
    """Do something that no mode sees."""
    with unrecorded(), torch._C.DisableTorchFunction():
        yield
