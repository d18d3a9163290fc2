"""What is asked for inside a forward: addresses as patterns, and what happens to a value that one of them means."""

import inspect
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tenterhook._address import matches, may_cover, split_number
from tenterhook._bytecode import COMPREHENSIONS
from tenterhook._errors import EditError
from tenterhook._frames import has_variable
from tenterhook._names import Spot, spots
from tenterhook._operation import is_functional, is_operation
from tenterhook._tap import Tap

_ANYTHING = object()
_NO_FORWARD = nn.modules.module._forward_unimplemented.__code__


class Pattern:
    """An address as it was asked for, with the tap that is made again for each value which it means."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.name, self.number = split_number(tap.site.address.inner)
        *self.helpers, self.last = self.name.split("/")[1:]
        self.is_of_helpers = bool(self.helpers) or "**" in self.last

    def may_be_in(self, code: types.CodeType) -> bool:
        """Whether a function may hold such a value, by its name."""
        if not self.helpers:
            return code.co_name == "forward" or code.co_name in COMPREHENSIONS or code in codes_of(self.tap.site.module)
        helper = self.helpers[-1]
        if "*" in helper or code.co_name in COMPREHENSIONS or code.co_name.strip("<>") == helper:
            return True
        return code.co_name == "forward" and helper in code.co_qualname.split(".")  # it goes by its class

    def may_name(self, code: types.CodeType) -> bool:
        """Whether a function that may hold such a value has a variable or operation of its name."""
        if self.helpers or "*" in self.last or has_variable(code, self.last) or is_operation(self.last):
            return True
        return not any(has_variable(own, self.last) for own in codes_of(self.tap.site.module))

    def givers(self) -> Iterable[nn.Module]:
        """The modules whose outputs such a variable may take; empty if operations alone give it its value."""
        owner = self.tap.site.module
        if not isinstance(owner, nn.Module):
            return ()
        forwards, found = _forwards(owner), [owner]
        if not forwards or self.helpers or "*" in self.last:
            return owner.modules()
        if not any(self.last in spots(forward.__code__).givers for forward in forwards):
            return ()
        for forward in forwards:
            known = spots(forward.__code__)
            # A change comes in time if each call of a module is an occasion to look at what was assigned before it.
            is_any = self.tap.changes or self.last in known.shared
            for path in (None,) if is_any else known.calls_giving(self.last):
                module = _called(path, forward, owner)
                if module is _ANYTHING:
                    return owner.modules()
                found += [] if module is None else [module]
        return found

    def means(self, name: str, number: int) -> bool:
        """Whether it means the `number`-th assignment of a name within one call."""
        if self.number is not None and self.number >= 0 and self.number != number:
            return False
        return matches(self.name, name)


def codes_of(owner: Any) -> list[types.CodeType]:
    """The code of a module's forward, its parents' too, or of a function that is no module."""
    if not isinstance(owner, nn.Module):
        return list(getattr(owner, "codes", ()))
    return [forward.__code__ for forward in _forwards(owner)]


def _forwards(owner: nn.Module) -> list[types.FunctionType]:
    """The forward of a module, and its parents'."""
    forwards = [vars(owner).get("forward"), *(vars(cls).get("forward") for cls in type(owner).__mro__)]
    plain = (inspect.unwrap(forward) for forward in forwards if callable(forward))
    functions = (getattr(forward, "__func__", forward) for forward in plain)
    return [one for one in functions if isinstance(one, types.FunctionType) and one.__code__ is not _NO_FORWARD]


def _called(path: str | None, forward: types.FunctionType, owner: nn.Module) -> Any:
    """What is called in a forward, as it is written there: a module, None for an operation, else anything."""
    code = forward.__code__
    first, *names = (path or "").split(".")
    if not names or first in code.co_cellvars or first in code.co_freevars:
        return _ANYTHING
    if first in code.co_varnames[: code.co_argcount][:1]:
        thing: Any = owner
        for name in names:
            thing = thing._modules.get(name) if isinstance(thing, nn.Module) else None
        return _ANYTHING if thing is None else thing
    if first in code.co_varnames:
        return None if len(names) == 1 and hasattr(Tensor, names[0]) else _ANYTHING
    thing = forward.__globals__.get(first)
    for name in names:
        thing = vars(thing).get(name) if isinstance(thing, types.ModuleType) else None
    return None if isinstance(thing, types.BuiltinFunctionType) or is_functional(names[-1], thing) else _ANYTHING


def hand_to(
    taps: list[Tap],
    call: int,
    value: Any,
    spot: Spot,
    older: bool = False,
    late: bool = False,
    beside: bool = False,
    in_place: bool = False,
) -> Any:
    """Have some taps look at a value of one call, or change it. Returns what takes its place, or None.

    `older`: the operation only handed it on. `late`: it is in use. `beside`: it is computed for us alone. `in_place`:
    the operation wrote it into a tensor, and nobody takes what it returned.
    """
    value = value() if beside else value
    changed = None
    for tap in taps:
        is_grad = tap.site.address.grad
        tap.calls = call
        if (late and tap.changes) or (beside and (tap.changes or is_grad)):
            if may_cover(tap.site.address.call, call):
                _refuse(tap, spot, beside)
        elif in_place and tap.changes:
            new = tap(None, (), value if is_grad else value.clone())
            if new is not None:
                value.copy_(new)
        else:
            tap.older = older
            new = tap(None, (), value if changed is None else changed)
            changed = changed if new is None else new
        if beside:
            tap.note = "computed beside the fused kernel, from its own arguments: a second attention in time and memory"
    return changed


def _refuse(tap: Tap, spot: Spot, beside: bool) -> None:
    if beside:
        tap.missed = "it is computed beside the fused kernel, which does not use it: it can be looked at, and no more"
    else:
        tap.missed = f"it is no operation's own result there ({spot.text or spot.source}); edit it where it is made"
    if not tap.site.wide:
        if not tap.changes:
            return
        raise EditError(f"{tap.site} cannot be edited: {tap.missed}")
