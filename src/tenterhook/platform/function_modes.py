"""The function modes of users, which would see what we compute, too.

Relies on: the stack of modes that `torch._C._pop_torch_function_stack` and its like change.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_count = torch._C._len_torch_function_stack
_nothing = nullcontext()


def without_function_modes() -> AbstractContextManager[None]:
    """What is computed is not shown to any function mode; tensors of subclasses stay such."""
    return _without() if _count() else _nothing


@contextmanager
def _without() -> Iterator[None]:
    modes = [torch._C._pop_torch_function_stack() for _ in range(_count())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
