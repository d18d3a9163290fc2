"""The few functions of torch that have something of ours around them while anything is recorded.

There is no hook for what they do: `GradScaler.scale` tells which scale a loss has, `_maybe_opt_step` whether it left a
step out, and `torch.jit.script` would compile the hooks that are on a module.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tenterhook.platform.hook_tables import HookId


class Wrapped:
    """A function of torch that is called by way of `around(function, *args, **kwargs)`, until it is removed."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = vars(owner)[name]

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        outer._has_tenterhook = True  # type: ignore[attr-defined]
        self._owner, self._name, self._inner, self._outer = owner, name, inner, outer
        setattr(owner, name, outer)

    def remove(self) -> None:
        """Unless somebody else has wrapped it since."""
        if vars(self._owner)[self._name] is self._outer:
            setattr(self._owner, self._name, self._inner)


def wrap_all(recorders: Callable[[], tuple[Any, ...]]) -> Iterator[Wrapped]:
    """Wrap those that are not yet wrapped, for these recorders."""

    def scale(inner: Any, /, *args: Any, **kwargs: Any) -> Any:
        scaler = args[0] if args else kwargs.get("self")

        def told(output: Any) -> Any:
            if not torch.compiler.is_compiling():
                for recorder in recorders():
                    recorder.scaled(scaler, output)
            return output

        output = inner(*args, **kwargs)
        return map(told, output) if type(output) is map else told(output)  # `losses.values()` are scaled one by one

    def step(inner: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) < 3:
            return inner(*args, **kwargs)
        before = [(recorder, recorder.begun()) for recorder in recorders()]
        result = inner(*args, **kwargs)
        for recorder, begun in before:
            if recorder.begun() == begun:  # nobody has stepped
                recorder.left_out(*args[1:3])
        return result

    def script(inner: Any, /, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for recorder in recorders():
                stack.enter_context(recorder.lock)  # in another thread a step may begin or end
            stack.enter_context(_without_hooks(args[0] if args else kwargs["nn_module"]))
            return inner(*args, **kwargs)

    classes: list[Any] = [GradScaler]
    for one in classes:
        classes += one.__subclasses__()  # that for FSDP has a scale() of its own
    places: list[tuple[Any, str, Callable[..., Any]]] = [(one, "scale", scale) for one in classes]
    places += [(one, "_maybe_opt_step", step) for one in classes]
    for owner, name, around in (*places, (torch.jit._recursive, "create_script_module", script)):
        function = vars(owner).get(name)
        if isinstance(function, FunctionType) and not hasattr(function, "_has_tenterhook"):
            yield Wrapped(owner, name, around)


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    tables = [table for one in module.modules() for table in (one._forward_hooks, one._forward_pre_hooks)]
    before = [(table, [*table.items()]) for table in tables]
    for table, hooks in before:
        for key, _ in hooks:
            if type(key) is HookId:
                table.pop(key, None)  # a copy.copy of a module has the same table
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)  # in the order in which they were
