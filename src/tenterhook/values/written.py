"""Structured values as JSON, and their tensors under names: what files of ours hold. No code, no pickle.

    writing = Writing(CaptureError)           the error to raise
    writing.begin(name)                    name(path) is that of a tensor in the value
    written = writing.of(value)            JSON; writing.tensors has the tensors
    Reading(tensors).of(written)           the value

No class is looked up by its name when a file is read: that would run somebody's code. So tuples, lists, dicts and plain
values come back as they were; a namedtuple or a dataclass as a namedtuple with its fields; other kinds of lists, tuples
and dicts as plain ones.
"""

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from keyword import iskeyword
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tenterhook.errors import TenterhookError
from tenterhook.platform.functorch import usable
from tenterhook.values.containers import kind_of
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Omitted

_DEEPEST = 30


class Writing:
    """Values as JSON, their tensors put aside under names that say where they came from."""

    def __init__(self, error: type[TenterhookError], hint: str = "") -> None:
        self.tensors: dict[str, Tensor] = {}
        self.with_gradient: list[str] = []  # which of them ask for one
        self._error, self._hint = error, hint  # to raise, and what to do about an object that cannot be written
        self._names: dict[int, tuple[Any, Tensor]] = {}  # by id, what stands for a tensor; and it, to keep the id
        self._lost: list[str] = []  # which classes became what
        self._at: Callable[[tuple[Any, ...]], str] = str

    def begin(self, name: Callable[[tuple[Any, ...]], str]) -> None:
        """The next value; `name` gives the name of a part of it, by its keys, and of all of it by none."""
        self._at = name

    def notes(self) -> list[str]:
        """What does not come back as it was."""
        return [f"{what}: a file holds no classes" for what in dict.fromkeys(self._lost)]

    def of(self, x: Any, path: tuple[Any, ...] = ()) -> Any:
        """A value as JSON."""
        if len(path) > _DEEPEST:
            raise self._error(f"{self._at(())} cannot be saved: it is nested too deep, or in itself")
        if isinstance(x, Tensor):
            return self._tensor(x, path)
        if isinstance(x, Omitted):
            return {"omitted": x.kind}
        if isinstance(x, Inputs):
            args = [self.of(arg, (*path, i)) for i, arg in enumerate(x.args)]
            kwargs = [[name, self.of(arg, (*path, name))] for name, arg in x.kwargs.items()]
            return {"inputs": [args, kwargs, list(x.names)]}
        if (plain := _plain(x)) is not None:
            return plain[0]
        if (kind := kind_of(x)) is None:
            what = f"it holds a {type(x).__name__}, and a file has tensors, numbers and text"
            raise self._error(f"{self._at(())} cannot be saved: {what}{self._hint}")
        return self._container(x, kind, path)

    def _container(self, x: Any, kind: Any, path: tuple[Any, ...]) -> Any:
        parts = [(key, self.of(part, (*path, key))) for key, part in kind.parts(x)]
        cls = type(x)
        names = [str(key) for key, _ in parts]
        is_named = kind.is_object or hasattr(x, "_fields")
        if kind.has_keys or (is_named and not all(map(_is_field, [cls.__name__, *names]))):
            keyed = [[self._key(key), part] for key, part in parts]
            if cls not in (dict, OrderedDict):
                self._lose(cls, "dict")
            return {"ordered" if cls is OrderedDict else "dict": keyed}
        if is_named:
            self._lose(cls, "namedtuple")
            return {"named": [cls.__name__, [[name, part] for name, (_, part) in zip(names, parts, strict=True)]]}
        is_tuple = isinstance(x, tuple)
        if cls not in (tuple, list):
            self._lose(cls, "tuple" if is_tuple else "list")
        return {"tuple" if is_tuple else "list": [part for _, part in parts]}

    def _key(self, key: Any) -> Any:
        if (plain := _plain(key)) is None:
            raise self._error(f"{self._at(())} cannot be saved: a dict in it has a {type(key).__name__} for a key")
        return plain[0]

    def _lose(self, cls: type, becomes: str) -> None:
        self._lost.append(f"what was a {cls.__module__}.{cls.__qualname__} is a {becomes} here")

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Any:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = (self._put_aside(tensor, path), tensor)
        return self._names[id(tensor)][0]

    def _put_aside(self, tensor: Tensor, path: tuple[Any, ...]) -> Any:
        plain = usable(tensor.detach())
        is_plain = plain.layout is torch.strided and not plain.is_nested and not plain.is_quantized
        is_there = not plain.is_meta and (type(plain) is Tensor or not plain.numel() or plain.data_ptr())
        if not is_plain or not is_there:
            what = f"a {type(tensor).__name__} of layout {str(tensor.layout).removeprefix('torch.')}"
            hint = "is not in one piece of memory; make it dense first, with .to_dense()"
            raise self._error(f"{self._at(())} cannot be saved: {what} {hint}")
        plain = plain.as_subclass(Tensor).resolve_conj().resolve_neg().cpu()
        tag = "complex" if plain.is_complex() else "tensor"
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        name = self._name(path)
        if tensor.requires_grad:
            self.with_gradient.append(name)
        self.tensors[name] = plain.clone(memory_format=torch.contiguous_format)
        return {tag: name}

    def _name(self, path: tuple[Any, ...]) -> str:
        name = self._at(path)
        number = next(i for i in range(len(self.tensors) + 1) if (f"{name}#{i}" if i else name) not in self.tensors)
        return f"{name}#{number}" if number else name


def _plain(x: Any) -> tuple[Any] | None:
    """A constant as JSON, in a tuple; None where it is none."""
    if x is None or isinstance(x, bool | str):
        return (x,)
    if isinstance(x, Number) and hasattr(x, "item"):  # NumPy's
        x = x.item()
    if isinstance(x, int):
        return (int(x),)
    if isinstance(x, float):
        return (float(x) if math.isfinite(x) else {"float": repr(float(x))},)
    if isinstance(x, complex):
        return ({"number": [repr(x.real), repr(x.imag)]},)
    if isinstance(x, bytes):
        return ({"bytes": x.hex()},)
    if isinstance(x, torch.Size):
        return ({"size": list(x)},)
    if isinstance(x, torch.dtype | torch.device):
        return ({"dtype" if isinstance(x, torch.dtype) else "device": str(x)},)
    return None


class Reading:
    """JSON as values. Nothing in it can name a class or a function."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._complex: dict[str, Tensor] = {}
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "tensor": tensors.__getitem__,
            "complex": self._complex_of,
            "omitted": _omitted,
            "inputs": self._inputs,
            "dict": lambda parts: {self.of(key): self.of(part) for key, part in parts},
            "ordered": lambda parts: OrderedDict((self.of(key), self.of(part)) for key, part in parts),
            "named": self._named,
            "tuple": lambda parts: tuple(self._all(parts)),
            "list": self._all,
            "float": float,
            "number": lambda parts: complex(float(parts[0]), float(parts[1])),
            "bytes": bytes.fromhex,
            "size": lambda sizes: torch.Size([count(size) for size in sizes]),
            "dtype": _dtype,
            "device": torch.device,
        }

    def of(self, x: Any) -> Any:
        """The value that some JSON stands for."""
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if not isinstance(x, dict) or len(x) != 1:
            raise ValueError("a value in it is of no kind")
        ((kind, content),) = x.items()
        return self._kinds[kind](content)

    def _all(self, parts: Iterable[Any]) -> list[Any]:
        if not isinstance(parts, list):
            raise TypeError("a list was expected")
        return [self.of(part) for part in parts]

    def _complex_of(self, name: str) -> Tensor:
        if name not in self._complex:
            self._complex[name] = torch.view_as_complex(self._tensors[name])
        return self._complex[name]

    def _inputs(self, content: Any) -> Inputs:
        args, kwargs, names = content
        return Inputs(
            tuple(self._all(args)),
            {text(name): self.of(arg) for name, arg in kwargs},
            tuple(text(name) for name in names),
        )

    def _named(self, content: Any) -> Any:
        name, parts = content
        fields = [text(field) for field, _ in parts]
        cls: Any = namedtuple(text(name), fields)  # type: ignore[misc]  # which refuses what is no identifier
        return cls(*(self.of(part) for _, part in parts))


def _is_field(name: str) -> bool:
    """Whether a namedtuple may have such a field."""
    return name.isidentifier() and not iskeyword(name) and not name.startswith("_")


def _omitted(kind: Any) -> Omitted:
    omitted = Omitted(None)
    omitted.kind = text(kind)
    return omitted


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, text(name).removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def count(x: Any) -> int:
    """A number of things, from a file."""
    if type(x) is not int or x < 0:
        raise ValueError(f"{x!r} is no count")
    return x


def text(x: Any) -> str:
    """A text that can be printed: in a file from somewhere, it may be meant for a terminal."""
    if not isinstance(x, str):
        raise TypeError(f"{x!r} is no text")
    return "".join(c if c.isprintable() else "�" for c in x)
