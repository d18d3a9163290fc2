"""What takes the place of a module's arguments: whatever the module does to it, the caller's own must see."""

import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tenterhook._address import Leaf
from tenterhook._tree import children, leaves

_Content = dict[Leaf, Any]


class Standins:
    """The tensors and containers that a module gets in place of others, as they are before it runs."""

    def __init__(self, old: Any, new: Any) -> None:
        after = dict(leaves(new))
        pairs = [(after.get(path, tensor), tensor) for path, tensor in leaves(old)]
        self._tensors = [(a, a.clone() if a.is_inference() else a._version, b) for a, b in pairs if a is not b]
        self._containers = list(_containers(old, new))

    def carry_back(self, output: Any) -> Any:
        """After the forward. Returns another output, or None."""
        new = None
        for tensor, version, original in self._tensors:
            if _was_written(tensor, version) and tensor.shape == original.shape:
                follows = tensor.requires_grad and not (original.is_leaf and original.requires_grad)
                with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
                    original.copy_(tensor)
                new = original if output is tensor else new
        for container, before, original, own in self._containers:
            now = dict(children(container))
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in now):
                _write(original, _turned_back(now, before, own))
        return new


def _containers(old: Any, new: Any) -> Iterator[tuple[Any, _Content, Any, _Content]]:
    """Each container that has taken the place of another, with what is in it, the other, and what is in that."""
    if old is new or isinstance(old, Tensor):
        return
    own, before = dict(children(old)), dict(children(new))
    if type(old) is type(new) and (isinstance(old, (list, MutableMapping)) or dataclasses.is_dataclass(old)):
        yield new, before, old, own
    for key in own.keys() & before.keys():
        yield from _containers(own[key], before[key])


def _turned_back(now: _Content, before: _Content, own: _Content) -> _Content:
    """What is in a container now; what was put there in place of the caller's own, wherever it is, is that again."""
    same = before.keys() & own.keys()
    moved = {id(before[key]): own[key] for key in same if isinstance(before[key], Tensor) or children(before[key])}
    return {key: own[key] if key in same and x is before[key] else moved.get(id(x), x) for key, x in now.items()}


def _write(original: Any, content: _Content) -> None:
    if isinstance(original, list):
        original[:] = content.values()
        return
    if isinstance(original, MutableMapping):
        original.clear()  # for the order
    for key, x in content.items():
        if isinstance(original, MutableMapping):
            original[key] = x
        else:
            object.__setattr__(original, str(key), x)


def _was_written(tensor: Tensor, version: Any) -> bool:
    """Whether a tensor has changed since; one of inference mode does not count, so it was copied."""
    return not torch.equal(tensor, version) if isinstance(version, Tensor) else tensor._version != version
