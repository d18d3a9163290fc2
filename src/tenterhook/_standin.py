"""What takes the place of a module's arguments: whatever the module does to it, the caller's own must see."""

import dataclasses
from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tenterhook._address import Leaf
from tenterhook._tree import children, leaves

_SEQUENCES = (list, deque)


class Standins:
    """The tensors and containers that a module gets in place of others, as they are before it runs."""

    def __init__(self, old: Any, new: Any) -> None:
        after = dict(leaves(new))
        pairs = [(after.get(path, tensor), tensor) for path, tensor in leaves(old)]
        self._tensors = [(a, a.clone() if a.is_inference() else a._version, b) for a, b in pairs if a is not b]
        structures = list(_structures(old, new))
        self._containers = [_Container(a, b) for a, b in structures if type(a) is type(b) and _can_be_changed(a)]
        self._own = {id(a): b for a, _, b in self._tensors}  # by the id of what takes its place
        self._own |= {id(b): a for a, b in structures}

    def carry_back(self, output: Any) -> Any:
        """After the forward. Returns another output, or None."""
        new = None
        for tensor, version, original in self._tensors:
            if _was_written(tensor, version) and tensor.shape == original.shape:
                follows = tensor.requires_grad and not (original.is_leaf and original.requires_grad)
                with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
                    original.copy_(tensor)
                new = original if output is tensor else new
        for one in self._containers:
            one.carry_back(self._own)
        return self._with_own_containers(output) if new is None and self._containers else new

    def _with_own_containers(self, output: Any) -> Any:
        """A module may hand a container on: that is the caller's."""
        own = {id(one.standin): one.original for one in self._containers}
        if type(output) is tuple and not own.keys().isdisjoint(map(id, output)):
            return tuple(own.get(id(part), part) for part in output)
        return own.get(id(output))


class _Container:
    """A container that has taken the place of another, and what was in it then."""

    def __init__(self, original: Any, standin: Any) -> None:
        self.original, self.standin = original, standin
        self._before = dict(children(standin))
        self._attributes = _attributes(standin)

    def carry_back(self, own: dict[int, Any]) -> None:
        """Do to the original what was done to this one since."""
        now = {key: own.get(id(x), x) for key, x in children(self.standin)}
        before = {key: own.get(id(x), x) for key, x in self._before.items()}
        if isinstance(self.original, _SEQUENCES):
            _change_sequence(self.original, list(before.values()), list(now.values()))
        elif isinstance(self.original, MutableMapping):
            _change(self.original, before, now)
            if [key for key in now if key in before] != [key for key in before if key in now]:
                content = dict(self.original)
                self.original.clear()
                for key in (*(key for key in content if key not in now), *(key for key in now if key in content)):
                    self.original[key] = content[key]
        else:  # a dataclass, frozen or with slots
            for name in (name for name, x in now.items() if before.get(name, now) is not x):
                object.__setattr__(self.original, str(name), now[name])
        if self._attributes is not None:
            attributes = {name: own.get(id(x), x) for name, x in vars(self.standin).items()}
            _change(vars(self.original), {name: own.get(id(x), x) for name, x in self._attributes.items()}, attributes)


def _structures(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Each structure of which another has taken the place, and that."""
    if old is new or isinstance(old, Tensor):
        return
    own, standin = dict(children(old)), dict(children(new))
    if own or _can_be_changed(old):
        yield old, new
    for key in own.keys() & standin.keys():
        yield from _structures(own[key], standin[key])


def _can_be_changed(value: Any) -> bool:
    return isinstance(value, (*_SEQUENCES, MutableMapping)) or dataclasses.is_dataclass(value)


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an object has beside its content."""
    own = getattr(value, "__dict__", None)
    return None if own is None or own is value else dict(own)


def _change(original: Any, before: dict[Leaf, Any], now: dict[Leaf, Any]) -> None:
    """What came, went or became another thing: that alone, for others may have changed the rest."""
    for key in before.keys() - now.keys():
        original.pop(key, None)
    for key, x in now.items():
        if key not in before or before[key] is not x:
            original[key] = x


def _change_sequence(original: Any, before: list[Any], now: list[Any]) -> None:
    kept = len(before) <= len(now) and all(a is b for a, b in zip(before, now, strict=False))
    if not kept:
        original.clear()
    for x in now[len(before) :] if kept else now:
        original.append(x)


def _was_written(tensor: Tensor, version: Any) -> bool:
    """Whether a tensor has changed since; one of inference mode does not count, so it was copied."""
    if isinstance(version, Tensor):
        return not bool(((tensor == version) | ((tensor != tensor) & (version != version))).all())
    return tensor._version != version
