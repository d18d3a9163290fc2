"""The kinds of containers: one table for everybody who looks into values.

    kind = kind_of(value)              its entry in KINDS, or None for what is no container
    kind.parts((a, b))                 [(0, a), (1, b)]: what it holds, by position or name
    kind.like((a, b), [c, d])          (c, d): one of the same type with other parts
    kind.with_part([a, b], 0, c)       another part: written into it where that can be, else into a new one

A new kind is one class with `fits`, `parts` and `like`, and one entry in KINDS. If a module may change the value
it is given, so that its caller sees it, it also has `can_change` and writes in `with_part`.
"""

import copy
import dataclasses
import functools
from collections import UserDict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tenterhook.platform import pytree
from tenterhook.platform.slots import slots_of
from tenterhook.values.inputs import Inputs

Leaf = int | str
Parts = list[tuple[Leaf, Any]]
Content = dict[Any, Any]

_CONSTANTS = (str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size)


def is_constant(value: Any) -> bool:
    """Whether a value is immutable and cannot hold a tensor."""
    return value is None or isinstance(value, _CONSTANTS)


class Kind:
    """How the values of one kind are taken apart and made anew."""

    can_change = False  # in place
    is_object = False  # its parts are attributes, and there may be others that are none
    parts_move = False  # from one position to another
    has_keys = False  # of its own, so that an integer need not be a position

    def fits(self, cls: type) -> bool:
        """Whether values of a class are of this kind."""
        raise NotImplementedError

    def parts(self, value: Any) -> Parts:
        """What a value holds, by position or name."""
        raise NotImplementedError

    def like(self, value: Any, parts: list[Any]) -> Any:
        """A new value of the same type with other parts; some exception where somebody's class does not allow it."""
        raise NotImplementedError

    def with_part(self, value: Any, key: Leaf, part: Any) -> Any:
        """The value with another part in it: itself where it can change, else a new one."""
        return self.like(value, [part if known == key else child for known, child in self.parts(value)])

    def content(self, value: Any) -> Content:
        """What is in it now, for `change`; the attributes in its `__dict__` are not among it."""
        return dict(self.parts(value))

    def change(self, value: Any, before: Content, now: Content) -> None:
        """Do to a value what made one content of another; what is the same in both stays as it is."""
        for key, part in now.items():
            if key not in before or before[key] is not part:
                self.with_part(value, key, part)


class _Tuple(Kind):
    def fits(self, cls: type) -> bool:
        return cls is tuple

    def parts(self, value: Any) -> Parts:
        return list(enumerate(value))

    def like(self, value: Any, parts: list[Any]) -> Any:
        return tuple(parts)


class _List(_Tuple):
    can_change = parts_move = True

    def fits(self, cls: type) -> bool:
        return cls is list

    def like(self, value: Any, parts: list[Any]) -> Any:
        return list(parts)

    def with_part(self, value: Any, key: Leaf, part: Any) -> Any:
        value[key] = part
        return value

    def change(self, value: Any, before: Content, now: Content) -> None:
        old, new = list(before.values()), list(now.values())
        if len(old) > len(new) or any(a is not b for a, b in zip(old, new, strict=False)):
            value.clear()
            old = []
        for part in new[len(old) :]:
            value.append(part)


class _Deque(_List):
    def fits(self, cls: type) -> bool:
        return issubclass(cls, deque)

    def like(self, value: Any, parts: list[Any]) -> Any:
        made = copy.copy(value)
        made.clear()
        made.extend(parts)
        return made


class _NamedTuple(Kind):
    def fits(self, cls: type) -> bool:
        return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")

    def parts(self, value: Any) -> Parts:
        return list(zip(value._fields, value, strict=True))

    def like(self, value: Any, parts: list[Any]) -> Any:
        return value._make(parts)


class _Mapping(Kind):
    """Any other mapping: one that cannot be written into."""

    has_keys = True

    def fits(self, cls: type) -> bool:
        return issubclass(cls, Mapping)

    def parts(self, value: Any) -> Parts:
        return list(value.items())

    def like(self, value: Any, parts: list[Any]) -> Any:
        if type(value) in pytree.registered:
            return _as_registered(value, parts)
        raise TypeError("a copy of an unknown mapping may share what it holds with the original")


class _MutableMapping(_Mapping):
    can_change = True

    def fits(self, cls: type) -> bool:
        return issubclass(cls, MutableMapping)

    def with_part(self, value: Any, key: Leaf, part: Any) -> Any:
        value[key] = part
        return value

    def change(self, value: Any, before: Content, now: Content) -> None:
        update(value, before, now)
        if list(now) != [*(key for key in before if key in now), *(key for key in now if key not in before)]:
            _reorder(value, now)


class _CopiedMapping(_MutableMapping):
    """Kinds of dicts, ModelOutput among them: a shallow copy has content of its own."""

    def fits(self, cls: type) -> bool:
        return issubclass(cls, (dict, UserDict))

    def like(self, value: Any, parts: list[Any]) -> Any:
        if type(value) in pytree.registered:
            return _as_registered(value, parts)
        return _copied_with(value, parts)


class _Inputs(_Mapping):
    """The arguments of a call, which nobody but us holds."""

    def fits(self, cls: type) -> bool:
        return issubclass(cls, Inputs)

    def like(self, value: Any, parts: list[Any]) -> Any:
        return _copied_with(value, parts)


class _Dict(_MutableMapping):
    def fits(self, cls: type) -> bool:
        return cls is dict

    def like(self, value: Any, parts: list[Any]) -> Any:
        return dict(zip(value, parts, strict=True))


class _Object(Kind):
    can_change = is_object = True

    def content(self, value: Any) -> Content:
        return slots_of(value)

    def change(self, value: Any, before: Content, now: Content) -> None:
        for name in (name for name, x in now.items() if before.get(name, now) is not x):
            object.__setattr__(value, name, now[name])  # the class may be a frozen dataclass


class _Dataclass(_Object):
    def fits(self, cls: type) -> bool:
        return dataclasses.is_dataclass(cls)

    def parts(self, value: Any) -> Parts:
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]

    def like(self, value: Any, parts: list[Any]) -> Any:
        made = _copied(value)
        for (name, _), part in zip(self.parts(value), parts, strict=True):
            object.__setattr__(made, str(name), part)
        return made

    def with_part(self, value: Any, key: Leaf, part: Any) -> Any:
        object.__setattr__(value, str(key), part)
        return value


class _Registered(_Object):
    """Somebody's class that torch's pytree knows, and whose parts are in its attributes."""

    def fits(self, cls: type) -> bool:
        return cls in pytree.registered and not issubclass(cls, (list, tuple))

    def parts(self, value: Any) -> Parts:
        parts = pytree.parts_of(value)
        return parts if _holds_openly(value, parts) else []

    def like(self, value: Any, parts: list[Any]) -> Any:
        return _as_registered(value, parts)

    def with_part(self, value: Any, key: Leaf, part: Any) -> Any:
        if not hasattr(value, str(key)):
            return super().with_part(value, key, part)
        object.__setattr__(value, str(key), part)
        return value


class _OwnTuple(_Tuple):
    """Somebody's own kind of tuple."""

    def fits(self, cls: type) -> bool:
        return issubclass(cls, tuple)

    def parts(self, value: Any) -> Parts:
        return pytree.parts_of(value) if type(value) in pytree.registered else list(enumerate(value))

    def like(self, value: Any, parts: list[Any]) -> Any:
        if type(value) in pytree.registered:
            return _as_registered(value, parts)
        return _with_attributes(self.of(type(value), parts), value, parts)

    def of(self, cls: Any, parts: list[Any]) -> Any:
        """A new one with some parts."""
        return cls(parts)


class _OwnList(_OwnTuple, _List):
    """Somebody's own kind of list."""

    def fits(self, cls: type) -> bool:
        return issubclass(cls, list)

    def of(self, cls: Any, parts: list[Any]) -> Any:
        try:
            return cls(parts)
        except TypeError:  # its constructor wants something else
            made = cls.__new__(cls)
            list.extend(made, parts)
            return made


# The first that fits is the kind of a value.
KINDS: tuple[Kind, ...] = (
    _Tuple(),
    _List(),
    _Dict(),
    _Inputs(),
    _CopiedMapping(),
    _MutableMapping(),
    _Mapping(),
    _NamedTuple(),
    _Deque(),
    _Registered(),
    _Dataclass(),
    _OwnList(),
    _OwnTuple(),
)


def kind_of(value: Any) -> Kind | None:
    """The kind of container that a value is, if it is one."""
    cls: Any = type(value)
    return _kind_of(cls, cls in pytree.registered)


@functools.lru_cache(maxsize=1024)
def _kind_of(cls: type, is_registered: bool) -> Kind | None:
    """The kind of the values of a class, which may change when somebody registers it with torch."""
    return next((kind for kind in KINDS if kind.fits(cls)), None)


def children(value: Any) -> Parts:
    """What a container holds, by position or name; [] for what is no container."""
    cls: Any = type(value)
    if cls is tuple or cls is list:  # most are
        return list(enumerate(value))
    kind = _kind_of(cls, cls in pytree.registered)
    return [] if kind is None else kind.parts(value)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object has in its `__dict__`, unless that is where its content is."""
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None or attributes is value else dict(attributes)


def update(value: Any, before: Content, now: Content) -> None:
    """Do to a dict what came, went or became another thing: that alone, for others may have changed the rest."""
    for key in before.keys() - now.keys():
        value.pop(key, None)
    for key, x in now.items():
        if key not in before or before[key] is not x:
            value[key] = x


def _reorder(value: Any, keys: Content) -> None:
    """Put some keys of a dict in their order, behind those that others have added."""
    content = dict(value)
    value.clear()
    for key in (*(key for key in content if key not in keys), *(key for key in keys if key in content)):
        value[key] = content[key]


def _holds_openly(value: Any, parts: Parts) -> bool:
    """Whether somebody's class has its parts in its attributes, or in containers there.

    If they are in other objects, as in those of a cache, what a module does to them could not be done to the caller's.
    """
    attributes = [*(attributes_of(value) or {}).values(), *slots_of(value).values()]
    own = [part for _, part in parts]
    if {id(part) for part in own} <= set(map(id, attributes)):  # most classes are that plain
        return True
    inside = list(_within(attributes))
    wanted = {id(x) for x in _within(own) if not _is_collection(x)}
    has_objects = any(not isinstance(x, Tensor) and kind_of(x) is None for x in inside)
    return not has_objects or wanted <= set(map(id, inside))


def _is_collection(value: Any) -> bool:
    kind = kind_of(value)
    return kind is not None and not kind.is_object


def _within(things: Iterable[Any], also_registered: bool = False) -> Iterator[Any]:
    """Some things that are no constants, then what is in them, each once."""
    todo, known = deque(things), dict[int, Any]()
    while todo:
        x = todo.popleft()
        if id(x) in known or is_constant(x):
            continue
        known[id(x)] = x
        yield x
        if also_registered or not isinstance(kind_of(x), _Registered):
            todo.extend(part for _, part in children(x))


def _as_registered(value: Any, parts: list[Any]) -> Any:
    return _with_attributes(pytree.made_of(parts, value), value, parts)


def _copied(value: Any) -> Any:
    """A shallow copy, which keeps the type without running `__init__` again."""
    made = copy.copy(value)
    if made is value or type(made) is not type(value):
        raise TypeError("its copy is no copy")
    if getattr(value, "__dict__", None) is value:  # what is in it is also an attribute
        made.__dict__ = made
    return made


def _copied_with(value: Any, parts: list[Any]) -> Any:
    """A shallow copy of a mapping with other values."""
    made = _copied(value)
    for key, part in zip(value, parts, strict=True):
        made[key] = part
    return made


def _with_attributes(made: Any, value: Any, parts: list[Any]) -> Any:
    """A new container with the attributes of another; those that are its parts, or hold tensors, are its own."""
    if not (attributes := getattr(value, "__dict__", None)):
        return made
    own = {id(old): new for (_, old), new in zip(children(value), parts, strict=True)}
    for name, attribute in attributes.items():
        if id(attribute) in own:
            vars(made)[name] = own[id(attribute)]
        elif is_constant(attribute) or not _holds_tensors(attribute):
            vars(made)[name] = attribute
    return made


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(x, Tensor) for x in _within([value], also_registered=True))
