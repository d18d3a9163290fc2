"""What is asked for inside a forward: addresses as patterns, and what happens to a value that one of them means."""

import inspect
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import matches, may_cover, split_number
from tenterhook.errors import EditError
from tenterhook.inside.frames import has_variable
from tenterhook.inside.names import Spot, spots
from tenterhook.inside.operation import is_functional, is_operation
from tenterhook.platform.bytecode import COMPREHENSIONS

if TYPE_CHECKING:
    from tenterhook.inside.taps import InnerTap, WantedTap

_ANYTHING = object()
_NO_FORWARD = nn.modules.module._forward_unimplemented.__code__


class Pattern:
    """An address as it was asked for, with the tap that is made again for each value which it means."""

    def __init__(self, tap: "WantedTap") -> None:
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
        if self.helpers or "*" in self.last or has_variable(code, self.last) or is_called(self.last, code):
            return True
        return not any(has_variable(own, self.last) for own in codes_of(self.tap.site.module))

    def givers(self) -> Iterable[nn.Module]:
        """The modules whose calls are occasions to look at such a variable; none if operations alone give it its value.

        If it gets what a module or an operation makes, that is the occasion; else anything may write into it before.
        """
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
            if self.tap.changes or self.last in known.shared:
                return owner.modules()
            for call in known.calls_giving(self.last):
                module = _ANYTHING if call is None else _called(call, forward, owner)
                if module is _ANYTHING:
                    return owner.modules()
                if isinstance(module, nn.Module):
                    found.append(module)
        return found

    def means(self, name: str, number: int) -> bool:
        """Whether it means the `number`-th assignment of a name within one call."""
        if self.number is not None and self.number >= 0 and self.number != number:
            return False
        return matches(self.name, name)


def is_called(name: str, code: types.CodeType) -> bool:
    """Whether an operation of that name may run in a function."""
    return is_operation(name) or name in code.co_names or name in spots(code).called


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


def _called(call: Spot, forward: types.FunctionType, owner: nn.Module) -> Any:
    """What is called in a forward, as far as can be told before: a module, None for an operation, else anything."""
    code, known = forward.__code__, spots(forward.__code__)
    first, *names = (call.called or "").split(".")
    if not names or first in code.co_cellvars or first in code.co_freevars:
        return _ANYTHING
    if first in code.co_varnames[: code.co_argcount][:1]:
        thing: Any = None if f"{first}.{names[0]}" in known.shared else owner
        for name in names:
            thing = thing._modules.get(name) if isinstance(thing, nn.Module) else None
        return _ANYTHING if thing is None else thing
    if first in code.co_varnames:  # a method of a tensor, if it was one
        return None if call.offset in known.proven and hasattr(Tensor, names[-1]) else _ANYTHING
    thing = forward.__globals__.get(first)
    for name in names:
        thing = vars(thing).get(name) if isinstance(thing, types.ModuleType) else None
    is_own = isinstance(thing, types.BuiltinFunctionType) and thing is vars(torch).get(names[-1])
    return None if is_own or (thing is not None and is_functional(names[-1], thing)) else _ANYTHING


def hand_to(
    taps: "list[InnerTap]",
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


def _refuse(tap: "InnerTap", spot: Spot, beside: bool) -> None:
    if beside:
        tap.missed = "it is computed beside the fused kernel, which does not use it: it can be looked at, and no more"
    else:
        tap.missed = f"it is no operation's own result there ({spot.text or spot.source}); edit it where it is made"
    if not tap.site.wide:
        if not tap.changes:
            return
        raise EditError(f"{tap.site} cannot be edited: {tap.missed}")
