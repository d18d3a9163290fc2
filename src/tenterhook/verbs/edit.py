"""edit: change the values and gradients at some addresses, in the user's own loop.

with edit(model, {"layer3": zero(), "grad(layer2)": lambda g: g * 2}) as edits:
    model(x).sum().backward()
edits.report()                # how often each was applied, and how much it changed
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as File
from typing import Any, Never

from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook import markup
from tenterhook.addresses.grammar import known_when_made
from tenterhook.addresses.graph import searchable
from tenterhook.addresses.sites import Selector, Site, resolve, site_named
from tenterhook.changes.change import Change, as_change
from tenterhook.changes.function import Function
from tenterhook.errors import AddressError, EditError, TenterhookWarning
from tenterhook.hooks.report import Report
from tenterhook.hooks.scope import Scope
from tenterhook.hooks.session import Session, times
from tenterhook.verbs.replace import PlainEdit, PlainFunctionEdit, PlainReplace, Replace, ReplaceByFunction
from tenterhook.verbs.taps import tap_for

_PLAIN: dict[Any, tuple[Any, Any]] = {
    Change: (PlainEdit, PlainReplace),
    Function: (PlainFunctionEdit, ReplaceByFunction),
}
_CAUGHT = "its change failed, and the exception was caught"
_STRICT = "edit(..., strict=False) makes this a warning"
_IS_GRADIENT = operator.attrgetter("site.address.grad")
Changes = Mapping[Any, "Change | Callable[..., Any] | Tensor | float | list[Any]"]


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
    A change that was made nowhere is an EditError when the block ends; with `strict=False` it is a warning.
    `eager=True` has compiled code run as it is written.
    """

    def __init__(
        self,
        model: nn.Module | Tensor | Node,
        changes: Changes,
        *more: Never,
        frozen: bool = False,
        reduced: bool = False,
        strict: bool = True,
        eager: bool = False,
    ) -> None:
        model = searchable(model, "edit")
        _check_is_one_dict(changes, more)
        self._model = model  # sites refer to it weakly
        self._strict = strict
        self._session = Session(model, verb="edit", frozen=frozen, changes=True, reduced=reduced, eager=eager)
        self._groups: list[tuple[Selector, list[Any]]] = []
        scope = self._session.scope
        for selector, change in changes.items():
            made = change if type(change) is Change else _as_change(selector, change)
            if (site := site_named(model, selector)) is not None:
                taps = [_tap(site, made, scope)]
            else:
                taps = [_tap(site, made, scope) for site in resolve(model, selector)]
            self._groups.append((selector, taps))
        self._taps = tuple([tap for _, taps in self._groups for tap in taps])
        # The gradient at a site is that of the value that the model goes on with, so values are changed first.
        self._session.taps = sorted(self._taps, key=_IS_GRADIENT)

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
            if tap.was_overwritten:
                who = "by an optimizer, or the model itself"
                what = f"{tap.site} was changed inside the block ({who}) and is restored all the same"
                warnings.warn(what, TenterhookWarning, stacklevel=3)
        each = [[one for tap in taps for one in tap.each()] for _, taps in self._groups]
        silent = [taps for taps in each if not any(tap.fired for tap in taps)]
        for taps in each:
            for tap in taps if taps not in silent else ():
                if tap.action.failures:
                    warnings.warn(_failed(tap), TenterhookWarning, stacklevel=3)
        never = [self._never(taps[0]) for taps in silent]
        if never and self._strict:
            raise EditError("\n  ".join([*never, _STRICT]))
        for what in never:
            warnings.warn(what, TenterhookWarning, stacklevel=3)

    def _never(self, tap: Any) -> str:
        why = self._why_silent(tap)
        hint = "; run it with gradients" if tap.site.address.grad and "torch.no_grad()" in why else ""
        return f"{tap.site} was never edited: {why}{hint}"

    def report(self) -> Report:
        """Per address: how often it was applied and how much it changed, or why it never was."""
        rows, notes = [], []
        for tap in self._each():
            difference = tap.action.difference
            difference.calls = tap.fired
            rows.append((str(tap.site), times(tap), repr(tap.action.change), *difference.figures()))
            if not tap.fired:
                notes.append(self._never(tap))
            elif tap.action.failures:
                notes.append(_failed(tap))
            elif remark := difference.remark():
                notes.append(f"{tap.site}: {remark}")
        header = ("address", "applied", "change", "max |Δ|", "mean |Δ|")
        return Report(header, rows, [*notes, *self._session.notes()], (*header[1:2], *header[3:]))

    def _why_silent(self, tap: Any) -> str:
        return _CAUGHT if tap.action.failures else self._session.why_silent(tap)

    def _each(self) -> Iterator[Any]:
        """The taps, those inside a forward under the names that they have got."""
        for tap in self._taps:
            yield from tap.each()

    def __repr__(self) -> str:
        if self._session.was_entered:
            return str(self.report())
        return f"<edit of {', '.join(f'{selector}: {taps[0].action.change}' for selector, taps in self._groups)}>"

    def _repr_html_(self) -> str:
        head = "edits" if self._session.was_entered else "edits, which act in a `with` block"
        return markup.page(markup.title(head), self.report().html())

    def save(self, file: str | File) -> None:
        """Write the changes to a safetensors file, for `load_edits`. Only ready-made ones: a file holds no code."""
        from tenterhook.verbs.edit_file import save

        save(file, list(self._written()))

    def _written(self) -> Iterator[tuple[str, Change | Function, set[int]]]:
        for selector, taps in self._groups:
            written = [(selector, taps)] if isinstance(selector, str) else [(str(tap.site), [tap]) for tap in taps]
            for address, some in written:
                yield address, taps[0].action.change, {id(_thing(tap.site)) for tap in some}


def _check_is_one_dict(changes: object, more: tuple[object, ...]) -> None:
    if more or not isinstance(changes, Mapping):
        got = f"got {type(changes).__name__}" + (f" and {len(more)} more" if more else "")
        raise TypeError(f'edit needs one dict of selector: change, as in edit(model, {{"fc": zero()}}); {got}')


def _thing(site: Site) -> Any:
    return site.tensor if site.kind in ("parameter", "buffer") else site.module


def _failed(tap: Any) -> str:
    applied, failures = tap.action.applied, tap.action.failures
    return f"{tap.site}: its change failed in {failures} of {failures + applied} calls, and the exception was caught"


def _tap(site: Site, change: Change | Function, scope: Scope) -> Any:
    if change.is_plain and site.is_whole_output:
        tap, action = _PLAIN[type(change)]
        return tap(site, scope, action(change))
    if not known_when_made(site.address):
        raise AddressError(f"{site}: which one is the last is known only afterwards; an edit counts from 0")
    if site.address.grad and not change.keeps_shape:
        raise EditError(f"{site}: a gradient has the shape and dtype of its value; any_shape is for values")
    return tap_for(site, scope, lambda: Replace(change))


def _as_change(selector: Selector, change: Any) -> Change | Function:
    try:
        return as_change(change)
    except TypeError as error:
        raise TypeError(f"{selector}: {error}") from None
