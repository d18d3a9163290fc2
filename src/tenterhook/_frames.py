"""Where a frame is: in whose forward, and by way of which helper functions.

Each frame carries a mark of ours, in `f_trace`, which Python uses only while it is traced: where the frame is, and
how often each name was assigned in this call of the module. It goes when the frame goes, so that nobody has to say
when a call has ended, be it by an exception.
"""

import itertools
import re
import sys
import types
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._names import COMPREHENSIONS

_OURS = str(Path(__file__).parent / "_")[:-1]
_TORCH = re.escape(str(Path(torch.__file__).parent / "_")[:-1])
CALLS = nn.modules.module.__file__  # where a module's call leads to its forward
# Torch's code between an operation and who asked for it, which hands the result on as it is.
_hands_on = re.compile(_TORCH + r"(?:overrides|_jit_internal|_ops|_tensor|_library/custom_ops)\.py").fullmatch
# The same, and what else of torch is no part of a name.
_PLUMBING = "utils _dynamo _jit_internal overrides _tensor _ops _library autograd amp jit nn/modules/module nn/parallel"
_PLUMBING += " distributed _functorch _compile fx _vmap_internals"
_is_plumbing = re.compile(_TORCH + rf"(?:{'|'.join(_PLUMBING.split())})\b").match
_handler = torch.overrides.handle_torch_function.__code__
_is_copy = sys.version_info < (3, 13)  # whether f_locals is one
_keys = itertools.count()


class Where:
    """Where a frame is, as one session sees it, and what was assigned there so far."""

    def __init__(self, owner: Any, prefix: str = "", counts: dict[str, int] | None = None) -> None:
        self.owner = owner
        self.prefix = prefix
        self.counts: dict[str, int] = {} if counts is None else counts  # by name, over one call of the owner
        self.is_followed = False  # whether its variables are looked after
        self.looked_at = -1  # the place in its code where they last were
        self.bound: dict[str, Any] = {}  # by variable: what it was bound to when last seen, referred to weakly

    def within(self, part: str) -> "Where":
        """The same in a helper function."""
        return Where(self.owner, f"{self.prefix}/{part}", self.counts)


NOWHERE = Where(None)


class _Mark:
    """What a frame carries: where it is, for each session that looks into it."""

    def __init__(self) -> None:
        self.of: dict[int, Where] = {}

    def __call__(self, frame: object, event: str, argument: object) -> "_Mark":
        return self  # a debugger that starts here calls it


class Frames:
    """Where frames are, for one session."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._key = next(_keys)
        self._modules = {id(module) for module in modules}
        self._functions: dict[types.CodeType, Any] = {}
        self._traced: dict[Any, Where] = {}  # those that a debugger has marked

    def add_function(self, owner: Any) -> None:
        """A function that is no module, of which the calls count."""
        self._functions.update(dict.fromkeys(owner.codes, owner))

    def is_new(self, frame: Any) -> bool:
        """Whether nothing was seen in this frame so far."""
        mark = frame.f_trace
        return self._key not in mark.of if type(mark) is _Mark else frame not in self._traced

    def where(self, frame: Any) -> Where:
        """Where a frame is; NOWHERE if in no forward of the model's."""
        mark = frame.f_trace
        if type(mark) is _Mark and (known := mark.of.get(self._key)) is not None:
            return known
        if frame in self._traced:
            return self._traced[frame]
        where = self._look_up(frame)
        if where is not NOWHERE:
            if mark is None:
                mark = frame.f_trace = _Mark()
            if type(mark) is _Mark:
                mark.of[self._key] = where
            else:
                self._traced[frame] = where
        return where

    def _look_up(self, frame: Any) -> Where:
        code, back = frame.f_code, frame.f_back
        if code in self._functions:
            return Where(self._functions[code])
        if code is _handler:
            back = back.f_back  # the function that stands for the operation
        if back is None or (code.co_filename.startswith(_OURS) and code.co_name != "__torch_function__"):
            return NOWHERE
        owner = _self_of(frame)
        is_known = owner is not None and id(owner) in self._modules
        if code.co_filename == CALLS:
            return Where(owner) if is_known else self.where(back)
        if is_known and code.co_name == "forward":
            if back.f_code.co_filename == CALLS:
                return Where(owner)
            above = self.where(back)  # called by its name: by a wrapper, by a subclass, by another module
            return Where(owner, "", above.counts if above.owner is owner else None)
        above = self.where(back)
        if is_known and above.owner is not owner:
            above = Where(owner)  # another method of the module, called from outside
        part = _part(code, owner)
        return above.within(part) if part and above is not NOWHERE else above


def asker(frame: Any) -> Any:
    """The frame whose call a function mode was told of, behind torch's own between it and the mode."""
    while True:
        code = frame.f_code
        if code is _handler:
            frame = frame.f_back.f_back
        elif _passes_on(code.co_filename, code.co_name):
            frame = frame.f_back
        else:
            return frame


def caller(frame: Any) -> Any:
    """The frame that called a module, from a frame inside that call."""
    while frame.f_code.co_filename == CALLS or frame.f_code.co_name == "__call__":
        frame = frame.f_back
    return frame


def is_running(frame: Any) -> bool:
    """Whether a frame is among those that run now, in this thread."""
    other: Any = sys._getframe(1)
    while other is not None and other is not frame:
        other = other.f_back
    return other is not None


@lru_cache(maxsize=4096)
def _passes_on(file: str, name: str) -> bool:
    return name == "__torch_function__" or _hands_on(file) is not None


@lru_cache(maxsize=4096)
def is_plumbing(file: str, name: str) -> bool:
    """Whether code holds no values of the model's, by where it is and what it is called."""
    return name == "__torch_function__" or file.startswith(_OURS) or _is_plumbing(file) is not None


def variables(frame: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """The tensors, and tuples and lists of such, that some local variables hold now."""
    values = frame.f_locals
    found = [(name, values[name]) for name in names if name in values and holds_tensors(values[name])]
    _let_go(frame, values)
    return found


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple or list with one."""
    return isinstance(value, Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value)
    )


def _let_go(frame: Any, values: Any) -> None:
    if _is_copy and frame.f_code.co_flags & 1:  # of a function; it would keep the variables alive
        values.clear()


def _self_of(frame: Any) -> Any:
    """The module whose method a frame runs."""
    code = frame.f_code
    if not code.co_argcount or not (code.co_varnames[0] == "self" or code.co_name == "forward"):
        return None
    values = frame.f_locals
    first = values.get(code.co_varnames[0])
    _let_go(frame, values)
    return first if isinstance(first, nn.Module) else None


def _part(code: types.CodeType, owner: Any) -> str:
    """What a function adds to a name."""
    name = code.co_name
    if name in COMPREHENSIONS or is_plumbing(code.co_filename, name):
        return ""
    if name == "forward":  # of a module that is not in the model, or of an autograd function
        return type(owner).__name__ if owner is not None else code.co_qualname.split(".")[-2:][0]
    return name.strip("<>")
