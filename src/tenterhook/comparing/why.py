"""What is different about two modules themselves, as a hint at the cause."""

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.modules import own_attributes, own_tensors
from tenterhook.comparing.apart import apart
from tenterhook.values.tree import shape_of

_PLAIN = (bool, int, float, str, type(None), tuple)
_NOT_THEIRS = {"_name_or_path", "transformers_version", "name_or_path"}


def differences(a: nn.Module, b: nn.Module) -> list[str]:
    """Weights, buffers, options, mode and code that are not the same."""
    return [*_of_tensors(a, b), *_of_attributes(a, b), *_of_code(a, b)]


def _of_tensors(a: nn.Module, b: nn.Module) -> Iterator[str]:
    for kind in ("parameter", "buffer"):
        mine, theirs = own_tensors(a, kind), own_tensors(b, kind)
        for name in dict.fromkeys([*mine, *theirs]):
            one, other = mine.get(name), theirs.get(name)
            if one is None and other is None:
                continue
            if one is None or other is None:
                yield f"{kind} {name} in {'b' if one is None else 'a'} alone"
            elif one is not other and (what := _of_tensor(one, other)):
                yield f"{name}: {what}"


def _of_tensor(a: Tensor, b: Tensor) -> str:
    found = apart(a, b)
    if found.is_equal:
        return ""
    if a.dim() == 2 and shape_of(a) == shape_of(b)[::-1] and apart(a.T, b).is_equal:
        return "the transpose" if a.shape[0] == a.shape[1] else ""  # else as another class keeps it
    return found.what or f"differs by at most {found.largest:.3g}"


def _of_attributes(a: nn.Module, b: nn.Module) -> Iterator[str]:
    if a.training != b.training:
        yield f"{_mode(a)} against {_mode(b)} mode"
    mine, theirs = dict(own_attributes(a)), dict(own_attributes(b))
    for name in (name for name in mine if name in theirs):
        yield from _of_attribute(name, mine[name], theirs[name])


def _of_attribute(name: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        if a != b and not name.startswith("__"):
            yield f"{name} {a!r} against {b!r}"
    elif isinstance(a, FunctionType) and isinstance(b, FunctionType):
        if a.__code__ is not b.__code__:
            yield f"{name} {a.__name__} against {b.__name__}"
    elif name == "config" and hasattr(a, "__dict__") and hasattr(b, "__dict__"):
        mine, theirs = vars(a), vars(b)
        for key in sorted((mine.keys() & theirs.keys()) - _NOT_THEIRS):
            if isinstance(mine[key], _PLAIN) and isinstance(theirs[key], _PLAIN) and mine[key] != theirs[key]:
                yield f"config.{key} {mine[key]!r} against {theirs[key]!r}"


def _of_code(a: nn.Module, b: nn.Module) -> Iterator[str]:
    one, other = code_of(a), code_of(b)
    if type(a).__name__ != type(b).__name__:
        yield f"{type(a).__name__} against {type(b).__name__}"
    elif one is not None and other is not None and one is not other and one.co_code != other.co_code:
        yield "its forward is other code"


def code_of(module: nn.Module) -> Any:
    """The code of a module's forward, where it is Python."""
    forward = vars(module).get("forward", type(module).forward)
    return getattr(getattr(forward, "__func__", forward), "__code__", None)


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"
