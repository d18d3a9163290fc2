"""What takes the place of a module's arguments: whatever the module does to it is done to the caller's own."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tenterhook.platform import functorch, pytree
from tenterhook.values.containers import Content, Kind, attributes_of, children, kind_of, update
from tenterhook.values.tree import Ids, leaves, shape_of, version_of, with_own


class Standins:
    """The tensors and containers that a module gets in place of others, as they are before it runs."""

    def __init__(self, old: Any, new: Any) -> None:
        after = dict(leaves(new))
        pairs = [(after.get(path, tensor), tensor) for path, tensor in leaves(old)]
        self._tensors = [_Tensor(original, standin) for standin, original in pairs if standin is not original]
        structures = list(_structures(old, new))
        self._containers = [
            _Container(kind, original, standin)
            for kind, original, standin in structures
            if kind.can_change and type(original) is type(standin)
        ]
        self._given = old if self._containers else None
        self._own = {id(one.standin): one.original for one in self._tensors}  # the caller's, by the id of its stand-in
        self._own |= {id(standin): original for _, original, standin in structures}

    def carry_back(self, output: Any) -> Any:
        """After the forward. Returns another output, or None."""
        new = None
        for one in self._tensors:
            if one.carry_back() and output is one.standin:
                new = one.original
        containers = {id(one.standin): one.original for one in self._containers}
        for container in self._containers:
            container.carry_back(self._own, containers)
        if containers:  # a module may put one into another argument, or hand it on: that is the caller's
            with_own(self._given, containers)
            new = with_own(output, containers) if new is None else new
        return None if new is output else new


class _Tensor:
    """A tensor that has taken the place of another, and what tells later whether it was written into."""

    def __init__(self, original: Tensor, standin: Tensor) -> None:
        self.original, self.standin = original, standin
        self._version = version_of(standin)
        # In inference mode and under vmap, writes are not counted.
        self._before = standin.clone() if standin.is_inference() or functorch.is_of_vmap(standin) else None

    def carry_back(self) -> bool:
        """Write into the original what was written into this one. Whether that was done."""
        original, standin = self.original, self.standin
        if not self._was_written() or shape_of(standin) != shape_of(original):
            return False
        is_leaf = original.is_leaf and original.requires_grad  # which refuses writes that autograd follows
        has_graph = any(layer.requires_grad for layer in functorch.layers(standin))
        with torch.set_grad_enabled(has_graph and not is_leaf and torch.is_grad_enabled()):
            original.copy_(standin)
        return True

    def _was_written(self) -> bool:
        if self._before is None:
            return version_of(self.standin) != self._version
        now, before = _values(self.standin), _values(self._before)
        return not bool(((now == before) | ((now != now) & (before != before))).all())


class _Container:
    """A container that has taken the place of another, and what was in it then."""

    def __init__(self, kind: Kind, original: Any, standin: Any) -> None:
        self.original, self.standin = original, standin
        self._kind = kind
        self._before = kind.content(standin)
        self._attributes = attributes_of(standin)

    def carry_back(self, own: dict[int, Any], containers: dict[int, Any]) -> None:
        """Do to the original what was done to this one since."""
        kind, now = self._kind, self._kind.content(self.standin)
        kind.change(self.original, *_as_own(self._before, now, own, containers, kind.parts_move))
        if self._attributes is not None:
            update(vars(self.original), *_as_own(self._attributes, vars(self.standin), own, containers))


def _structures(old: Any, new: Any, around: Ids = ()) -> Iterator[tuple[Kind, Any, Any]]:
    """Each structure of which another has taken the place, its kind, and that other."""
    kind = None if old is new else kind_of(old)
    if kind is None or id(old) in around:
        return
    own, standin = dict[Any, Any](kind.parts(old)), dict[Any, Any](children(new))
    if own or kind.can_change:
        yield kind, old, new
    if type(old) in pytree.registered:  # its parts may be in containers among its attributes
        own |= attributes_of(old) or {}
        standin |= attributes_of(new) or {}
    for key in own.keys() & standin.keys():
        yield from _structures(own[key], standin[key], (*around, id(old)))


def _as_own(
    before: Content, now: Content, own: dict[int, Any], containers: dict[int, Any], parts_move: bool = False
) -> tuple[Content, Content]:
    """What was in a container and what is, with the caller's own where it is still in its place.

    What a module puts in another place is what it had: the edited. But a container is the caller's anywhere, and in a
    list parts move.
    """
    moved = Counter(id(x) for key, x in before.items() if now.get(key) is not x) if parts_move else Counter[int]()
    after = {}
    for key, x in now.items():
        is_own = before.get(key) is x or id(x) in containers
        if not is_own and moved[id(x)]:
            moved[id(x)] -= 1
            is_own = True
        after[key] = own.get(id(x), x) if is_own else with_own(x, containers)
    return {key: own.get(id(x), x) for key, x in before.items()}, after


def _values(tensor: Tensor) -> Tensor:
    """What can be compared: the tensor inside all transforms, of a nested one the values."""
    inner = functorch.layers(tensor)[-1]
    return inner.values() if inner.is_nested else inner
