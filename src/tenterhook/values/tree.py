"""Structured values: their tensors (the leaves), by path, and the same structure with other leaves.

    leaves((a, {"b": b}))             [((0,), a), ((1, "b"), b)]
    pick((a, {"b": b}), (1, "b"))     b
    put((a, {"b": b}), (1, "b"), c)   (a, {"b": c})
    rebuild(value, f)                 f(path, tensor) at every leaf; the containers keep their types

Tuples, lists, dicts, namedtuples, dataclasses, Hugging Face's ModelOutput, and types registered with
torch.utils._pytree, unless they hold their parts in objects of their own. Anything else is opaque: it is not looked
into, and `rebuild` puts a note in its place unless it is a plain constant, so that keeping a structure never keeps
what was not asked for.
"""

import copy
import copyreg
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tenterhook.errors import EditError

Leaf = int | str
Path = tuple[Leaf, ...]
Ids = tuple[int, ...]
_DEEPEST = 30  # a structure that is nested deeper makes itself anew
_CONSTANTS = (str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size)


def noted(value: Any) -> Any:
    """What a kept structure has in place of something that is no tensor: a constant itself, or a note."""
    return value if _is_constant(value) else Omitted(value)


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, _CONSTANTS)


class Omitted:
    """Stands for an object inside a kept structure that is no tensor and was therefore not kept."""

    def __init__(self, value: object) -> None:
        self.kind = type(value).__name__

    def __repr__(self) -> str:
        return f"<{self.kind}: not a tensor, not kept>"


def leaves(value: Any, path: Path = (), around: Ids = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a value, with its path. What is inside itself, in one `around` it, is not walked again."""
    if isinstance(value, Tensor):
        yield path, value
    elif len(path) < _DEEPEST and id(value) not in around and (parts := children(value)):
        around = (*around, id(value))
        for key, child in parts:
            if isinstance(child, Tensor):  # most are, and need no generator of their own
                yield (*path, key), child
            else:
                yield from leaves(child, (*path, key), around)


def pick(value: Any, path: Path) -> Any:
    """The part of a value at a path; LookupError where there is none."""
    for key in path:
        value = _child(value, key)
    return value


def put(value: Any, path: Path, part: Any) -> Any:
    """The same structure with another part at a path; what is beside the path stays what it is."""
    if not path:
        return part
    key, *rest = path
    parts = children(value)
    i = _position(value, parts, key)
    changed = [put(child, tuple(rest), part) if k == i else child for k, (_, child) in enumerate(parts)]
    try:
        return _like(value, changed)
    except Exception as error:
        raise TypeError(f"a {type(value).__name__} cannot be made anew with another {key!r} in it") from error


def rebuild(
    value: Any,
    change: Callable[[Path, Tensor], Any],
    path: Path = (),
    opaque: Callable[[Any], Any] = noted,
    around: dict[int, bool] | None = None,
) -> Any:
    """The same structure with `change(path, tensor)` in place of every tensor, `opaque(x)` of all else."""
    if isinstance(value, Tensor):
        return change(path, value)
    around = {} if around is None else around  # by id: whether it has been found inside itself
    if is_known := id(value) in around:
        around[id(value)] = True
    if is_known or len(path) >= _DEEPEST:
        return opaque(value)
    parts = children(value)
    if not parts:
        return value if _is_container(value) else opaque(value)
    around[id(value)] = False
    changed = [(key, rebuild(child, change, (*path, key), opaque, around)) for key, child in parts]
    is_inside_itself = around.pop(id(value))
    try:
        made = _like(value, [child for _, child in changed])
        return with_own(made, {id(value): made}, tuple(around)) if is_inside_itself else made
    except Exception:  # somebody's class, whose constructor or copy wants something else
        if opaque is unshared and not _have_same_leaves(value, dict(changed)):
            what = f"a {type(value).__name__} cannot be made anew with other tensors in it"
            raise EditError(f"{what}; what is beside it can be edited by its own address") from None
        return value if opaque in (itself, unshared) else dict(changed)


def itself(value: Any) -> Any:
    """For `rebuild`, as `opaque`: what cannot be looked into or made anew stays what it is. For live values."""
    return value


def unshared(value: Any) -> Any:
    """The same, where others must not share a changed tensor: one in what cannot be made anew is an EditError."""
    return value


def _have_same_leaves(value: Any, other: Any) -> bool:
    return all(a is b for (_, a), (_, b) in zip(leaves(value), leaves(other, (), (id(value),)), strict=True))


def with_own(value: Any, own: dict[int, Any], around: Ids = ()) -> Any:
    """A value with other things in it, by the ids of those whose place they take; written into it where that can be."""
    if id(value) in own:
        return own[id(value)]
    if isinstance(value, Tensor) or len(around) > _DEEPEST or id(value) in around:
        return value
    for key, child in children(value):
        if (new := with_own(child, own, (*around, id(value)))) is not child:
            with suppress(Exception):  # somebody's class, which cannot be made anew or refuses writes
                if isinstance(value, (list, deque, MutableMapping)):
                    value[key] = new  # type: ignore[index]
                elif dataclasses.is_dataclass(value):
                    object.__setattr__(value, str(key), new)
                else:
                    value = put(value, (key,), new)
    return value


def describe(value: Any) -> str:
    """A value in a few words: `8×32 float32`, `(2 leaves) tuple`."""
    if isinstance(value, Tensor):
        size = "×".join(map(str, shape_of(value))) or "scalar"
        return f"{size} {str(value.dtype).removeprefix('torch.')}"
    if _is_constant(value):
        return repr(value)
    keys = [key for key, _ in children(value)]
    return f"{type(value).__name__}({', '.join(map(str, keys))})" if keys else type(value).__name__


def version_of(tensor: Tensor) -> int:
    """A number that changes with every write into a tensor; -1 for one of inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def can_have_gradient(tensor: Tensor) -> bool:
    """Whether its dtype is one that autograd follows."""
    return tensor.is_floating_point() or tensor.is_complex()


def paths_of(value: Any) -> str:
    """The leaves that a value has, as an error lists them: `[0], [1][h]`."""
    found = ["".join(f"[{key}]" for key in path) for path, _ in leaves(value)]
    return ", ".join(found[:8]) + (", …" if len(found) > 8 else "") if any(found) else "none: it is one tensor"


def shape_of(value: Tensor) -> tuple[Any, ...]:
    """A tensor's shape; a strided nested tensor has none, its sizes are per row."""
    return ("nested",) if value.is_nested else tuple(value.shape)


def children(value: Any) -> list[tuple[Leaf, Any]]:
    """What a container holds, by position or name; [] for what is no container."""
    kind = type(value)
    if kind is tuple or kind is list:
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return list(zip(kind._fields, value, strict=True))
    if (node := pytree.SUPPORTED_NODES.get(kind)) is not None:
        if node.flatten_with_keys_fn is not None:
            keyed, _ = node.flatten_with_keys_fn(value)
            parts = [(_key(entry), child) for entry, child in keyed]
        else:
            parts = list(enumerate(node.flatten_fn(value)[0]))
        return parts if _is_container(value) or _holds_openly(value, parts) else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    return []


def is_registered(value: Any) -> bool:
    """Whether its type is known to torch.utils._pytree."""
    return type(value) in pytree.SUPPORTED_NODES


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in slots."""
    return {name: getattr(value, name) for name in copyreg._slotnames(type(value)) if hasattr(value, name)}  # type: ignore[attr-defined]


def _holds_openly(value: Any, parts: list[tuple[Leaf, Any]]) -> bool:
    """Whether somebody's class has its parts in its attributes, or in lists, dicts or the like there.

    If they are in other objects, as in those of a cache, what a module does to them could not be done to the caller's.
    """
    attributes = [*getattr(value, "__dict__", {}).values(), *slots_of(value).values()]
    if {id(part) for _, part in parts} <= set(map(id, attributes)):  # most classes are that plain
        return True
    wanted = {id(x): x for x in _inside(part for _, part in parts) if not _is_container(x)}
    has_objects = False
    for x in _inside(attributes):
        wanted.pop(id(x), None)
        if not wanted:
            return True
        has_objects |= not (isinstance(x, Tensor) or _is_container(x) or is_registered(x) or children(x))
    return not has_objects


def _inside(things: Iterable[Any]) -> Iterator[Any]:
    """Some things that are no constants, then what is in them, each once; not what pytree alone can look into."""
    todo, known = deque(things), dict[int, Any]()
    while todo:
        x = todo.popleft()
        if id(x) not in known and not _is_constant(x):
            known[id(x)] = x
            yield x
            if not isinstance(x, Tensor) and (_is_container(x) or not is_registered(x)):
                todo += [child for _, child in children(x)]


def _child(value: Any, key: Leaf) -> Any:
    parts = children(value)
    return parts[_position(value, parts, key)][1]


def _position(value: Any, parts: list[tuple[Leaf, Any]], key: Leaf) -> int:
    for i, (known, _) in enumerate(parts):
        if known == key or str(known) == str(key):
            return i
    if isinstance(key, int) and -len(parts) <= key < len(parts) and not _has_integer_keys(value):
        return key % len(parts)  # a namedtuple, dataclass or ModelOutput by position
    raise LookupError(key)


def _has_integer_keys(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(key, int) for key in value)


def _key(entry: Any) -> Leaf:
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _is_container(value: Any) -> bool:
    return isinstance(value, (tuple, list, deque, Mapping))


def _like(value: Any, parts: list[Any]) -> Any:
    """A container of the same type with other children."""
    kind = type(value)
    if kind is dict:
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return kind._make(parts)
    if (node := pytree.SUPPORTED_NODES.get(kind)) is not None:
        return _with_attributes(node.unflatten_fn(parts, node.flatten_fn(value)[1]), value, parts)
    if isinstance(value, (tuple, list)):
        return _with_attributes(_sequence(kind, parts), value, parts)
    if (
        isinstance(value, Mapping)
        and not isinstance(value, (dict, UserDict))
        and not hasattr(kind, "copies_deep_enough")
    ):
        raise TypeError  # a copy of an unknown mapping may share what it holds with the original
    # A dataclass or a kind of dict: a shallow copy keeps the type without running __init__ again.
    twin = copy.copy(value)
    if twin is value or type(twin) is not kind:
        raise TypeError
    if getattr(value, "__dict__", None) is value:  # what is in it is also an attribute
        twin.__dict__ = twin
    for (key, _), child in zip(children(value), parts, strict=True):
        if isinstance(value, Mapping):
            twin[key] = child
        else:
            object.__setattr__(twin, str(key), child)
    return twin


def _sequence(kind: Any, parts: list[Any]) -> Any:
    """A kind of list or tuple; a list whose constructor wants more can do without it."""
    try:
        return kind(parts)
    except TypeError:
        made = kind.__new__(kind)
        list.extend(made, parts)  # a TypeError for a tuple
        return made


def _with_attributes(made: Any, value: Any, parts: list[Any]) -> Any:
    """A new container with the attributes of another; those that are its parts, or hold tensors, are its own."""
    if not (attributes := getattr(value, "__dict__", None)):
        return made
    own = {id(old): new for (_, old), new in zip(children(value), parts, strict=True)}
    for name, attribute in attributes.items():
        if id(attribute) in own:
            vars(made)[name] = own[id(attribute)]
        elif not any(True for _ in leaves(attribute)):
            vars(made)[name] = attribute
    return made
