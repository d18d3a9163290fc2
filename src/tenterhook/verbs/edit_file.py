"""Ready-made edits in a file: tensors as safetensors, all else as JSON in its header. No code, no pickle."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenterhook.addresses.grammar import parse
from tenterhook.changes.change import KINDS, Change
from tenterhook.changes.function import Function
from tenterhook.changes.places import head
from tenterhook.changes.ready_made import in_turn
from tenterhook.errors import EditError
from tenterhook.values.tensor_file import TensorFile

_FILE = TensorFile("tenterhook.edits", "edits", EditError, "`edits.save(...)`")
_VERSION = 1


def save(file: str | Path, edits: Sequence[tuple[str, Change | Function, Set[int]]]) -> None:
    """Write some edits, each an address, a change, and what it means: the ids of modules and tensors."""
    tensors: dict[str, Tensor] = {}
    written = []
    together: dict[str, list[Any]] = {}
    meant: dict[str, Set[int]] = {}
    for address, change, owners in edits:  # two selectors may mean one address
        meant.setdefault(address, owners)
        if between := _between(address, list(together), meant):
            what = f"it is changed before and after {between}, and a file has one change for each address"
            raise EditError(f"{address} cannot be saved: {what}; give it one list of changes")
        together.setdefault(address, []).append(change)
    for address, changes in together.items():
        try:
            written.append([address, _encode(changes[0] if len(changes) == 1 else in_turn(changes), tensors)])
        except (TypeError, RuntimeError) as error:
            raise EditError(f"{address} cannot be saved: {error}") from None
    _FILE.write(file, tensors, {"version": _VERSION, "edits": written})


def _between(address: str, earlier: list[str], meant: dict[str, Set[int]]) -> str | None:
    """What came after an address, before it comes again, and may mean the same value."""
    last = parse(address)
    for other in earlier[earlier.index(address) + 1 :] if address in earlier else ():
        found = parse(other)
        same = found.is_glob or found.path == last.path or meant[other] & meant[address]
        if same and (found.role, found.grad) == (last.role, last.grad):
            return other
    return None


def load_edits(file: str | Path) -> dict[str, Change]:
    """The edits that `edits.save(file)` wrote, as `edit` takes them.

        with edit(model, load_edits("steering.safetensors")):
            model(x)

    A file holds no code. Its tensors go to the device and dtype of the values that they are used on.
    """
    content, tensors = _FILE.read(file)
    try:
        if content["version"] != _VERSION:
            raise EditError(f"{file} is of version {content['version']}, this tenterhook reads {_VERSION}")
        edits = {str(address): _decode(change, tensors) for address, change in content["edits"]}
        if not all(isinstance(change, Change) for change in edits.values()):
            raise ValueError("something in it is no change")
        return edits
    except EditError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
        raise EditError(f"{file} cannot be read as edits: {error}") from error


def _encode(x: Any, tensors: dict[str, Tensor]) -> Any:
    if x is None or isinstance(x, bool | int | float):
        return x
    if isinstance(x, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = x.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(x, Change):
        return {"change": x.name, "arguments": {key: _encode(value, tensors) for key, value in x.arguments.items()}}
    if isinstance(x, head):
        return {"head": [x.k, x.of]}
    if isinstance(x, slice):
        return {"slice": [_encode(end, tensors) for end in (x.start, x.stop, x.step)]}
    if x is Ellipsis:
        return {"ellipsis": True}
    if isinstance(x, tuple | list):
        return {"tuple" if isinstance(x, tuple) else "list": [_encode(one, tensors) for one in x]}
    if isinstance(x, Function):
        raise TypeError(f"its change is a function ({x}), and a file holds no code; use one of tenterhook.changes")
    raise TypeError(f"a {type(x).__name__} has no place in a file")


def _decode(x: Any, tensors: dict[str, Tensor]) -> Any:
    if x is None or isinstance(x, bool | int | float):
        return x
    if not isinstance(x, dict) or not x:
        raise ValueError(f"{x!r} has no place in it")
    (kind, content), *rest = x.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "change":
        if content not in KINDS:
            raise ValueError(f"there is no change called {content!r}; there are {', '.join(KINDS)}")
        return KINDS[content](**{key: _decode(value, tensors) for key, value in dict(rest)["arguments"].items()})
    if kind == "ellipsis":
        return Ellipsis
    parts = [_decode(one, tensors) for one in content]
    kinds: dict[str, Any] = {"slice": lambda x: slice(*x), "head": lambda x: head(*x), "tuple": tuple, "list": list}
    return kinds[kind](parts)
