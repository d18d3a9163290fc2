"""How a value is made of tensors and constants, in a form that compiled code can carry.

found = []
spec = take_apart(value, found)      torch.compile can trace this: `found` gets the tensors in it
exchanged(value, [...])              and this: the same value with other tensors in it
Outline(spec).fill(found)            the same value again, of these or other tensors
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tenterhook.values.tree import Omitted

Spec = Any  # the dtype of a tensor; a constant with its type; a class, its keys and the specs of its parts
_PLAIN = (tuple, list, dict, OrderedDict)


def take_apart(value: Any, found: list[Tensor]) -> Spec:
    """How a value is made. Its tensors are put into a list."""
    if isinstance(value, Tensor):
        found.append(value)
        return value.dtype
    cls = type(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return ("constant", cls, value)
    if isinstance(value, (tuple, list)) and (cls in _PLAIN or hasattr(cls, "_fields")):
        return (cls, (), tuple([take_apart(part, found) for part in value]))
    if isinstance(value, dict) and (cls in _PLAIN or dataclasses.is_dataclass(cls)):
        return (cls, tuple(value.keys()), tuple([take_apart(part, found) for part in value.values()]))
    if dataclasses.is_dataclass(cls):
        names = tuple([field.name for field in dataclasses.fields(value)])
        return (cls, names, tuple([take_apart(getattr(value, name), found) for name in names]))
    return ("other", cls)


def can_exchange(spec: Spec) -> bool:
    """Whether `exchanged` can make such a value anew; torch.compile can trace this, too."""
    if isinstance(spec, torch.dtype) or spec[0] == "constant" or spec[0] == "other":
        return True
    cls = spec[0]
    is_known = issubclass(cls, dict) or not dataclasses.is_dataclass(cls)
    return is_known and all([can_exchange(part) for part in spec[2]])


def exchanged(value: Any, new: list[Tensor]) -> Any:
    """The same structure with other tensors in it, taken from the front of a list; torch.compile can trace this."""
    if isinstance(value, Tensor):
        return new.pop(0)
    cls = type(value)
    if isinstance(value, (tuple, list)) and (cls in _PLAIN or hasattr(cls, "_fields")):
        parts = [exchanged(part, new) for part in value]
        return cls(*parts) if hasattr(cls, "_fields") else cls(parts)
    if isinstance(value, dict) and (cls in _PLAIN or dataclasses.is_dataclass(cls)):
        content = {key: exchanged(part, new) for key, part in value.items()}
        return cls(content) if cls in _PLAIN else cls(**content)
    return value


class Outline:
    """A value without its tensors."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.is_tensor = isinstance(spec, torch.dtype)
        self.dtypes = tuple(_dtypes(spec))
        self.others = sorted(_others(spec))  # the classes of what is not looked into

    def fill(self, leaves: Sequence[Tensor]) -> Any:
        """The value with these tensors in it."""
        return _fill(self._spec, iter(leaves))

    def stand_ins(self) -> list[Tensor]:
        """Empty tensors that can take the place of those in the value."""
        return [torch.empty(0, dtype=dtype, device="cpu") for dtype in self.dtypes]


def _fill(spec: Spec, leaves: Iterator[Tensor]) -> Any:
    if isinstance(spec, torch.dtype):
        return next(leaves)
    if spec[0] == "constant":
        return spec[2]
    if spec[0] == "other":
        return Omitted.of(spec[1])
    cls: Any = spec[0]
    keys, parts = spec[1:]
    made = [_fill(part, leaves) for part in parts]
    if not issubclass(cls, dict) and dataclasses.is_dataclass(cls):
        value: Any = object.__new__(cast(type, cls))
        for name, part in zip(keys, made, strict=True):
            object.__setattr__(value, name, part)  # the class may be frozen
        return value
    if issubclass(cls, dict):
        content = dict(zip(keys, made, strict=True))
        return cls(content) if cls in _PLAIN else cls(**content)
    return cls(*made) if hasattr(cls, "_fields") else cls(made)


def _dtypes(spec: Spec) -> Iterator[torch.dtype]:
    if isinstance(spec, torch.dtype):
        yield spec
    elif len(spec) == 3 and spec[0] != "constant":
        for part in spec[2]:
            yield from _dtypes(part)


def _others(spec: Spec) -> Iterator[str]:
    if not isinstance(spec, torch.dtype) and spec[0] == "other":
        yield spec[1].__name__
    elif not isinstance(spec, torch.dtype) and spec[0] != "constant":
        for part in spec[2]:
            yield from _others(part)
