"""Values inside a forward: what the copies of its code tell, handed to the taps of a session."""

import threading
import types
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import may_cover, split_number
from tenterhook.addresses.sites import Site
from tenterhook.errors import EditError, close_matches
from tenterhook.hooks.scope import Moment
from tenterhook.hooks.session import Session
from tenterhook.inside.calls import NOWHERE, Calls, Running, Where
from tenterhook.inside.copies import ask, original, withdraw
from tenterhook.inside.dispatch import Place
from tenterhook.inside.functions import codes_of, functions_of, is_followed
from tenterhook.inside.instrument import Want, codes_in
from tenterhook.inside.operation import attention, is_own_function, probabilities
from tenterhook.inside.pattern import FUSED, PROBABILITIES, Patterns
from tenterhook.platform.assembler import unsupported
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.bytecode import COMPREHENSIONS
from tenterhook.platform.modes import no_function_mode

if TYPE_CHECKING:
    from tenterhook.inside.taps import InnerTap, WantedTap

# The engines that are on in this thread or async task; none while somebody's change or observer runs.
now: "ContextVar[tuple[Inside, ...]]" = ContextVar("tenterhook inside", default=())
anywhere: "list[Inside]" = []  # those that are on in any thread
_has_torch_function = torch.overrides.has_torch_function
_CALLED_BY_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, Tensor)


class Inside:
    """What one session wants inside forwards."""

    def __init__(self, session: Session) -> None:
        if why := unsupported():
            raise RuntimeError(f"values inside a forward can be had on CPython 3.11 to 3.14; this is {why}")
        self._session = weakref.ref(session)
        self.scope = session.scope
        self.patterns = Patterns()
        self.calls = Calls(self, (id(ref()) for ref in session.modules), session.scope)
        self._modules = session.modules
        self._moment = Moment()
        self._taps: dict[tuple[int, str, int], list[InnerTap]] = {}
        self._met: dict[int, weakref.ref[FunctionType]] = {}
        self._kinds: set[object] = set()  # what else was seen to be called
        self._ran: set[int] = set()  # the ids of the codes that ran
        self._times_on = 0
        self._thread = threading.get_ident()
        self.was_elsewhere = False

    def want(self, tap: "WantedTap") -> None:
        """Look out for the values that a tap's address means."""
        self.patterns.add(tap)
        if self.patterns.any_name:
            tap.scope.moment = self._moment
        owner = tap.site.owner()
        if not isinstance(owner, nn.Module):
            self.calls.add_function(owner)

    # On and off, as with the function modes of a session.

    def switch_on(self) -> bool:
        """In this thread; False where it is on already."""
        if self in now.get():
            return False
        now.set((*now.get(), self))
        self._times_on += 1
        if self._times_on == 1:
            anywhere.append(self)
            for function in [ref() for ref in self._met.values()]:
                if function is not None:  # a checkpoint runs it again
                    ask(function, self, self.patterns.want)
            self._meet_owners()
        return True

    def switch_off(self) -> None:
        now.set(tuple(one for one in now.get() if one is not self))
        self._times_on = max(self._times_on - 1, 0)
        if not self._times_on and self in anywhere:
            anywhere.remove(self)
            withdraw(self)

    def place_hooks(self, session: Session) -> None:
        """It has none."""

    def for_this_thread(self) -> "Inside":
        return self

    def finish(self, failed: bool) -> None:
        self._moment.over()

    def notes(self) -> Iterable[str]:
        if self.was_elsewhere:
            yield "what ran in other threads was not looked into: a session sees the one that entered the block"

    # Which functions run a copy.

    def _meet_owners(self) -> None:
        """The functions that are known before anything runs."""
        patterns, kinds = self.patterns, set()
        for wanted in patterns.of.values():
            owner = wanted[0].tap.site.module
            for name in {name for pattern in wanted for name in pattern.helpers}:
                self._meet(getattr(type(owner), name, None))
                self._meet(getattr(nn.functional, name, None))
            if type(owner) not in kinds or not isinstance(owner, nn.Module) or "forward" in vars(owner):
                self._meet(getattr(owner, "function", owner))
                if patterns.of_helpers:
                    self._meet_properties(type(owner))
            kinds.add(type(owner))
        if patterns.probabilities:
            self._meet(nn.functional.multi_head_attention_forward)
        if patterns.all_helpers:
            for kind, module in {type(module): module for ref in self._modules if (module := ref())}.items():
                if kind not in kinds:
                    self._meet(module)

    def _meet_properties(self, kind: type) -> None:
        for member in (member for cls in kind.__mro__ if cls is not nn.Module for member in vars(cls).values()):
            if isinstance(member, property):
                self._meet(member.fget)
                self._meet(member.fset)

    def _meet(self, thing: Any, method: str = "") -> None:
        """Something may be called: have the functions that run then tell what is wanted of them."""
        for function in functions_of(thing, method):
            known = self._met.get(id(function))
            if known is not None and known() is function:
                continue
            self._met[id(function)] = weakref.ref(function)
            code = original(function.__code__)
            if not is_followed(code.co_filename):
                continue
            if is_own_function(function) and code.co_name not in self.patterns.helpers:
                continue
            if any(map(self.patterns.want, codes_in(code))):
                ask(function, self, self.patterns.want)

    def follow(self, callee: Any, method: str, argument: Any) -> None:
        """Something is about to be called, maybe with a function as its first argument."""
        self._moment.over()
        if isinstance(argument, FunctionType | MethodType | partial):
            self._meet(argument)
        kind = type(callee)
        if kind is FunctionType:
            known = self._met.get(id(callee))
            if known is None or known() is not callee:
                self._meet(callee)
        elif kind is partial or (kind is MethodType and not isinstance(callee.__self__, nn.Module)):
            self._meet(callee)
        elif not isinstance(callee, _CALLED_BY_C):
            key = id(callee.__func__) if kind is MethodType else id(callee) if kind is type else (kind, method)
            if key not in self._kinds:
                self._kinds.add(key)
                self._meet(callee, method)

    def instead_of(self, callee: Any, running: Running, place: Place) -> Any:
        """What is called in place of something that hides a value."""
        if callee is attention and self.patterns.probabilities:
            return partial(self._beside, running, place)
        if callee is _has_torch_function and place.code in FUSED:
            return lambda tensors: True
        return callee

    def _beside(self, running: Running, place: Place, *args: Any, **kwargs: Any) -> Any:
        """What a fused kernel does not give, for those who ask for it."""
        where = running.where
        if id(where.owner) in self.patterns.of:
            where = where._replace(prefix=f"{where.prefix}/{attention.__name__}")
            self._reach(where, PROBABILITIES, lambda: probabilities(*args, **kwargs), place, beside=True)
        return attention(*args, **kwargs)

    # What they tell.

    def begin(self, frame: Any, place: Place, me: nn.Module | None) -> Running | None:
        """A function begins that belongs to a call of the model; None if it does not."""
        patterns = self.patterns
        if not self._times_on or (me is not None and not patterns.of_helpers and id(me) not in patterns.of):
            return None
        want = patterns.want(place.code)
        where = self.calls.locate(frame, me) if want else NOWHERE
        if where.owner is None:
            return None
        self._ran.add(id(place.code))
        if id(where.owner) not in patterns.of or _is_wrapper(place, where):
            want = Want(follow=want.follow)
        return Running(self, want, where)

    def begins_elsewhere(self, place: Place, me: Any) -> None:
        """A function begins in a thread in which the session is not."""
        if threading.get_ident() != self._thread and id(me) in self.patterns.of and graph_task() == self.scope.task:
            self.was_elsewhere = True

    def came(self, running: Running, place: Place, name: str, value: Any, **how: bool) -> Any:
        """A value of a function that runs. Returns what the model goes on with, or None."""
        if not self._times_on:
            return None
        if not (place.handed_on and self.patterns.of_helpers):  # else what is called since is known of
            self._moment.over()
        return self._reach(running.where, name, value, place, **how)

    def _reach(self, where: Where, name: str, value: Any, place: Place, **how: bool) -> Any:
        """Hand a value to the taps of its address. Returns what takes its place, or None."""
        base = f"{where.prefix}/{name}"
        counts = where.call.counts
        number = counts.get(base, 0)
        counts[base] = number + 1
        key = (id(where.owner), base, number)
        taps = self._taps.get(key)
        if taps is None:
            taps = self._taps[key] = self._make(where, base, number, place)
        if not taps:
            return None
        token = now.set(())  # what a change or an observer computes is not the model's
        try:
            with no_function_mode():
                return _hand_to(taps, where.call.number, value, place, **how)
        finally:
            now.reset(token)

    def _make(self, where: Where, base: str, number: int, place: Place) -> "list[InnerTap]":
        """The taps of one address, when it is first met."""
        taps = []
        for pattern in self.patterns.of.get(id(where.owner), ()):
            if pattern.means(base, number):
                asked = pattern.tap.site
                inner = f"{base}#{number}" if number else base
                site = Site(asked.address._replace(inner=inner), where.owner, "inner", asked.wide)
                site.spot = place
                taps.append(pattern.tap.new_value(site))
                if (session := self._session()) is not None:
                    session.add(taps[-1])
        if number == 1:  # so the first has a number too
            for tap in self._taps.get((id(where.owner), base, 0), ()):
                tap.site.address = tap.site.address._replace(inner=f"{base}#0")
        return taps

    def why_silent(self, site: Site) -> str:
        """Why nothing came to an address; empty if the forward never ran."""
        owner = site.module
        name, number = split_number(site.address.inner)
        if any(key[:2] == (id(owner), name) for key in self._taps) and number is not None:
            return f"it was not assigned {number + 1 if number >= 0 else -number} times within one call"
        *helpers, last = name.split("/")[1:]
        codes = [code for code in codes_of(owner) if id(code) in self._ran]
        if not codes:
            if self.was_elsewhere:
                return "it ran in another thread, and a session sees the one that entered the block"
            return "" if isinstance(owner, nn.Module) else "it was not called inside this session"
        if helpers and "*" not in helpers[-1]:
            codes = self._helpers_that_ran(helpers[-1])
            if not codes:
                return f"no function {helpers[-1]} ran in it; see sites(model, *inputs)"
        return _why_not_assigned(last, codes)

    def _helpers_that_ran(self, name: str) -> list[CodeType]:
        met = (function for ref in self._met.values() if (function := ref()) is not None)
        every = (code for function in met for code in codes_in(original(function.__code__)))
        return [code for code in every if code.co_name == name and id(code) in self._ran]


def _why_not_assigned(name: str, codes: list[CodeType]) -> str:
    """Why no value of that name came from some functions that ran."""
    names = sorted({variable for code in codes for variable in (*code.co_varnames, *code.co_cellvars)})
    if name in names:
        return "no tensor came to it: that line did not run, or it holds something else"
    near = close_matches(name, names)
    hint = f"did you mean {', '.join(near)}?" if near else f"its variables are {', '.join(names[:12]) or 'none'}"
    return f"no value of that name came while it ran; {hint} (all of them: sites(model, *inputs))"


def _is_wrapper(place: Place, where: Where) -> bool:
    """Whether a function stands for a forward, as a decorator's does, and is not itself one."""
    if where.prefix or place.code.co_name == "forward" or place.code.co_name in COMPREHENSIONS:
        return False
    return place.code not in codes_of(where.owner)


def _hand_to(
    taps: "list[InnerTap]",
    call: int,
    value: Any,
    place: Place,
    older: bool = False,
    beside: bool = False,
    in_place: bool = False,
) -> Any:
    """Have some taps look at a value of one call, or change it. Returns what takes its place, or None.

    `older`: it may have been there before. `beside`: it is computed for us alone. `in_place`: it was written into a
    tensor, and nobody takes it.
    """
    value = value() if beside else value
    changed = None
    for tap in taps:
        is_grad = tap.site.address.grad
        tap.calls = call
        if beside and (tap.changes or is_grad):
            if may_cover(tap.site.address.call, call):
                _refuse(tap)
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


def _refuse(tap: "InnerTap") -> None:
    tap.missed = "it is computed beside the fused kernel, which does not use it: it can be looked at, and no more"
    if tap.changes and not tap.site.wide:
        raise EditError(f"{tap.site} cannot be edited: {tap.missed}")
