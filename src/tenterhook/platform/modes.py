"""Function modes and dispatch modes of this thread: who sees each operation, and how to work unseen.

Relies on: two stacks per thread, with the lengths `torch._C._len_torch_function_stack` and
`torch._C._len_torch_dispatch_stack`; `_push_on_torch_function_stack`, `_pop_torch_function_stack` and
`torch.overrides._get_current_function_mode_stack` (the innermost last); `_disable_current_modes`,
`_get_current_dispatch_mode_stack`, `_push_mode` `_pop_mode`, `TorchDispatchMode` and
`is_traceable_wrapper_subclass` of `torch.utils._python_dispatch`, for dispatch modes;
`torch._C.DisableTorchFunction` and `DisableTorchFunctionSubclass`, within which no function mode, and no
`__torch_function__` of a subclass, is asked.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)

from tenterhook.platform.jit import is_tracing, untraced

DispatchMode = TorchDispatchMode
wraps_tensors = is_traceable_wrapper_subclass  # whether a tensor is a subclass that has others inside
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many are on
function_modes = torch._C._len_torch_function_stack
without_function_modes = torch._C.DisableTorchFunction
without_subclasses = torch._C.DisableTorchFunctionSubclass  # what they do to operations
push_function_mode = torch._C._push_on_torch_function_stack
_NOTHING = nullcontext()


def function_mode_is_on(mode: Any) -> bool:
    """Whether a function mode is on in this thread."""
    return any(one is mode for one in torch.overrides._get_current_function_mode_stack())


def remove_function_mode(mode: Any) -> None:
    """Switch a function mode off, wherever it is among those that are on."""
    above = []
    while function_modes():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push_function_mode(other)


def no_function_mode() -> AbstractContextManager[None]:
    """What is computed within is not shown to any function mode; tensors of subclasses stay such."""
    return _without_any() if function_modes() else _NOTHING


@contextmanager
def _without_any() -> Iterator[None]:
    modes = [torch._C._pop_torch_function_stack() for _ in range(function_modes())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_function_mode(mode)


def any_mode() -> bool:
    """Whether a mode sees what is done now."""
    return bool(dispatch_modes() or function_modes())


def unrecorded() -> AbstractContextManager[Any]:
    """Without any dispatch mode, whoever's it is, and out of sight of torch.jit.trace."""
    return _unrecorded() if dispatch_modes() or is_tracing() else nullcontext()


@contextmanager
def _unrecorded() -> Iterator[None]:
    with _disable_current_modes(), untraced():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Without any mode."""
    with unrecorded(), without_function_modes():
        yield


@contextmanager
def without_dispatch_modes(is_unwanted: Callable[[Any], bool]) -> Iterator[None]:
    """Without some dispatch modes; the others stay in their order."""
    stack = _get_current_dispatch_mode_stack() if dispatch_modes() else []
    first = next((i for i, mode in enumerate(stack) if is_unwanted(mode)), len(stack))
    above = stack[first:]
    others = [mode for mode in above if not is_unwanted(mode)]
    _exchange(above, others)
    try:
        yield
    finally:
        _exchange(others, above)


def _exchange(old: list[Any], new: list[Any]) -> None:
    """Put other modes in the place of the uppermost."""
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
