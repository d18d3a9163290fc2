"""What variables hold: tensors, and structures of such."""

import contextlib
import types
from collections import UserDict
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.platform.frames import empty_snapshot, locals_of

PLAIN = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size))  # no tensors


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple, list, mapping or dataclass with one."""
    if type(value) in PLAIN:  # the most of them, at the least cost
        return False
    if isinstance(value, Tensor):
        return True
    if isinstance(value, UserDict):
        value = stored_in(value, ("data",))
    if isinstance(value, dict):
        return any(isinstance(part, Tensor) for part in dict.values(value))  # whatever its own says
    if isinstance(value, tuple | list):
        return any(isinstance(part, Tensor) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return any(isinstance(getattr(value, field.name, None), Tensor) for field in fields(value))


def holder(frame: Any, value: Tensor, likely: Iterable[str]) -> str | None:
    """What holds a tensor that was written into: one of the likely places, else a variable of the function."""
    values = locals_of(frame)
    names = [*likely, *(name for name, other in values.items() if other is value and name[0] != ".")]
    found = next((name for name in names if _look_in(values, frame.f_globals, name) is value), None)
    empty_snapshot(frame, values)
    return found


def look_up(frame: Any, path: str) -> Any:
    """What a name in a function means now: `y`, `self.h`."""
    values = locals_of(frame)
    found = _look_in(values, frame.f_globals, path)
    empty_snapshot(frame, values)
    return found


def _look_in(values: Any, others: Any, path: str) -> Any:
    first, *attributes = path.split(".")
    return stored_in(values.get(first, others.get(first)), attributes)


def stored_in(thing: Any, path: Iterable[str]) -> Any:
    """An attribute of an attribute, if it is nothing but stored there: no code of the model's runs to get it."""
    for name in path:
        try:
            own = object.__getattribute__(thing, "__dict__")
        except AttributeError:
            own = {}
        is_module = isinstance(thing, nn.Module)
        tables = (own.get("_buffers"), own.get("_parameters"), own.get("_modules")) if is_module else ()
        found = next((table[name] for table in (own, *tables) if type(table) is dict and name in table), None)
        if found is None:
            slots = (vars(cls).get(name) for cls in type(thing).__mro__)
            slot = next((slot for slot in slots if isinstance(slot, types.MemberDescriptorType)), None)
            with contextlib.suppress(AttributeError):
                found = None if slot is None else slot.__get__(thing)
        thing = found
    return thing
