"""Where a frame is: in whose forward, and by way of which helper functions.

Each frame carries a mark of ours, in `f_trace`, which Python uses only while it is traced: where the frame is, and
how often each name was assigned in this call of the module. It goes when the frame goes, so that nobody has to say
when a call has ended, be it by an exception.
"""

import contextlib
import ctypes
import inspect
import itertools
import re
import sys
import types
from collections import UserDict
from collections.abc import Container, Iterable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tenterhook.inside.held import Held
from tenterhook.inside.names import spots
from tenterhook.platform.autograd import graph_task, jvp_enabled, saves_hooked
from tenterhook.platform.bytecode import COMPREHENSIONS
from tenterhook.platform.checkpoints import Again, checkpoint_of
from tenterhook.platform.frames import (
    CALLS,
    LOCALS_ARE_COPIED,
    empty_snapshot,
    first_argument,
    locals_of,
    read_variable,
)

_OURS = str(Path(__file__).parents[1] / "_")[:-1]
_TORCH = re.escape(str(Path(torch.__file__).parent / "_")[:-1])
_CALLING = ("_wrapped_call_impl", "_call_impl", "inner", "_slow_forward")  # the functions there that do
# Torch's code between an operation and who asked for it, which hands the result on as it is.
_hands_on = re.compile(_TORCH + r"(?:overrides|_jit_internal|_ops|_tensor|_library/custom_ops)\.py").fullmatch
# The same, and what else of torch is no part of a name.
_PLUMBING = "utils _dynamo _jit_internal overrides _tensor _ops _library autograd amp jit nn/modules/module nn/parallel"
_PLUMBING += " distributed _functorch _compile fx _vmap_internals"
_is_plumbing = re.compile(_TORCH + rf"(?:{'|'.join(_PLUMBING.split())})\b").match
_handler = torch.overrides.handle_torch_function.__code__
# What a call may give that has not run by then: where its frame is.
RUN_LATER = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
keys = itertools.count()


class Call(NamedTuple):
    """One call of a module, or of a function that is none."""

    number: int
    counts: dict[str, int]  # by name: how often it was assigned
    context: object = None  # whether gradients and the like were on, where that matters


class Where:
    """Where a frame is, as one session sees it, and what was assigned there so far."""

    __slots__ = ("__weakref__", "_held", "call", "growing", "is_followed", "is_within", "looked_at", "owner", "prefix")

    def __init__(self, owner: Any, prefix: str, call: Call) -> None:
        self.owner = owner
        self.prefix = prefix
        self.call = call
        self.is_followed = False  # whether its variables are looked after
        self.looked_at = -1  # the place in its code where they last were
        self.growing: set[str] = set()  # those that hold a list or the like, which changes by itself
        self.is_within: bool | None = None  # whether one that is wanted runs, this or one around it; None: not known
        self._held: Held | None = None

    @property
    def held(self) -> Held:
        """What its variables are known to hold."""
        if self._held is None:
            self._held = Held()
        return self._held

    def copy(self) -> "Where":
        """The same, with counts of its own: for what runs again."""
        return Where(self.owner, self.prefix, self.call._replace(counts=dict(self.call.counts)))

    def within(self, part: str) -> "Where":
        """The same in a helper function."""
        return Where(self.owner, f"{self.prefix}/{part}", self.call)


NOWHERE = Where(None, "", Call(0, {}))
_NO_MARK = object()


class _Mark:
    """What a frame carries: where it is, for each session that looks into it."""

    __slots__ = ("__weakref__", "of", "seen")

    def __init__(self) -> None:
        self.of: dict[int, Where] = {}
        self.seen: dict[int, int] = {}  # by session: see `Frames.see`

    def __call__(self, frame: object, event: str, argument: object) -> "_Mark":
        return self  # a debugger that starts here calls it


def mark_of(frame: Any) -> object:
    """What a frame carries, and no other does; an object of no frame's where a debugger needs the place."""
    mark = frame.f_trace
    if mark is None and sys.gettrace() is None:  # else it may be about to put its own there
        mark = frame.f_trace = _Mark()
    return mark if type(mark) is _Mark else _NO_MARK


class Frames:
    """Where frames are, for one session."""

    changes = False  # whether the session changes values
    scope: Any = None  # the session's, which knows in which backward pass it was opened, if any

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.key = next(keys)  # larger than that of any session before
        self._modules = {id(module) for module in modules}
        self._functions: dict[types.CodeType, Any] = {}
        self._traced: dict[Any, Where] = {}  # those that a debugger has marked
        self.looks = 0  # how often it has turned out that there is more to look after
        self._origins: WeakKeyDictionary[Any, Where] = WeakKeyDictionary()  # by checkpoint: where it was met
        # By the id of the owner, and the method if that was called from outside: how many there were, as far as known.
        self._calls: dict[tuple[int, str], int] = {}

    def add_function(self, owner: Any) -> None:
        """A function that is no module, of which the calls count."""
        self._functions.update(dict.fromkeys(owner.codes, owner))

    def called(self, module: nn.Module, frame: Any) -> None:
        """A module is about to be called, by a frame of torch's."""
        if frame.f_code.co_filename == CALLS:
            self._mark(frame, Where(module, "", self.new_call(module)))

    def returned(self, output: Any, frame: Any) -> None:
        """A module's call, by a frame of torch's, gave a coroutine or generator: it runs later, as a part of that."""
        later, call = getattr(output, RUN_LATER[type(output)]), self._known(frame)
        if later is not None and call is not None and self.is_new(later):
            self._mark(later, self._below(later, call))

    def new_call(self, owner: Any, method: str = "") -> Call:
        """One more call of a module or function, or of a method by somebody else, unless a checkpoint runs again."""
        number = self._calls.get((id(owner), method), 0)
        if self.scope is None or graph_task() == self.scope.task:
            self._calls[id(owner), method] = number + 1
        return Call(number, {}, context() if self.changes else None)

    def _call_of(self, method: str, owner: Any, frame: Any) -> Call:
        """The call of a module in which a frame runs one of its methods, which another module has called."""
        while (frame := frame.f_back) is not None:
            where = self._known(frame) or (self.where(frame) if checkpoint_of(frame) is not None else NOWHERE)
            if where.owner is owner:
                return where.call
        return self.new_call(owner, method)

    def is_new(self, frame: Any) -> bool:
        """Whether nothing was seen in this frame so far."""
        mark = frame.f_trace
        return self.key not in mark.of if type(mark) is _Mark else frame not in self._traced

    def see(self, frame: Any) -> None:
        """The variables of all frames around this one have been looked at."""
        mark = mark_of(frame)
        if type(mark) is _Mark:
            mark.seen[self.key] = self.looks

    def is_seen(self, frame: Any) -> bool:
        """Whether those around it have been looked at while it runs: they have been waiting for it since."""
        mark = frame.f_trace
        return type(mark) is _Mark and mark.seen.get(self.key) == self.looks

    def where(self, frame: Any) -> Where:
        """Where a frame is; NOWHERE if in no forward of the model's."""
        waiting = []  # for what the frames above them say
        above = self._known(frame)
        while above is None:
            above = self._by_itself(frame)
            if above is None:
                waiting.append(frame)
                frame = _above(frame)
                above = self._known(frame)
            else:
                self._mark(frame, above)
        for frame in reversed(waiting):
            above = self._below(frame, above)
            self._mark(frame, above)
        return above

    def is_within(self, frame: Any, owners: Container[int]) -> bool:
        """Whether a frame, or one around it, is in one of these, which are the same every time."""
        where = self.where(frame)
        if where.is_within is None and where is not NOWHERE:
            around = [where]
            while (frame := frame.f_back) is not None:
                around.append(self._known(frame) or NOWHERE)
            where.is_within = any(id(one.owner) in owners for one in around)
        return bool(where.is_within)

    def _known(self, frame: Any) -> Where | None:
        mark = frame.f_trace
        return mark.of.get(self.key) if type(mark) is _Mark else self._traced.get(frame)

    def _mark(self, frame: Any, where: Where) -> None:
        if where is NOWHERE:
            return
        mark = mark_of(frame)
        if type(mark) is _Mark:
            mark.of[self.key] = where
            return
        for other in [other for other in self._traced if not is_running(other)]:
            del self._traced[other]
        self._traced[frame] = where

    def _by_itself(self, frame: Any) -> Where | None:
        """Where a frame is, if that can be said without the frames above it."""
        code, back = frame.f_code, _above(frame)
        function = self._functions.get(code) if self._functions else None
        if function is not None and function.is_run_by(frame):
            return Where(function, "", self.new_call(function))
        if back is None or (code.co_filename.startswith(_OURS) and not _is_transparent(code)):
            return NOWHERE
        one = checkpoint_of(frame)
        if one is not None and one[1] and (origin := self._origins.get(one[0])) is not None:
            return origin.copy()
        if code.co_filename == CALLS and code.co_name in _CALLING:
            owner = read_variable(frame, "self")
        elif back.f_code.co_filename == CALLS:
            told = self._known(back)
            owner = read_variable(back, "self") if told is None else told.owner
            owner = owner if _is_forward(code, owner) else None
            if told is not None and owner is not None:
                return Where(owner, _prefix(code, owner), told.call)
        else:
            return None
        if id(owner) not in self._modules:
            return None
        return Where(owner, _prefix(code, owner), self.new_call(owner))

    def _below(self, frame: Any, above: Where) -> Where:
        """Where a frame is, from where the one above it is."""
        code, owner = frame.f_code, _self_of(frame)
        is_known = owner is not None and id(owner) in self._modules
        if code.co_filename == CALLS:
            return above
        is_forward = is_known and _is_forward(code, owner)
        if is_known and above.owner is not owner:  # called from outside, not by way of the module's call
            call = self.new_call(owner) if is_forward else self._call_of(code.co_name, owner, frame)
            above = Where(owner, "", call)
        if is_forward and not _is_decorator(code, owner):
            return Where(owner, "", above.call)  # by its name: by a wrapper, a subclass, another module
        part = _part(code, owner)
        where = above.within(part) if part and above is not NOWHERE else above
        one = checkpoint_of(frame)
        if one is not None and where is not NOWHERE:  # its recomputation will happen in no forward
            self._origins[one[0]] = where.copy()
        return where


def context() -> object:
    """What decides how a change is computed: gradients, checkpoints, autograd functions, autocast."""
    casts = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), saves_hooked(False), jvp_enabled(), casts


def asker(frame: Any) -> Any:
    """The frame whose call a function mode was told of, behind torch's own between it and the mode."""
    while True:
        code = frame.f_code
        if code is _handler:
            frame = frame.f_back.f_back
        elif _passes_on(code.co_filename, code.co_name) or (
            code.co_name == "__torch_function__" and not spots(code).keeps(frame.f_lasti)  # a mode of the user's
        ):
            frame = frame.f_back
        else:
            return frame


def _above(frame: Any) -> Any:
    """The frame that called another, as far as names go."""
    back = frame.f_back
    return back.f_back if frame.f_code is _handler else back  # past the function that stands for the operation


def is_running(frame: Any) -> bool:
    """Whether a frame is among those that run now, in this thread."""
    other: Any = sys._getframe(1)
    while other is not None and other is not frame:
        other = other.f_back
    return other is not None


def _is_transparent(code: types.CodeType) -> bool:
    """Whether code of ours runs the model's: an operation, or a checkpoint's function."""
    return code.co_name == "__torch_function__" or code is Again.__call__.__code__


@lru_cache(maxsize=4096)
def _passes_on(file: str, name: str) -> bool:
    return (name == "__torch_function__" and file.startswith(_OURS)) or _hands_on(file) is not None


@lru_cache(maxsize=4096)
def is_plumbing(file: str, name: str) -> bool:
    """Whether code holds no values of the model's, by where it is and what it is called."""
    return name == "__torch_function__" or file.startswith(_OURS) or _is_plumbing(file) is not None


_NO_STRUCTURES = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size))


def variables(frame: Any, names: Iterable[str], growing: set[str]) -> list[tuple[str, Any]]:
    """The tensors, and structures of such, that some local variables, and attributes of such, hold now.

    `growing` gets the names of those that hold something to which others may be added.
    """
    values = locals_of(frame)
    found = []
    for name in names:
        value = values.get(name)
        if value is None and "." in name:
            thing, *path = name.split(".")
            value = _stored_in(values.get(thing), path)
        if isinstance(value, Tensor):
            found.append((name, value))
        elif type(value) not in _NO_STRUCTURES:
            if isinstance(value, list | dict | UserDict) or is_dataclass(value):
                growing.add(name)
            if holds_tensors(value):
                found.append((name, value))
    empty_snapshot(frame, values)
    return found


def attributes(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """What some attributes of a module are now, by how its forward calls them: `self.h`."""
    return {name: _stored_in(module, name.split(".")[1:]) for name in names}


def _stored_in(thing: Any, path: Iterable[str]) -> Any:
    """An attribute of an attribute, if it is nothing but stored there: no code of the model's runs to get it."""
    for name in path:
        try:
            own = object.__getattribute__(thing, "__dict__")
        except AttributeError:
            own = {}
        tables = (
            (own.get("_buffers"), own.get("_parameters"), own.get("_modules")) if isinstance(thing, nn.Module) else ()
        )
        found = next((table[name] for table in (own, *tables) if type(table) is dict and name in table), None)
        if found is None:
            slots = (vars(cls).get(name) for cls in type(thing).__mro__)
            slot = next((slot for slot in slots if isinstance(slot, types.MemberDescriptorType)), None)
            with contextlib.suppress(AttributeError):
                found = None if slot is None else slot.__get__(thing)
        thing = found
    return thing


def arguments(frame: Any) -> dict[str, Any]:
    """What a module's forward was given, by name; nothing where torch did not call it."""
    code, back = frame.f_code, frame.f_back
    if back is None or back.f_code.co_filename != CALLS:
        return {}
    positional, named = read_variable(back, "args") or (), read_variable(back, "kwargs") or {}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_method = first_argument(frame) is read_variable(back, "self")
    return {**dict.fromkeys(names), **dict(zip(names[is_method:], positional, strict=False)), **named}


def holder(frame: Any, value: Tensor, likely: list[str]) -> str | None:
    """What holds a tensor that was written into: one of the likely places, else a variable of the function."""
    values = locals_of(frame)
    names = [*likely, *(name for name, other in values.items() if other is value)]
    found = next((name for name in names if _look_in(values, frame.f_globals, name) is value), None)
    empty_snapshot(frame, values)
    return found


def has_variable(code: types.CodeType, name: str) -> bool:
    """Whether a function has a variable with a name, or with the first part of it."""
    return name.partition(".")[0] in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def place_of(frame: Any, name: str) -> object:
    """What a name in a function means, whatever others call it: an attribute of one object, or a variable."""
    thing, _, last = name.rpartition(".")
    values = locals_of(frame)
    place = (id(_look_in(values, frame.f_globals, thing)), last) if thing else last
    empty_snapshot(frame, values)
    return place


def _look_in(values: Any, others: Any, path: str) -> Any:
    first, *attributes = path.split(".")
    return _stored_in(values.get(first, others.get(first)), attributes)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple, list, mapping or dataclass with one."""
    if type(value) in _NO_STRUCTURES:  # the most of them, at the least cost
        return False
    if isinstance(value, Tensor):
        return True
    if isinstance(value, UserDict):
        value = _stored_in(value, ("data",))
    if isinstance(value, dict):
        return any(isinstance(part, Tensor) for part in dict.values(value))  # whatever its own says
    if isinstance(value, tuple | list):
        return any(isinstance(part, Tensor) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return any(isinstance(getattr(value, field.name, None), Tensor) for field in fields(value))


def marked(mark: object) -> Any:
    """The frame with a mark, if it runs in this thread."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_trace is not mark:
        frame = frame.f_back
    return frame


def rebind(frame: Any, name: str, value: Any) -> None:
    """Give a variable of a function that is running another value, as a debugger does."""
    values = frame.f_locals
    values[name] = value
    if LOCALS_ARE_COPIED:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    empty_snapshot(frame, values)


def is_call_of(frame: Any, path: str | None, code: types.CodeType) -> bool:
    """Whether what a frame calls, as it is written there, is Python code and nothing around it, such as a cache."""
    if path is None:
        return False
    first, *attributes = path.split(".")
    values = locals_of(frame)
    thing = values.get(first, frame.f_globals.get(first))
    empty_snapshot(frame, values)
    for name in attributes:
        children = thing._modules if isinstance(thing, nn.Module) else {}
        thing = children[name] if name in children else inspect.getattr_static(thing, name, None)
    if not isinstance(thing, types.FunctionType | types.MethodType | staticmethod | classmethod):
        thing = inspect.getattr_static(type(thing), "__call__", None)
    return getattr(getattr(thing, "__func__", thing), "__code__", None) is code


def runs_module(frame: Any) -> bool:
    """Whether a frame runs a method of a module."""
    return isinstance(first_argument(frame), nn.Module)


def _self_of(frame: Any) -> Any:
    """The module whose method a frame runs."""
    code = frame.f_code
    if not code.co_argcount or not (code.co_varnames[0] == "self" or code.co_name == "forward"):
        return None
    first = first_argument(frame)
    return first if isinstance(first, nn.Module) else None


def _is_forward(code: types.CodeType, owner: Any) -> bool:
    """Whether code is a module's forward, whatever its name."""
    if code.co_name == "forward":
        return True
    own = getattr(owner, "forward", None)
    return getattr(getattr(own, "__func__", own), "__code__", None) is code


def _is_decorator(code: types.CodeType, owner: Any) -> bool:
    """Whether code stands for a module's forward, and says what that is, as with functools.wraps."""
    own = getattr(owner, "forward", None) if code.co_name != "forward" else None
    return hasattr(own, "__wrapped__") and getattr(own, "__code__", None) is code


def _prefix(code: types.CodeType, owner: Any) -> str:
    return f"/{code.co_name.strip('<>')}" if _is_decorator(code, owner) else ""


def _part(code: types.CodeType, owner: Any) -> str:
    """What a function adds to a name."""
    name = code.co_name
    if name in COMPREHENSIONS or is_plumbing(code.co_filename, name):
        return ""
    if name == "forward":  # of a module that is not in the model, or of an autograd function
        return type(owner).__name__ if owner is not None else code.co_qualname.split(".")[-2:][0]
    return name.strip("<>")
