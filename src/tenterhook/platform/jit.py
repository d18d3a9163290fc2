"""torch.jit: what is traced, and where scripts are made.

Relies on: `torch._C._is_tracing`, and `_get_tracing_state` and `_set_tracing_state`, of a thread, None for none;
`torch.jit.trace` compares its result with the module in `_check_trace`; `torch.jit.script` makes modules in
`torch.jit._recursive.create_script_module(nn_module, …)`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from tenterhook.platform.frames import frames_from

is_tracing = torch._C._is_tracing  # torch.jit.trace, which would take what we do for the model's
SCRIPTS_IN: Any = torch.jit._recursive
SCRIPT = "create_script_module"


@contextmanager
def untraced() -> Iterator[None]:
    """What is computed within is no part of what torch.jit.trace makes."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def is_compared(frame: FrameType) -> bool:
    """Whether torch.jit.trace is around a frame, and compares what it has made with the module: that is no step."""
    return not torch.is_grad_enabled() and any(one.f_code.co_name == "_check_trace" for one in frames_from(frame))


def scripted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
    """The module that a script is made of."""
    return args[0] if args else kwargs["nn_module"]
