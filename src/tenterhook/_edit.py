"""edit: change the values and gradients at some addresses, in the user's own loop.

with edit(model, {"layer3": zero(), "grad(layer2)": lambda g: g * 2}) as edits:
    model(x).sum().backward()
edits.report()                # how often each was applied, and how much it changed
"""

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook._address import Address, known_when_made
from tenterhook._difference import Difference
from tenterhook._errors import AddressError, EditError, TenterhookWarning
from tenterhook._graph import searchable
from tenterhook._inputs import Inputs
from tenterhook._replay import jvp_enabled, may_be_checkpointed, saves_hooked
from tenterhook._session import Report, Session, times
from tenterhook._sites import Selector, Site, resolve_all
from tenterhook._swap import Swap
from tenterhook._tap import Scope, Tap, graph_task, here, hidden, hide, unhide, with_part
from tenterhook._tree import Path, describe, itself, leaves, paths_of, put, rebuild, version_of
from tenterhook.changes import Change, Function, as_change

_WHOLE_OUTPUT = Address(".")[3:]
Changes = Mapping[Any, "Change | Callable[..., Any] | Tensor | float | list[Any]"]


class Edit(Tap):
    """A tap that puts something else in the place of a value or gradient."""

    changes = True
    applied = 0
    overwritten = False
    _swapped: Swap | None = None

    def __init__(self, site: Site, change: Change | Function, scope: Scope) -> None:
        super().__init__(site, scope)
        self.change = change
        if site.address.grad and site.kind == "module" and site.address.role == "out":
            self.needs_before = True
            self.pending = {}

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
        try:
            new = self._made(shown, call, path)
        except Exception as error:
            self.missed = "its change raised an exception"
            _blame(error, self.site.at(call, path))
            raise
        if new is shown:
            return None
        if not _are_alike(shown, new) and (self.change.keeps_shape or self.site.kind != "module"):
            check_alike(shown, new, self.site.at(call, path))
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

    def own(self, part: Any, value: Any, since: int | None) -> tuple[Any, Any]:
        """A gradient is changed on its way through this site alone: a tensor that others use is copied first."""
        self.copied = ()
        if part is value and type(part) is Tensor and not self.scope.frozen and not _is_older(part, since):
            return part, value
        elsewhere = _others(value, part)
        copies: dict[int, Tensor] = {}

        def copy(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                own = self.scope.thaw(tensor)
                shared = isinstance(value, Inputs) or id(tensor) in elsewhere or _is_older(tensor, since)
                lonely = own is not tensor or not own.requires_grad or self.is_copied_for_us(tensor)
                copies[id(tensor)] = own.clone() if shared and not lonely else own
            return copies[id(tensor)]

        own = rebuild(part, copy, opaque=itself)
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

    def await_shares(self, own: Any, part: Any, call: int, given: Inputs, frame: int) -> None:
        self.hook_leaves(own, call)
        pairs = zip(leaves(own), leaves(part), strict=True)
        self.pending[frame] = (
            None,
            [(t, version_of(t), original) for (_, t), (_, original) in pairs if t is not original],
        )

    def swap(self, tensor: Tensor) -> None:
        """Put the changed value into a parameter or buffer, until `swap_back`."""
        try:
            self._swapped = Swap(tensor)
            new = self._changed(tensor.detach(), 0)
            self._swapped.put(self._swapped.backup if new is None else new)
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

    def __init__(self, site: Site, change: Change, scope: Scope) -> None:
        self.site = site
        self.scope = scope
        self.change = change
        self.calls = self._version = 0
        self._first: Tensor | None = None

    applied = property(operator.attrgetter("calls"), lambda self, times: None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any = None) -> Any:
        scope = self.scope
        if (
            type(last) is not Tensor
            or scope not in here()
            or graph_task() != scope.task
            or ((saves_hooked(False) or not jvp_enabled()) and may_be_checkpointed())
        ):
            return super().__call__(module, args, last)
        call = self.calls
        self.calls = call + 1
        change = self.change
        try:
            new = change.function(last, **change.arguments)
        except Exception as error:
            _blame(error, self.site.at(call))
            raise
        if not last.is_floating_point():  # else a number changes neither shape nor dtype
            check_alike(last, new, self.site.at(call))
        if call:
            self.difference.note(last, new)
        else:
            self._first = last.detach() if last.requires_grad else last
            try:
                self._version = last._version
            except RuntimeError:  # an inference tensor does not tell when it is overwritten
                self._first, self._version = last.clone(), 0
        return new

    @functools.cached_property
    def difference(self) -> Difference:
        return Difference(self.change, None if self._first is None else (self._first, self._version))


class PlainFunction(Edit):
    """The same for a function of somebody's. It gets a copy, and does not see its own calls of the model edited."""

    change: Function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any = None) -> Any:
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
        token = hide(scope)
        try:
            new = self.change.function(copy)
        except Exception as error:
            self.missed = "its change raised an exception"
            _blame(error, self.site.at(call))
            raise
        finally:
            unhide(token)
        self.applied += 1
        if new is None:
            new = copy
        elif not _are_alike(last, new):
            check_alike(last, new, self.site.at(call))
        self.difference.note(last, new)
        return new


class edit:
    """Change the value or gradient at each address while the block runs.

        with edit(model, {"layer3": lambda v: v * 0, "grad(layer2)": clip_norm(1.0)}) as edits:
            model(x).sum().backward()
        print(edits.report())

    A change is a function `f(value)` or `f(value, site)` that returns the new value, or None where it wrote into the
    one it was given (a copy) or leaves it; a tensor or a number, which takes its place; a list of changes, made in
    turn; or one of `tenterhook.changes`. Parameters and buffers are changed on entering and restored on leaving.
    `frozen=True` gives values that need no gradient one all the same, so that it can be edited. `reduced=True`
    edits the gradients of parameters in `.grad` when the backward is over, after DDP's reduction, not before it.
    """

    def __init__(
        self, model: nn.Module | Tensor | Node, changes: Changes, *, frozen: bool = False, reduced: bool = False
    ) -> None:
        model = searchable(model, "edit")
        if not isinstance(changes, Mapping):
            raise TypeError(f"edit needs a dict of selector: change, got {type(changes).__name__}")
        self._model = model  # sites refer to it weakly
        self._session = Session(model, frozen=frozen, changes=True)
        self._session.reduced = reduced
        self._groups: list[tuple[Selector, list[Edit]]] = []
        every: list[Edit] = []
        scope = self._session.scope
        for selector, change in changes.items():
            made = change if type(change) is Change else _as_change(selector, change)
            plain = _plain_kind(made)
            taps: list[Edit] = []
            for site in resolve_all(model, (selector,)):
                if plain is not None and site.address[3:] == _WHOLE_OUTPUT and site.kind == "module":
                    taps.append(plain(site, made, scope))
                else:
                    taps.append(_tap(site, made, scope))
            self._groups.append((selector, taps))
            every += taps
        self._session.taps = every

    def __enter__(self) -> "edit":
        self._session.__enter__()
        for tap in self._session.refused:
            if not tap.site.wide:
                self._session.__exit__(EditError)
                raise EditError(f"{tap.site} cannot be edited: {tap.missed}")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(kind, *rest)
        if kind is None:
            self._complain()

    def _complain(self) -> None:
        for tap in self._session.swapped:
            if tap.overwritten:
                who = "by an optimizer, or the model itself"
                what = f"{tap.site} was changed inside the block ({who}) and is restored all the same"
                warnings.warn(what, TenterhookWarning, stacklevel=3)
        for selector, taps in self._groups:
            for tap in taps:
                if tap.applied:
                    break
            else:
                self._complain_of(selector, taps[0])

    def _complain_of(self, selector: Selector, tap: Edit) -> None:
        why = self._session.why_silent(tap)
        if tap.site.address.grad and "torch.no_grad()" in why:
            raise EditError(f"{selector} was never edited: {why}; run it with gradients")
        warnings.warn(f"{tap.site} was never edited: {why}", TenterhookWarning, stacklevel=4)

    def report(self) -> Report:
        """Per address: how often it was applied and how much it changed, or why it never was."""
        rows, notes = [], []
        for tap in self._session.taps:
            rows.append((str(tap.site), times(tap), repr(tap.change), *tap.difference.figures()))
            if not tap.fired:
                notes.append(f"{tap.site} was never edited: {self._session.why_silent(tap)}")
            elif remark := tap.difference.remark():
                notes.append(f"{tap.site}: {remark}")
        header = ("address", "applied", "change", "max |Δ|", "mean |Δ|")
        return Report(header, rows, [*notes, *self._session.notes()], (*header[1:2], *header[3:]))

    def save(self, file: str | File) -> None:
        """Write the changes to a safetensors file, for `load_edits`. Only ready-made ones: a file holds no code."""
        from tenterhook._edit_file import save

        save(file, list(self._pairs()))

    def _pairs(self) -> Iterator[tuple[str, Change | Function]]:
        for selector, taps in self._groups:
            for address in [selector] if isinstance(selector, str) else [str(tap.site) for tap in taps]:
                yield address, taps[0].change


def _plain_kind(change: Any) -> Any:
    if type(change) is Change:
        return PlainEdit if change.is_plain else None
    return PlainFunction if type(change) is Function and not change.takes_site else None


def _tap(site: Site, change: Change | Function, scope: Scope) -> Edit:
    if not known_when_made(site.address.call):
        raise AddressError(f"{site}: which call is the last is known only afterwards; an edit counts from 0")
    if site.address.grad and not change.keeps_shape:
        raise EditError(f"{site}: a gradient has the shape and dtype of its value; any_shape is for values")
    return Edit(site, change, scope)


def _as_change(selector: Selector, change: Any) -> Change | Function:
    try:
        return as_change(change)
    except TypeError as error:
        raise TypeError(f"{selector}: {error}") from None


def _others(value: Any, part: Any) -> set[int]:
    """The tensors of a value that are also somewhere else in it than in a part."""
    inside: dict[int, int] = {}
    for _, tensor in leaves(part):
        inside[id(tensor)] = inside.get(id(tensor), 0) + 1
    everywhere: dict[int, int] = {}
    for _, tensor in leaves(value):
        everywhere[id(tensor)] = everywhere.get(id(tensor), 0) + 1
    return {key for key, count in everywhere.items() if count > inside.get(key, count)}


def _is_older(tensor: Tensor, since: int | None) -> bool:
    """Whether a module's output was there before the call: its input, handed on, or something that it keeps.

    A view counts as older, since a write into it would take the hook off.
    """
    if since is None:
        return False
    return tensor.grad_fn is None or tensor.grad_fn._sequence_nr() < since or tensor._is_view()


def _is_for_structures(change: Change | Function) -> bool:
    return isinstance(change, Function) or (change.name == "any_shape" and _is_for_structures(change.inner[0]))


def _are_alike(old: Any, new: Any) -> bool:
    return type(old) is type(new) is Tensor and old.shape == new.shape and old.dtype == new.dtype


def check_alike(old: Any, new: Any, site: Site) -> None:
    """The model goes on with what it would have got: the same structure, shapes and dtypes."""
    before, after = dict(leaves(old)), dict(leaves(new))
    if isinstance(old, Tensor) != isinstance(new, Tensor) or before.keys() != after.keys():
        raise EditError(f"the change at {site} made {describe(new)} of {describe(old)}; it must have the same leaves")
    for path, tensor in before.items():
        other = after[path]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            where = site.at(site.address.call, path) if path else site  # type: ignore[arg-type]
            hint = "" if site.address.grad or site.kind != "module" else "; if you mean that, wrap it in any_shape(...)"
            raise EditError(f"the change at {where} made {describe(other)} of {describe(tensor)}{hint}")


def _blame(error: Exception, site: Site) -> None:
    """Put the address into the message of somebody's exception, whatever its type."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} (in the change at {site})",)
    else:
        error.add_note(f"in the change at {site}")
