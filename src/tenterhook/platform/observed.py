"""Functions of torch whose calls are told of: losses, dropout and the clipping of gradients.

The function stays the same object and only runs other code, so whoever has it under another name is heard, too.

Relies on: they are plain functions, whose `__code__` can be exchanged; those of `torch.nn.utils` that clip run within a
wrapper that has the plain one as `__wrapped__`; torch.compile calls them as they are while it traces, with
`torch.compiler.is_compiling()` true, and has guards on their `__code__` as it is when it is done; `torch.jit.script`
and `inspect` find a source by the file and the line that the code names; `inspect.signature` asks for `__signature__`.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def _stub(*args: Any, _told: Any, **kwargs: Any) -> Any:
    return _told(*args, **kwargs)


class Observed:
    """A function that is called by way of `around(function, *args, **kwargs)`, until it is removed, or for some calls.

    Where torch.compile traces it, it is removed at once: later, what was compiled would have to be made again.
    """

    def __init__(self, function: Any, around: Callable[..., Any], calls: int | None = None) -> None:
        self._function = function
        self._before = own, defaults = function.__code__, function.__kwdefaults__
        inner = FunctionType(own, function.__globals__, function.__name__, function.__defaults__)
        inner.__kwdefaults__ = defaults
        self._calls_left = calls

        def told(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                self.remove()
                return inner(*args, **kwargs)
            if self._calls_left is not None:
                self._count()
            return around(inner, *args, **kwargs)

        function.__signature__ = inspect.signature(function)
        function.__kwdefaults__ = {"_told": told}
        where = {"co_filename": own.co_filename, "co_firstlineno": own.co_firstlineno}
        named = {"co_name": own.co_name, "co_qualname": own.co_qualname}
        self._code = function.__code__ = _stub.__code__.replace(**where, **named)

    def _count(self) -> None:
        self._calls_left = (self._calls_left or 0) - 1
        if self._calls_left <= 0:
            self.remove()

    def remove(self) -> None:
        """Have it run its own code, unless somebody else has exchanged that since."""
        function = self._function
        if function.__code__ is self._code:
            function.__code__, function.__kwdefaults__ = self._before
            del function.__signature__


def observable(name: str) -> Any:
    """The function of this name in torch.nn.functional or torch.nn.utils; None where it is torch's own no more."""
    function = getattr(nn.utils if name in CLIPS else nn.functional, name, None)
    function = getattr(function, "__wrapped__", None) if name in CLIPS else function
    usual = isinstance(function, FunctionType) and not function.__closure__ and function.__code__.co_name == name
    return function if usual else None
