"""What takes the place of a module's arguments: whatever the module does to it, the caller's own must see."""

from collections import Counter, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

from tenterhook.values.tree import Ids, Leaf, children, is_registered, leaves, shape_of, slots_of, with_own

_SEQUENCES = (list, deque)


class Standins:
    """The tensors and containers that a module gets in place of others, as they are before it runs."""

    def __init__(self, old: Any, new: Any) -> None:
        after = dict(leaves(new))
        pairs = [(after.get(path, tensor), tensor) for path, tensor in leaves(old)]
        self._tensors = [(a, _state(a), b) for a, b in pairs if a is not b]
        self._structures = list(_structures(old, new))
        self._containers = [_Container(a, b) for a, b in self._structures if type(a) is type(b) and _can_be_changed(a)]
        self._given = old if self._containers else None
        self._own = {id(a): b for a, _, b in self._tensors}  # by the id of what takes its place
        self._own |= {id(b): a for a, b in self._structures}

    def carry_back(self, output: Any) -> Any:
        """After the forward. Returns another output, or None."""
        new = None
        for tensor, version, original in self._tensors:
            if _was_written(tensor, version) and shape_of(tensor) == shape_of(original):
                is_leaf = original.is_leaf and original.requires_grad
                follows = not is_leaf and any(layer.requires_grad for layer in _layers(tensor))
                with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
                    original.copy_(tensor)
                new = original if output is tensor else new
        containers = {id(one.standin): one.original for one in self._containers}
        for one in self._containers:
            one.carry_back(self._own, containers)
        if containers:  # a module may put one into another argument, or hand it on: that is the caller's
            with_own(self._given, containers)
            new = with_own(output, containers) if new is None else new
        return None if new is output else new


class _Container:
    """A container that has taken the place of another, and what was in it then."""

    def __init__(self, original: Any, standin: Any) -> None:
        self.original, self.standin = original, standin
        self._before = _content(standin)
        self._attributes = _attributes(standin)

    def carry_back(self, own: dict[int, Any], anywhere: dict[int, Any]) -> None:
        """Do to the original what was done to this one since."""
        is_sequence = isinstance(self.original, _SEQUENCES)
        before, now = _as_own(self._before, _content(self.standin), own, anywhere, is_sequence)
        if is_sequence:
            _change_sequence(self.original, list(before.values()), list(now.values()))
        elif isinstance(self.original, MutableMapping):
            _change(self.original, before, now)
            if list(now) != [*(key for key in before if key in now), *(key for key in now if key not in before)]:
                content = dict(self.original)
                self.original.clear()
                for key in (*(key for key in content if key not in now), *(key for key in now if key in content)):
                    self.original[key] = content[key]
        else:
            for name in (name for name, x in now.items() if before.get(name, now) is not x):
                object.__setattr__(self.original, name, now[name])
        if self._attributes is not None:
            _change(vars(self.original), *_as_own(self._attributes, vars(self.standin), own, anywhere))


def _structures(old: Any, new: Any, around: Ids = ()) -> Iterator[tuple[Any, Any]]:
    """Each structure of which another has taken the place, and that."""
    if old is new or isinstance(old, Tensor) or id(old) in around:
        return
    own, standin = dict[Any, Any](children(old)), dict[Any, Any](children(new))
    if own or _can_be_changed(old):
        yield old, new
    if is_registered(old):  # what it holds its parts in
        own |= _attributes(old) or {}
        standin |= _attributes(new) or {}
    for key in own.keys() & standin.keys():
        yield from _structures(own[key], standin[key], (*around, id(old)))


def _as_own(
    before: dict[Any, Any], now: dict[Any, Any], own: dict[int, Any], anywhere: dict[int, Any], moves: bool = False
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What was in a container and what is, with the caller's own where it is still in its place.

    What a module puts in another place is what it had: the edited. But a container is the caller's anywhere, and in a
    list things move.
    """
    moved = Counter(id(x) for key, x in before.items() if now.get(key) is not x) if moves else Counter[int]()
    after = {}
    for key, x in now.items():
        is_own = before.get(key) is x or id(x) in anywhere
        if not is_own and moved[id(x)]:
            moved[id(x)] -= 1
            is_own = True
        after[key] = own.get(id(x), x) if is_own else with_own(x, anywhere)
    return {key: own.get(id(x), x) for key, x in before.items()}, after


def _can_be_changed(value: Any) -> bool:
    is_class = is_dataclass(value) or (is_registered(value) and not isinstance(value, tuple))
    return is_class or isinstance(value, (*_SEQUENCES, MutableMapping))


def _content(value: Any) -> dict[Any, Any]:
    """What is in a container; of an object, what is in its slots."""
    return dict(children(value)) if isinstance(value, (*_SEQUENCES, MutableMapping)) else slots_of(value)


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


def _state(tensor: Tensor) -> Any:
    """A tensor's version; one of inference mode or of vmap does not count writes, so it is copied."""
    return tensor.clone() if tensor.is_inference() or is_batchedtensor(tensor) else tensor._version


def _was_written(tensor: Tensor, state: Any) -> bool:
    """Whether a tensor has changed since."""
    if not isinstance(state, Tensor):
        return bool(tensor._version != state)
    now, before = (x.values() if x.is_nested else x for x in (_layers(tensor)[-1], _layers(state)[-1]))
    return not bool(((now == before) | ((now != now) & (before != before))).all())


def _layers(tensor: Tensor) -> list[Tensor]:
    """A tensor, and what is inside the transforms of torch.func; at last the values, which can be compared."""
    layers = [tensor]
    while is_functorch_wrapped_tensor(layers[-1]):
        layers.append(get_unwrapped(layers[-1]))
    return layers
