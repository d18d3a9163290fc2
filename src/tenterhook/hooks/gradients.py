"""Hooks on tensors, for their gradients, and which tensor to hook.

A gradient that is only seen is hooked on the tensor that the model has. One that is changed must change on its way
through this site alone, so a tensor that others use as well is copied first, and the model goes on with the copy.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tenterhook.errors import EditError
from tenterhook.hooks.missing import ungraded, why_no_graph
from tenterhook.hooks.scope import here
from tenterhook.hooks.tap import Tap, with_part
from tenterhook.platform.autograd import next_sequence_number, sequence_number
from tenterhook.platform.functorch import in_transform_without_gradients
from tenterhook.platform.tensors import is_view
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Path, can_have_gradient, leaves, rebuild_live


class Unsaved(functools.partial[Any]):
    """A hook on a tensor: torch.save leaves it out, and need not warn of that."""

    __torch_unserializable__ = True


class CallStart(NamedTuple):
    """The moment at which a module was called."""

    number: int  # that autograd's next node gets in this thread
    nodes: Set[Any]  # of what it was given: their numbers may be of another thread


LONG_AGO = CallStart(sys.maxsize, frozenset())


class GradientTap(Tap):
    """A tap that can hook tensors for their gradients."""

    copies: Set[int] = frozenset()  # the ids of the tensors that it put in place of others in its last call
    _on_leaves: dict[tuple[int, Path], RemovableHandle] | None = None

    def hook_leaves(self, part: Any, call: int) -> None:
        """Have `arrive` called with the gradient of each tensor in a value."""
        if not isinstance(part, Tensor):
            self.action.on_structure(self, part, call)
        found = list(leaves(part))
        if self.action.changes:  # a tensor that is there twice is edited once
            first = {id(tensor): (path, tensor) for path, tensor in reversed(found)}
            found = list(reversed(first.values()))
        for path, tensor in found:
            self.hook(tensor, call, path)
        if torch.is_grad_enabled() and not any(tensor.requires_grad for _, tensor in found):
            self.check_editable(call)

    def check_editable(self, call: int) -> None:
        """A value came, and nothing in it has a gradient: raise if that had to be edited."""
        if self.action.changes and not self.site.wide:
            raise EditError(f"{self.site.at(call)} cannot be edited: {self._why_not_editable()}")

    def hook(self, tensor: Tensor, call: int, path: Path) -> None:
        """Have `arrive` called with the gradient of one tensor."""
        if not tensor.requires_grad:
            self.note_no_graph(tensor, call)
            return
        self.is_view = self.is_view or is_view(tensor)
        is_leaf = tensor.grad_fn is None  # read in any case: torch 2.13 can crash in register_hook otherwise
        self.note_waiting(tensor)
        handle = tensor.register_hook(Unsaved(self.arrive, call, path))
        self.scope.add(handle)
        self.scope.want(tensor)
        if (self.changes or len(here()) != 1) and len(tensor._backward_hooks or ()) > 1:
            later_site_first(tensor, self)
        if is_leaf:
            self._replace_leaf_hook((id(tensor), path), handle)

    def note_waiting(self, tensor: Tensor) -> None:
        """Its gradient is waited for: note where in a graph it is."""
        node = tensor.grad_fn
        self.born = next_sequence_number() - 0.5 if node is None else sequence_number(node)  # a leaf has no number

    def _replace_leaf_hook(self, key: tuple[int, Path], handle: RemovableHandle) -> None:
        """A leaf tensor outlives the graph, so the last call that returned it owns its gradient."""
        known = self._on_leaves or {}
        if (before := known.pop(key, None)) is not None:
            before.remove()
        if len(known) > 1024:
            known = {key: old for key, old in known.items() if old.hooks_dict_ref() is not None}
        known[key] = handle
        self._on_leaves = known

    def note_no_graph(self, tensor: Tensor, call: int) -> None:
        """A tensor came that does not require a gradient: note what tells why."""
        if not can_have_gradient(tensor):
            self.missed = f"{str(tensor.dtype).removeprefix('torch.')} values have no gradient"
        elif in_transform_without_gradients():
            self.missed = "inside vmap or jvp a value has no gradient of its own; it has one in torch.func.grad or vjp"
        elif not torch.is_grad_enabled() and self.may_come_again(call):
            what = "in an autograd.Function or in a checkpoint that did not run again since"
            self.missed = f"it ran without gradients, {what}"
        else:
            self.ungraded = ungraded(tensor, self.site.address.role == "in", self.site.spot)

    def _why_not_editable(self) -> str:
        session = self.scope.session()
        if self.missed or self.ungraded is None:
            return self.missed or "its value has no tensor"
        return why_no_graph(self, None if session is None else session.model(), self.ungraded)

    def own(self, part: Any, value: Any, start: CallStart | None) -> tuple[Any, Any]:
        """The part whose gradient will be hooked, and the value with it in place, which the model goes on with."""
        self.copies = frozenset()
        if not self.changes or (not self.scope.frozen and part is value and not _is_shared(part, start)):
            return part, value
        if self.action.changes:
            note_several_leaves(value, part)
        copies: dict[int, Tensor] = {}  # by the id of the original: one that is there twice stays one tensor

        def copy(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._own_tensor(tensor, isinstance(value, Inputs) or _is_older(tensor, start))
            return copies[id(tensor)]

        try:
            own = rebuild_live(part, copy, strict=self.action.changes)
        except EditError as error:
            raise EditError(f"{self.site} cannot be edited: {error}") from None
        if all(a is b for (_, a), (_, b) in zip(leaves(own), leaves(part), strict=True)):
            return part, value
        if not self.action.changes:  # frozen: wherever else it is in the value, it is the same tensor
            return own, rebuild_live(value, lambda _, tensor: copies.get(id(tensor), tensor))
        self.copies = {id(tensor) for tensor in copies.values()}
        return own, with_part(value, self.site.address.leaf, own)

    def _own_tensor(self, tensor: Tensor, is_older: bool) -> Tensor:
        own = self.scope.thaw(tensor)
        if own is not tensor or not own.requires_grad or not self.action.changes:
            return own
        is_shared = _is_at_several_leaves(tensor) or (is_older and not self.is_copied_for_us(tensor))
        return own.clone() if is_shared else own

    def is_copied_for_us(self, tensor: Tensor) -> bool:
        """True if an outer session made this copy for the same site, in this very call."""
        owners = map(_owner, (tensor._backward_hooks or {}).values())
        return any(
            isinstance(owner, GradientTap)
            and owner is not self
            and owner.is_at(self.site)
            and id(tensor) in owner.copies
            for owner in owners
        )


def later_site_first(tensor: Tensor, tap: Tap) -> None:
    """Order the hooks on one tensor that has several addresses, as the output of a block is that of its last layer.

    Autograd runs hooks in the order in which they were put, the layer's before the block's. The gradient comes to
    the block first: an edit of the layer's gradient must not show there. At one address the outer session is first.
    """
    hooks = tensor._backward_hooks or {}
    owners = {key: _owner(hook) for key, hook in hooks.items()}
    earlier = {key: owner for key, owner in owners.items() if isinstance(owner, Tap) and not owner.is_at(tap.site)}
    if tap.changes or any(owner.changes for owner in earlier.values()):
        for key in earlier:
            hooks[key] = hooks.pop(key)


def _owner(hook: Any) -> Any:
    """The tap that waits for a gradient."""
    return getattr(getattr(hook, "func", None), "__self__", None)


# By id: tensors that a value has, or had before an edit, at several leaves.
_at_several_leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def note_several_leaves(value: Any, part: Any) -> None:
    """Note the tensors of a part that are also somewhere else in the value."""
    if part is value:
        return
    inside = Counter(id(tensor) for _, tensor in leaves(part))
    everywhere = Counter(id(tensor) for _, tensor in leaves(value))
    shared = (everywhere - inside).keys() & inside.keys()
    _at_several_leaves.update({id(tensor): tensor for _, tensor in leaves(part) if id(tensor) in shared})


def _is_at_several_leaves(tensor: Tensor) -> bool:
    return _at_several_leaves.get(id(tensor)) is tensor


def _is_shared(part: Any, start: CallStart | None) -> bool:
    return type(part) is not Tensor or _is_older(part, start)


def _is_older(tensor: Tensor, start: CallStart | None) -> bool:
    """True where a module's output was there before the call: its input, handed on, or something that it keeps.

    A view counts as older, since a write into it would take the hook off.
    """
    if start is None:
        return False
    node = tensor.grad_fn
    return node is None or sequence_number(node) < start.number or node in start.nodes or is_view(tensor)
