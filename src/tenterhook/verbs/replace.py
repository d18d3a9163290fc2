"""How values and gradients are replaced: the taps of edit."""

import functools
import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.sites import Site
from tenterhook.changes import Change, Function
from tenterhook.errors import EditError
from tenterhook.hooks.scope import Scope, here, hidden, hide, unhide
from tenterhook.hooks.swap import Swap
from tenterhook.hooks.tap import Started, Tap, with_part
from tenterhook.platform.checkpoints import Enough, graph_task, jvp_enabled, may_be_checkpointed, modes, saves_hooked
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Path, describe, leaves, paths_of, put, rebuild, shape_of, unshared
from tenterhook.verbs.difference import Difference

_NONE = object()


class Edit(Tap):
    """A tap that puts something else in the place of a value or gradient."""

    changes = True
    applied = 0
    failures = 0  # how often its change raised an exception, or made something else of the value
    overwritten = False
    _swapped: Swap | None = None

    def __init__(self, site: Site, change: Change | Function, scope: Scope) -> None:
        super().__init__(site, scope)
        self.change = change
        if site.address.grad and site.kind == "module" and site.address.role == "out":
            self.needs_before = True
            self.started = {}

    def twin(self, site: Site) -> "Edit":
        return Edit(site, self.change, self.scope)

    @property
    def fired(self) -> int:
        return self.applied

    @functools.cached_property
    def difference(self) -> Difference:
        """How much it changed."""
        return Difference(self.change)

    def reach(self, part: Any, call: int) -> Any:
        new = self._changed(part, call)
        self._count_in(part, new)
        return new

    def replace(self, value: Any, part: Any, new: Any) -> Any:
        if part is not value:
            _note_several_leaves(value, part)
        return super().replace(value, part, new)

    def reach_again(self, part: Any, call: int) -> Any:
        return self._changed(part, call)

    def arrive(self, call: int, path: Path, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        new = self._changed(grad, call, path)
        self._count_in(grad, new)
        return new

    def _count_in(self, old: Any, new: Any) -> None:
        self.applied += 1
        self.difference.note(old, new)

    def _changed(self, old: Any, call: int, path: Path = ()) -> Any:
        """What the change makes of a value; None where it leaves it as it is."""
        shown = old.plain() if isinstance(old, Inputs) else old
        self.failures += 1
        try:
            new = self._made(shown, call, path)
        except Enough:
            self.failures -= 1
            raise
        except Exception as error:
            _blame(error, self.site.at(call, path))
            raise
        if not _are_alike(shown, new) and (self.change.keeps_shape or not _is_free(self.site)):
            check_alike(shown, new, self.site.at(call, path))
        self.failures -= 1
        if new is shown and isinstance(new, Tensor):
            return None
        return old.with_plain(new) if isinstance(old, Inputs) else new

    def _made(self, value: Any, call: int, path: Path) -> Any:
        change = self.change
        if type(change) is Change and not change.takes_site and isinstance(value, Tensor):
            return change(value)
        site = self.site.at(call, path)
        with hidden(self.scope):
            if isinstance(value, Tensor) or _is_for_structures(change):
                return change(value, site)
            # A ready-made change is for a tensor; in a structure with just one, it is for that one.
            found = list(leaves(value))
            if len(found) != 1:
                have = f"with {paths_of(value)}" if found else "without any"
                raise EditError(f"{change} changes one tensor, and this is {describe(value)}, {have}")
            ((inside, tensor),) = found
            return put(value, inside, change(tensor, site))

    def own(self, part: Any, value: Any, since: Started | None) -> tuple[Any, Any]:
        """A gradient is changed on its way through this site alone: a tensor that others use is copied first."""
        self.copied = ()
        since = _OLDER if self.older else since
        if part is value and type(part) is Tensor and not self.scope.frozen and not _is_older(part, since):
            return part, value
        _note_several_leaves(value, part)
        copies: dict[int, Tensor] = {}

        def copy(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                own = self.scope.thaw(tensor)
                older = isinstance(value, Inputs) or _is_older(tensor, since)
                shared = _is_at_several_leaves(tensor) or (older and not self.is_copied_for_us(tensor))
                copies[id(tensor)] = own.clone() if shared and own is tensor and own.requires_grad else own
            return copies[id(tensor)]

        try:
            own = rebuild(part, copy, opaque=unshared)
        except EditError as error:
            raise EditError(f"{self.site} cannot be edited: {error}") from None
        if all(a is b for (_, a), (_, b) in zip(leaves(own), leaves(part), strict=True)):
            return part, value
        self.copied = {id(tensor) for tensor in copies.values()}
        return own, with_part(value, self.site.address.leaf, own)

    def hook_leaves(self, part: Any, call: int) -> None:
        if type(part) is Tensor and part.requires_grad:
            self.hook(part, call, ())
            return
        once = {id(tensor): (path, tensor) for path, tensor in reversed(list(leaves(part)))}
        for path, tensor in reversed(once.values()):
            self.hook(tensor, call, path)
        if not self.site.wide and torch.is_grad_enabled() and not any(t.requires_grad for _, t in once.values()):
            raise EditError(f"{self.site.at(call)} cannot be edited: {self.missed or 'its value has no tensor'}")

    def await_shares(self, own: Any, part: Any, call: int, given: Inputs) -> None:
        self.hook_leaves(own, call)

    def swap(self, tensor: Tensor) -> None:
        """Put the changed value into a parameter or buffer, until `swap_back`."""
        try:
            self._swapped = Swap(tensor)
            new = self._changed(tensor.detach(), 0)
            self._swapped.put(new)
        except RuntimeError as error:
            if isinstance(error, EditError):
                raise
            raise EditError(f"{self.site} cannot be edited: {error}") from error
        self._count_in(self._swapped.backup, new)

    def swap_back(self) -> None:
        swapped, self._swapped = self._swapped, None
        if swapped is not None:
            module, name = self.site.module, self.site.address.name.rpartition(".")[2]
            table = getattr(module, f"_{self.site.kind}s", None)
            self.overwritten = swapped.put_back(table if type(table) is dict else {}, name)


class PlainEdit(Edit):
    """The common case without a detour: a ready-made change with numbers, of a module's whole output, at every call.

    Such a change keeps the shape, and can be made again on the old value to see the difference, so that the first
    call has only to be remembered.
    """

    change: Change
    _first: Tensor | None = None  # the value before the change at the first call
    _version = 0

    def __init__(self, site: Site, change: Change, scope: Scope) -> None:
        self.site = site
        self.scope = scope
        self.change = change

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], last: Any = None) -> Any:
        scope = self.scope
        if (
            type(last) is not Tensor
            or (operand := self.change.operands.get(last.dtype, _NONE)) is _NONE  # its shape or dtype might change
            or scope not in here()
            or graph_task() != scope.task
            or ((saves_hooked(False) or not jvp_enabled()) and may_be_checkpointed())
            or modes()  # somebody looks at each operation
        ):
            return self._go_the_long_way(module, args, last)
        try:
            new = self.change.operator(last, operand)
            if not self.applied:
                self._version = last._version
                self._first = last.detach() if last.requires_grad else last
                self.applied = 1
                return new
        except Exception:  # the long way fails too and says where, or keeps an inference tensor, which has no version
            return self._go_the_long_way(module, args, last)
        self.applied = applied = self.applied + 1
        if applied < 10 or not applied & (applied - 1) or not (applied - 1) & (applied - 2):
            self.difference.calls = applied - 1
            self.difference.note(last, new)  # this one is measured, or the one before
        return new

    def _go_the_long_way(self, module: nn.Module | None, args: tuple[Any, ...], last: Any) -> Any:
        self.calls = max(self.calls, self.applied)  # those that went the short way are not counted apart
        return super().__call__(module, args, last)

    @functools.cached_property
    def _differences(self) -> Difference:
        return Difference(self.change)

    @property
    def difference(self) -> Difference:
        if self._first is not None:
            self._differences.put_off(self._first, self._version)
            self._first = None
        return self._differences


class PlainFunction(Edit):
    """The same for a function of somebody's. It gets a copy, and does not see its own calls of the model edited."""

    change: Function

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], last: Any = None) -> Any:
        scope = self.scope
        if (
            type(last) is not Tensor
            or scope not in here()
            or graph_task() != scope.task
            or saves_hooked(False)
            or not jvp_enabled()
        ):
            return super().__call__(module, args, last)
        call = self.calls
        self.calls = call + 1
        copy = last.clone()
        self.failures += 1
        token = hide(scope)
        try:
            new = self.change.function(copy)
        except Enough:
            self.failures -= 1
            raise
        except Exception as error:
            _blame(error, self.site.at(call))
            raise
        finally:
            unhide(token)
        self.change.returned = new is not None
        if new is None:
            new = copy
        elif not _are_alike(last, new):
            check_alike(last, new, self.site.at(call))
        self.failures -= 1
        self.applied += 1
        self.difference.note(last, new)
        return new


# By id: tensors that a value has, or had before an edit, at several leaves.
_at_several_leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def _note_several_leaves(value: Any, part: Any) -> None:
    """Note the tensors of a part that are also somewhere else in the value."""
    inside = Counter(id(tensor) for _, tensor in leaves(part))
    everywhere = Counter(id(tensor) for _, tensor in leaves(value))
    shared = (everywhere - inside).keys() & inside.keys()
    _at_several_leaves.update({id(tensor): tensor for _, tensor in leaves(part) if id(tensor) in shared})


def _is_at_several_leaves(tensor: Tensor) -> bool:
    return _at_several_leaves.get(id(tensor)) is tensor


_OLDER = Started(sys.maxsize, frozenset())


def _is_older(tensor: Tensor, since: Started | None) -> bool:
    """Whether a module's output was there before the call: its input, handed on, or something that it keeps.

    A view counts as older, since a write into it would take the hook off.
    """
    if since is None:
        return False
    node = tensor.grad_fn
    return node is None or node._sequence_nr() < since.number or node in since.given or tensor._is_view()


def _is_for_structures(change: Change | Function) -> bool:
    return isinstance(change, Function) or (change.name == "any_shape" and _is_for_structures(change.inner[0]))


def _are_alike(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) is Tensor and old.shape == new.shape and old.dtype == new.dtype
    except RuntimeError:  # a nested tensor has no shape
        return False


def _is_free(site: Site) -> bool:
    """Whether a value may get another shape: not one that is kept in its place."""
    return site.kind in ("module", "inner")


def check_alike(old: Any, new: Any, site: Site) -> None:
    """The model goes on with what it would have got: the same structure, shapes and dtypes."""
    before, after = dict(leaves(old)), dict(leaves(new))
    if before.keys() != after.keys() or (before and type(old) is not type(new) and not isinstance(old, Tensor)):
        hint = "return a tensor like the value" if isinstance(old, Tensor) else "the type and the leaves must stay"
        raise EditError(f"the change at {site} made {describe(new)} of {describe(old)}; {hint}")
    for path, tensor in before.items():
        other = after[path]
        if (shape_of(tensor), tensor.dtype) != (shape_of(other), other.dtype):
            where = site.at(site.address.call, path) if path else site  # type: ignore[arg-type]
            hint = "" if site.address.grad or not _is_free(site) else "; if you mean that, wrap it in any_shape(...)"
            raise EditError(f"the change at {where} made {describe(other)} of {describe(tensor)}{hint}")


def _blame(error: Exception, site: Site) -> None:
    """Put the address into the message of somebody's exception, whatever its type."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} (in the change at {site})",)
    else:
        error.add_note(f"in the change at {site}")
