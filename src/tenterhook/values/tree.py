"""Structured values: their tensors (the leaves), by path, and the same structure with other leaves.

    leaves((a, {"b": b}))             [((0,), a), ((1, "b"), b)]
    pick((a, {"b": b}), (1, "b"))     b
    put((a, {"b": b}), (1, "b"), c)   (a, {"b": c})
    rebuild(value, f)                 f(path, tensor) at every leaf; the containers keep their types, to be kept
    rebuild_live(value, f)            the same for a value that the model goes on with

containers.py says what is looked into. Anything else is opaque: `rebuild` puts a note in its place unless it is a plain
constant, so that keeping a structure never keeps what was not asked for; `rebuild_live` leaves it as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor

from tenterhook.errors import EditError
from tenterhook.values.containers import Leaf, Parts, children, is_constant, kind_of

Path = tuple[Leaf, ...]
Ids = tuple[int, ...]
_DEEPEST = 30  # a structure that is nested deeper makes itself anew


def noted(value: Any) -> Any:
    """What a kept structure has in place of something that is no tensor: a constant itself, or a note."""
    return value if is_constant(value) else Omitted(value)


class Omitted:
    """Stands for an object inside a kept structure that is no tensor and was therefore not kept."""

    def __init__(self, value: object) -> None:
        self.kind = type(value).__name__

    @classmethod
    def of(cls, kind: type) -> "Omitted":
        """For an object of a class that is not at hand itself."""
        note = cls(None)
        note.kind = kind.__name__
        return note

    @property
    def why(self) -> str:
        """Why it was not, of the value."""
        return f"is a {self.kind}: no tensor, so it was not kept"

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
        parts = children(value)
        value = parts[_position(value, parts, key)][1]
    return value


def put(value: Any, path: Path, part: Any) -> Any:
    """A new structure with another part at a path; what is beside the path stays what it is."""
    if not path:
        return part
    kind = kind_of(value)
    if kind is None:
        raise LookupError(path[0])
    parts = kind.parts(value)
    i = _position(value, parts, path[0])
    changed = [child for _, child in parts]
    changed[i] = put(changed[i], path[1:], part)
    try:
        return kind.like(value, changed)
    except Exception as error:
        raise TypeError(f"a {type(value).__name__} cannot be made anew with another {path[0]!r} in it") from error


def rebuild(value: Any, change: Callable[[Path, Tensor], Any], opaque: Callable[[Any], Any] = noted) -> Any:
    """A structure to keep, with `change(path, tensor)` for every tensor and `opaque(x)` for what is not looked into.

    What cannot be made anew becomes a dict.
    """
    return _Rebuilding(change, opaque, lambda _, parts: parts).of(value)


def rebuild_live(value: Any, change: Callable[[Path, Tensor], Any], strict: bool = False) -> Any:
    """A structure to go on with: what is not looked into, or cannot be made anew, stays what it is.

    `strict`: EditError if a tensor would not be changed because of that.
    """
    return _Rebuilding(change, lambda x: x, _stays_if_unchanged if strict else lambda x, _: x).of(value)


def _stays_if_unchanged(value: Any, parts: dict[Leaf, Any]) -> Any:
    new = leaves(parts, (), (id(value),))
    if all(a is b for (_, a), (_, b) in zip(leaves(value), new, strict=True)):
        return value
    what = f"a {type(value).__name__} cannot be made anew with other tensors in it"
    raise EditError(f"{what}; what is beside it can be edited by its own address")


class _Rebuilding:
    """One structure, made anew from the leaves up."""

    def __init__(
        self,
        change: Callable[[Path, Tensor], Any],
        opaque: Callable[[Any], Any],
        unmade: Callable[[Any, dict[Leaf, Any]], Any],
    ) -> None:
        self._change = change
        self._opaque = opaque  # gives what stands for a value that is not looked into
        self._unmade = unmade  # likewise for one of a class that cannot be made anew, and its new parts
        self._around: dict[int, bool] = {}  # by id, the containers around: whether one was found inside itself

    def of(self, value: Any, path: Path = ()) -> Any:
        """The new value for one."""
        if isinstance(value, Tensor):
            return self._change(path, value)
        if id(value) in self._around:
            self._around[id(value)] = True
            return self._opaque(value)
        kind = kind_of(value)
        if kind is None or len(path) >= _DEEPEST:
            return self._opaque(value)
        if not (parts := kind.parts(value)):
            return self._opaque(value) if kind.is_object else value
        self._around[id(value)] = False
        changed = [self.of(child, (*path, key)) for key, child in parts]
        is_inside_itself = self._around.pop(id(value))
        try:
            made = kind.like(value, changed)
            return with_own(made, {id(value): made}, tuple(self._around)) if is_inside_itself else made
        except Exception:  # somebody's class, whose constructor or copy wants something else
            unmade = {key: child for (key, _), child in zip(parts, changed, strict=True)}
        return self._unmade(value, unmade)


def with_own(value: Any, own: dict[int, Any], around: Ids = ()) -> Any:
    """A value with other things in it, by the ids of those whose place they take; written into it where that can be."""
    if id(value) in own:
        return own[id(value)]
    kind = None if isinstance(value, Tensor) else kind_of(value)
    if kind is None or len(around) > _DEEPEST or id(value) in around:
        return value
    for key, child in kind.parts(value):
        if (new := with_own(child, own, (*around, id(value)))) is not child:
            with suppress(Exception):  # somebody's class, which cannot be made anew or refuses writes
                value = kind.with_part(value, key, new)
    return value


def describe(value: Any) -> str:
    """A value in a few words: `8×32 float32`, `(2 leaves) tuple`."""
    if isinstance(value, Tensor):
        size = "×".join(map(str, shape_of(value))) or "scalar"
        return f"{size} {str(value.dtype).removeprefix('torch.')}"
    if is_constant(value):
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


def _position(value: Any, parts: Parts, key: Leaf) -> int:
    """Where in a container's parts the one with a key is; a namedtuple, dataclass or ModelOutput has positions, too."""
    for i, (known, _) in enumerate(parts):
        if known == key or str(known) == str(key):
            return i
    if isinstance(key, int) and -len(parts) <= key < len(parts) and not _has_integer_keys(value, parts):
        return key % len(parts)
    raise LookupError(key)


def _has_integer_keys(value: Any, parts: Parts) -> bool:
    kind = kind_of(value)
    return kind is not None and kind.has_keys and any(isinstance(key, int) for key, _ in parts)
