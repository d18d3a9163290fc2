"""Values inside a forward: what the copies of its code tell, handed to the taps of a session."""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import may_cover
from tenterhook.addresses.sites import Site
from tenterhook.errors import AddressError, EditError
from tenterhook.hooks.gradients import LONG_AGO, CallStart
from tenterhook.hooks.scope import Moment
from tenterhook.hooks.session import Session
from tenterhook.inside.calls import NOWHERE, Calls, Running, Where
from tenterhook.inside.dispatch import Place
from tenterhook.inside.following import Following
from tenterhook.inside.functions import codes_of
from tenterhook.inside.instrument import Want
from tenterhook.inside.operation import attention, probabilities
from tenterhook.inside.pattern import FUSED, PROBABILITIES, Patterns
from tenterhook.platform.assembler import unsupported
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.bytecode import COMPREHENSIONS
from tenterhook.platform.modes import no_function_mode

if TYPE_CHECKING:
    from tenterhook.inside.taps import InnerTap, WantedTap

Hand = Callable[["list[InnerTap]", Any], Any]

# The engines that are on in this thread or async task; none while somebody's change or observer runs.
now: "ContextVar[tuple[Inside, ...]]" = ContextVar("tenterhook inside", default=())
anywhere: "list[Inside]" = []  # those that are on in any thread
_has_torch_function = torch.overrides.has_torch_function


class Inside:
    """What one session wants inside forwards."""

    def __init__(self, session: Session) -> None:
        if why := unsupported():
            raise AddressError(
                f"addresses inside a forward need CPython 3.11 to 3.14, and this is {why};"
                " those of modules, parameters and gradients work here"
            )
        self._session = weakref.ref(session)
        self.scope = session.scope
        self.patterns = Patterns()
        self.calls = Calls(self, session)
        self.following = Following(self.patterns, self._session)
        self._moment = Moment()
        self._taps: dict[tuple[int, str, int], list[InnerTap]] = {}
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
            self.following.start()
        return True

    def switch_off(self) -> None:
        now.set(tuple(one for one in now.get() if one is not self))
        self._times_on = max(self._times_on - 1, 0)
        if not self._times_on:
            self.following.stop()
            if self in anywhere:
                anywhere.remove(self)

    def restart(self) -> None:
        """Begin to count again."""
        self._taps.clear()
        self._ran.clear()
        self.calls.restart()
        self._moment.over()

    def place_hooks(self, session: Session) -> None:
        """It has none."""

    def for_this_thread(self) -> "Inside":
        return self

    def finish(self, failed: bool) -> None:
        self._moment.over()

    def notes(self) -> Iterable[str]:
        if self.was_elsewhere:
            yield "what ran in other threads was not looked into: a session sees the one that entered the block"
        for name, why in self.following.refused.items():
            yield f"{name} was not looked into: {why}"

    def follow(self, callee: Any, running: Running, place: Place, argument: Any) -> Any:
        """Something is about to be called. Returns what is called: another where it hides a value."""
        self._moment.over()
        self.following.follow(callee, place.name, argument)
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
            self._reach(where, PROBABILITIES, lambda: probabilities(*args, **kwargs), place, beside)
        return attention(*args, **kwargs)

    # In compiled code.

    def traced(self, model: Any) -> Any:
        """What compiled code has in place of it."""
        from tenterhook.inside.compiled import TracedInside

        return TracedInside(self, model)

    def ran(self, owner: Any) -> None:
        """The forward of a module ran."""
        self._ran.update(map(id, codes_of(owner)))

    def handed(self, where: Where, name: str, value: Any, place: Place, hand: "Hand") -> None:
        """A value came from compiled code."""
        self._moment.over()
        self._reach(where, name, value, place, hand)

    # What they tell.

    def begin(self, frame: Any, place: Place, me: nn.Module | None) -> Running | None:
        """A function begins that belongs to a call of the model; None if it does not."""
        patterns = self.patterns
        is_off = not self._times_on or self.scope.rests
        if is_off or (me is not None and id(me) not in patterns.of and self._goes_around(me)):
            return None
        want = patterns.want(place.code)
        where = self.calls.locate(frame, me) if want else NOWHERE
        is_wanted = id(where.owner) in patterns.of
        if where.owner is None or not (is_wanted or patterns.all_helpers):
            return None
        self._ran.add(id(place.code))
        if not is_wanted or _is_wrapper(place, where):
            want = Want(follow=want.follow)
        return Running(self, want, where)

    def _goes_around(self, me: nn.Module) -> bool:
        """Whether nothing that is wanted is in, or below, the methods of a module of which nothing is."""
        if self.calls.functions:  # this may be one of them, as a bound method
            return False
        return not self.patterns.of_helpers or (not self.patterns.all_helpers and self.calls.is_of_model(me))

    def begins_elsewhere(self, place: Place, me: Any) -> None:
        """A function begins in a thread in which the session is not."""
        if threading.get_ident() != self._thread and id(me) in self.patterns.of and graph_task() == self.scope.task:
            self.was_elsewhere = True

    def came(self, running: Running, place: Place, name: str, value: Any, hand: "Hand") -> Any:
        """A value of a function that runs. Returns what the model goes on with, or None."""
        if not self._times_on:
            return None
        if not (place.handed_on and self.patterns.of_helpers):  # else what is called since is known of
            self._moment.over()
        return self._reach(running.where, name, value, place, hand)

    def _reach(self, where: Where, name: str, value: Any, place: Place, hand: "Hand") -> Any:
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
        for tap in taps:
            tap.begin(where.call.number)
        token = now.set(())  # what a change or an observer computes is not the model's
        try:
            with no_function_mode():
                return hand(taps, value)
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

    def names_that_came(self, owner: Any) -> set[str]:
        """The names, as they are in addresses, of the values of an owner that came, whether asked for or not."""
        return {base for number, base, _ in self._taps if number == id(owner)}

    def has_run(self, code: CodeType) -> bool:
        """Whether a function ran a copy of its code, in a call of the model."""
        return id(code) in self._ran


def _is_wrapper(place: Place, where: Where) -> bool:
    """Whether a function stands for a forward, as a decorator's does, and is not itself one."""
    if where.prefix or place.code.co_name == "forward" or place.code.co_name in COMPREHENSIONS:
        return False
    return place.code not in codes_of(where.owner)


def new_value(taps: "list[InnerTap]", value: Any, since: CallStart | None = None) -> Any:
    """Have some taps look at a value that was just made, or change it. Returns what takes its place, or None."""
    changed = None
    for tap in taps:
        new = tap.came(value if changed is None else changed, since)
        changed = changed if new is None else new
    return changed


def older_value(taps: "list[InnerTap]", value: Any) -> Any:
    """The same of one that may have been there before, and that others may hold."""
    return new_value(taps, value, LONG_AGO)


def written(taps: "list[InnerTap]", value: Tensor) -> None:
    """Something was written into a tensor, and nobody takes it: what changes it is written into it too."""
    for tap in taps:
        new = tap.handle(value.clone() if tap.changes and not tap.site.address.grad else value, None)
        if tap.changes and new is not None:
            value.copy_(new)


def beside(taps: "list[InnerTap]", compute: Callable[[], Tensor]) -> None:
    """A value that is computed for us alone: it can be looked at, and no more."""
    value = compute()
    for tap in taps:
        tap.note = "computed beside the fused kernel, from its own arguments: a second attention in time and memory"
        if not tap.changes and not tap.site.address.grad:
            tap.handle(value, None)
        elif may_cover(tap.site.address.call, tap.calls):
            _refuse(tap)


def _refuse(tap: "InnerTap") -> None:
    tap.missed = "it is computed beside the fused kernel, which does not use it: it can be looked at, and no more"
    if tap.changes and not tap.site.wide:
        raise EditError(f"{tap.site} cannot be edited: {tap.missed}")
