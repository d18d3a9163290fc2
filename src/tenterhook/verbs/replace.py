"""How values and gradients are replaced: the actions of edit."""

import functools
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.sites import Site
from tenterhook.changes.change import Change
from tenterhook.changes.function import Function
from tenterhook.errors import EditError
from tenterhook.hooks.outputs import OutputTap
from tenterhook.hooks.scope import here, hidden, hide, unhide
from tenterhook.hooks.tap import Action, Call, Tap
from tenterhook.platform.autograd import graph_task, jvp_enabled, saves_hooked
from tenterhook.platform.checkpoints import Enough, may_be_checkpointed
from tenterhook.platform.modes import dispatch_modes
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Path, describe, leaves, paths_of, put, shape_of
from tenterhook.verbs.difference import Difference

_NONE = object()


class Replace(Action):
    """Put what a change makes in the place of a value or gradient."""

    changes = True
    applied = 0
    failures = 0  # how often the change raised an exception, or made something else of the value

    def __init__(self, change: Change | Function) -> None:
        self.change = change

    @property
    def why_not_compiled(self) -> str:  # type: ignore[override]
        if not self.change.keeps_shape:
            return "may get another shape"
        return "is changed by tensors that require a gradient" if self.change.learns else ""

    def fired(self, tap: Tap) -> int:
        return self.applied

    @functools.cached_property
    def difference(self) -> Difference:
        """How much it changed."""
        return Difference(self.change)

    def on_value(self, tap: Tap, value: Any, call: Call) -> Any:
        new = self._changed(tap, value, call.number)
        if not call.again:
            self._count(value, new)
        return new

    def on_gradient(self, tap: Tap, grad: Tensor | None, call: int, path: Path) -> Tensor | None:
        if grad is None:
            return None
        new = self._changed(tap, grad, call, path)
        self._count(grad, new)
        return new

    def _count(self, old: Any, new: Any) -> None:
        self.applied += 1
        self.difference.note(old, new)

    def _changed(self, tap: Tap, old: Any, call: int, path: Path = ()) -> Any:
        """What the change makes of a value; None where it leaves it as it is."""
        shown = old.plain() if isinstance(old, Inputs) else old
        self.failures += 1
        try:
            new = self._made(tap, shown, call, path)
        except Enough:
            self.failures -= 1
            raise
        except Exception as error:
            _blame(error, tap.site.at(call, path), _leaf_address(error, tap.site, shown))
            raise
        if not _are_alike(shown, new) and (self.change.keeps_shape or not _is_free(tap.site)):
            check_alike(shown, new, tap.site.at(call, path))
        self.failures -= 1
        if new is shown and isinstance(new, Tensor):
            return None
        return old.with_plain(new) if isinstance(old, Inputs) else new

    def _made(self, tap: Tap, value: Any, call: int, path: Path) -> Any:
        change = self.change
        if type(change) is Change and not change.takes_site and isinstance(value, Tensor):
            return change(value)
        site = tap.site.at(call, path)
        with hidden(tap.scope):
            if isinstance(value, Tensor) or change.takes_structures:
                return change(value, site)
            # A ready-made change is for a tensor; in a structure with just one, it is for that one.
            found = list(leaves(value))
            if len(found) != 1:
                have = f"with {paths_of(value)}" if found else "without any"
                raise EditError(f"{change} changes one tensor, and this is {describe(value)}, {have}")
            ((inside, tensor),) = found
            return put(value, inside, change(tensor, site))


class PlainReplace(Replace):
    """For a ready-made change with numbers, of a module's whole output, at every call.

    Such a change keeps the shape, and can be made again on the old value to see the difference, so that the first
    call has only to be remembered.
    """

    change: Change
    _first: Tensor | None = None  # the value before the change at the first call
    _version = 0

    def remember_first(self, value: Tensor) -> None:
        """At the first call: keep the value for later."""
        self._version = value._version
        self._first = value.detach() if value.requires_grad else value
        self.applied = 1

    def count_plainly(self, old: Tensor, new: Tensor) -> None:
        """At a later call; few of them are measured."""
        self.applied = applied = self.applied + 1
        if applied < 10 or not applied & (applied - 1) or not (applied - 1) & (applied - 2):
            self.difference.calls = applied - 1
            self.difference.note(old, new)  # this one is measured, or the one before

    @functools.cached_property
    def _differences(self) -> Difference:
        return Difference(self.change)

    @property
    def difference(self) -> Difference:
        if self._first is not None:
            self._differences.put_off(self._first, self._version)
            self._first = None
        return self._differences


class PlainEdit(OutputTap):
    """The common case without a detour."""

    action: PlainReplace

    def __call__(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        scope, action = self.scope, self.action
        if (
            type(output) is not Tensor
            or (operand := action.change.operands.get(output.dtype, _NONE)) is _NONE  # its shape or dtype might change
            or scope not in here()
            or graph_task() != scope.task
            or ((saves_hooked(False) or not jvp_enabled()) and may_be_checkpointed())
            or dispatch_modes()  # somebody looks at each operation
        ):
            return self._go_the_long_way(module, args, output)
        try:
            new = action.change.operator(output, operand)
            if not action.applied:
                action.remember_first(output)
                return new
        except Exception:  # the long way fails too and says where, or keeps an inference tensor, which has no version
            return self._go_the_long_way(module, args, output)
        action.count_plainly(output, new)
        return new

    def _go_the_long_way(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        self.calls = max(self.calls, self.action.applied)  # those that went the short way are not counted apart
        return super().__call__(module, args, output)


class ReplaceByFunction(Replace):
    """For `PlainFunctionEdit`."""

    change: Function

    def made_plainly(self, tap: Tap, value: Tensor, call: int) -> Any:
        """What the function makes of a tensor, without the detour for structures."""
        copy = value.clone()
        self.failures += 1
        token = hide(tap.scope)
        try:
            new = self.change.function(copy)
        except Enough:
            self.failures -= 1
            raise
        except Exception as error:
            _blame(error, tap.site.at(call))
            raise
        finally:
            unhide(token)
        self.change.returned = new is not None
        if new is None:
            new = copy
        elif not _are_alike(value, new):
            check_alike(value, new, tap.site.at(call))
        self.failures -= 1
        self._count(value, new)
        return new


class PlainFunctionEdit(OutputTap):
    """A function of the user's on a module's whole output. It gets a copy; its own calls of the model are hidden."""

    action: ReplaceByFunction

    def __call__(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        scope = self.scope
        if (
            type(output) is not Tensor
            or scope not in here()
            or graph_task() != scope.task
            or saves_hooked(False)
            or not jvp_enabled()
        ):
            return super().__call__(module, args, output)
        call = self.calls
        self.calls = call + 1
        return self.action.made_plainly(self, output, call)


def _are_alike(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) is Tensor and old.shape == new.shape and old.dtype == new.dtype
    except RuntimeError:  # a nested tensor has no shape
        return False


def _is_free(site: Site) -> bool:
    """True if a value may get another shape: not one that is kept in its place."""
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


def _blame(error: Exception, site: Site, hint: str = "") -> None:
    """Put the address into the message of somebody's exception, whatever its type."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} (in the change at {site}{hint})",)
    else:
        error.add_note(f"in the change at {site}{hint}")


def _leaf_address(error: Exception, site: Site, value: Any) -> str:
    """Where a change of a structured value failed: how one of its tensors is written."""
    paths = [] if isinstance(value, Tensor) else [path for path, _ in leaves(value)]
    if not paths or isinstance(error, EditError):  # which says itself what it needs
        return ""
    address = site.address._replace(leaf=(*site.address.leaf, *paths[0]))
    return f", a {describe(value)}; the address of one tensor in it is {address}"
