"""The variables of functions that run in a forward: which are looked after, and when.

What an operation did not make right there is found in the frame's variables when the next one runs: an argument,
another name for a tensor, what a helper had in use before it returned it. Such a value can be looked at, and changed if
the bytecode says that nothing has used the variable by then.

An address inside a forward is a pattern. When a value comes that it means, the tap that was asked for is made again,
for that value; so the names need not be known beforehand.
"""

import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook.addresses.sites import Site
from tenterhook.hooks.modes import Mode
from tenterhook.hooks.scope import here as open_sessions
from tenterhook.hooks.session import Session
from tenterhook.inside.frames import (
    NOWHERE,
    Frames,
    Where,
    arguments,
    context,
    has_variable,
    is_plumbing,
    is_running,
    keys,
    place_of,
    rebind,
    variables,
)
from tenterhook.inside.here import SUSPENDS, Here
from tenterhook.inside.names import Spot, spots
from tenterhook.inside.operation import is_operation
from tenterhook.inside.pattern import Pattern, codes_of, hand_to, is_called
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.bytecode import COMPREHENSIONS

if TYPE_CHECKING:
    from tenterhook.inside.taps import InnerTap

NO_FRAME = object()

# By thread, while somebody's function is called there: the first of the sessions since, the backward pass around it.
busy: dict[int, tuple[int, int]] = {}


class Variables(Mode):
    """What a session wants inside forwards, what it knows of their functions, and the variables that it looks after."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = weakref.ref(session)
        self._frames = Frames(module for ref in session.modules if (module := ref()) is not None)
        self._wanted: dict[int, list[Pattern]] = {}  # by the id of the module
        self._any_name = self._changes = False
        self._opened: set[str] = set()  # the functions of torch.nn.functional to look into
        self._here: dict[int, Here] = {}  # by the id of the code
        self._mark: object = NO_FRAME  # of the frame of the last operation
        self._watches = False
        self._unmet: set[tuple[int, str]] = set()  # the functions that are wanted and have not run: whose, and which
        self._is_twin = False  # of which the hooks on modules know nothing
        self._is_met_anywhere = False  # whether a method is wanted, which somebody else may call
        self._hands_up = False  # whether a variable is wanted that may take what a function returns
        self._shares = False  # whether one is looked after that several functions may assign, such as an attribute
        self._alert = False
        self._active: dict[int, int] = {}  # the modules of which something is wanted: how many of their calls run
        self._attributes: dict[int, dict[str, Any]] = {}  # by module: the wanted ones, when it was last called
        # What is assigned to attributes and the like, by its id and what it is assigned to: itself, and by whom.
        self._taken: dict[tuple[int, object], tuple[Callable[[], Any], Callable[[], Where | None]]] = {}
        # By thread: the functions that are looked after.
        self._running: dict[int, list[tuple[Any, Here, int, Where]]] = {}
        self._taps: dict[tuple[int, str, int], list[Any]] = {}

    def _known(self, code: types.CodeType) -> Here:
        here = self._here.get(id(code))
        if here is None:
            is_ours = is_plumbing(code.co_filename, code.co_name)
            here = self._here[id(code)] = Here(code, None if is_ours else spots(code))
            every = (pattern for patterns in self._wanted.values() for pattern in patterns)
            may_be = (pattern for pattern in every if pattern.may_be_in(code) and pattern.may_name(code))
            here.names = None if self._any_name else {pattern.last for pattern in may_be}
            here.nameless = any(is_called(name, code) or not has_variable(code, name) for name in here.names or ())
            self._set_watch(here)
        return here

    def _spot(self, here: Here, place: int) -> Spot | None:
        """What is at a place, if somebody may want it."""
        assert here.spots is not None
        spot = here.spots[place]
        if here.wants(spot):
            return spot
        may_matter = self._hands_up and (spot.exit is not None or (spot.is_shared and self._shares))
        if not self._opened and not may_matter:
            here.skip.add(place)
        return None

    def _set_watch(self, here: Here) -> None:
        """Find the variables of a function that are not known to get their values from operations alone."""
        known, names = here.spots, here.names
        if known is None:
            return
        taking = [
            name for name, givers in known.givers.items() if (name in names if names is not None else -1 not in givers)
        ]
        doubtful = {name: at - known.proven for name, at in known.arithmetic.items() if names is None or name in names}
        here.unproven = set().union(*doubtful.values())
        taking += [name for name, at in doubtful.items() if at and name not in taking]
        if not set(taking).issubset(here.watch):
            self._frames.looks += 1
        here.watch = tuple(taking)
        shares = self._shares or not known.shared.isdisjoint(taking)
        if here.watch and (shares != self._shares or not self._watches):
            self._watches = self._hands_up = True
            self._shares = shares
            self._look_up_all()
            self._set_alert()
        else:
            here.look_up(self._hands_up, self._shares, bool(self._opened))

    def _look_up_all(self) -> None:
        """Other things count now than did before."""
        for here in self._here.values():
            here.look_up(self._hands_up, self._shares, bool(self._opened))

    def _prove(self, here: Here, offset: int) -> None:
        """An operation was seen at a place: the variable that takes it need not be looked after for its sake."""
        if offset not in here.unproven:
            return
        assert here.spots is not None
        here.spots.proven.add(offset)
        self._set_watch(here)
        if not any(other.watch for other in self._here.values()):
            self._watches = False
            self._hands_up = any(pattern.is_of_helpers for patterns in self._wanted.values() for pattern in patterns)
            self._look_up_all()
            self._running.clear()
            self._set_alert()

    def _set_alert(self) -> None:
        """While a function runs whose variables are looked after, or may do, every operation counts."""
        is_wanted = self._watches or bool(self._unmet)
        runs = bool(self._active) or any(self._running.values())
        self._alert = is_wanted and (runs or self._is_met_anywhere or self._is_twin)
        self._mark = NO_FRAME

    def _reach(self, where: Where, name: str, value: Any, spot: Spot, **how: bool) -> Any:
        """Hand a value to the taps of its address. Returns what takes its place, or None."""
        base = f"{where.prefix}/{name}"
        counts = where.call.counts
        number = counts.get(base, 0)
        counts[base] = number + 1
        key = (id(where.owner), base, number)
        taps = self._taps.get(key)
        if taps is None:
            taps = self._taps[key] = self._make(where, base, number, spot)
        if not taps:
            return None
        thread = threading.get_ident()
        before = busy.get(thread)
        busy[thread] = next(keys), graph_task()
        try:
            return hand_to(taps, where.call.number, value, spot, **how)
        except TypeError as error:  # torch takes one inside an operator for its own
            raise RuntimeError(f"TypeError: {error}") from error
        finally:
            if before is None:
                del busy[thread]
            else:
                busy[thread] = before

    def _make(self, where: Where, base: str, number: int, spot: Spot) -> "list[InnerTap]":
        """The taps of one address, when it is first met."""
        taps = []
        for pattern in self._wanted.get(id(where.owner), ()):
            if pattern.means(base, number):
                asked = pattern.tap.site
                inner = f"{base}#{number}" if number else base
                site = Site(asked.address._replace(inner=inner), where.owner, "inner", asked.wide)
                site.spot = spot
                taps.append(pattern.tap.new_value(site))
                if (session := self._session()) is not None:
                    session.add(taps[-1])
        if number == 1:  # so the first has a number too
            for tap in self._taps.get((id(where.owner), base, 0), ()):
                tap.site.address = tap.site.address._replace(inner=f"{base}#0")
        return taps

    def _is_hidden(self) -> bool:
        """Whether a change or an observer runs that was called while this session was open, and no checkpoint again."""
        first, task = busy.get(threading.get_ident(), (0, -1))
        return self._frames.key < first and graph_task() == task

    def _outer(self) -> "list[Variables]":
        """The sessions around this one that look into forwards, the outermost first: they come before it."""
        if len(open_sessions()) < 2:
            return []
        stack = torch.overrides._get_current_function_mode_stack()  # without it, while it runs
        return [mode for mode in stack[: stack.index(self) if self in stack else None] if isinstance(mode, Variables)]

    def _notice(self, frame: Any, here: Here, writing: bool) -> None:
        """Before an operation: see which variables have got other values since the last one."""
        for outer in self._outer():
            known = outer._known(frame.f_code)
            if (outer._alert or known.watch) and known.spots is not None:
                outer._notice(frame, known, writing)
        self._look_back(frame)
        # It may write into what the functions around it hold; a generator goes on, and they have what it gave last.
        if not self._frames.is_seen(frame) or frame.f_code.co_flags & SUSPENDS or (writing and self._shares):
            around = self._around(frame)
            if self._unmet:
                self._meet(frame)
            running = self._running.setdefault(threading.get_ident(), [])
            length = len(running)
            for one in around:
                other = self._here.get(id(one.f_code))
                if other is not None and other.watch:
                    self._look_at_variables(one, other)
                    self._frames.see(one)
            running[length:] = running[length:][::-1]  # the outermost first, as on the stack
            if here.names or here.names is None or self._is_met_anywhere:
                self._frames.where(frame)  # calls count
            self._frames.see(frame)
        if here.watch:
            self._look_at_variables(frame, here, again=True)

    def _is_settled(self, frame: Any, here: Here) -> bool:
        """Whether the innermost function that is looked after is this one, and its variables are as they were."""
        running = self._running.get(threading.get_ident())
        if not running or running[-1][0] is not frame or self._shares or here.code.co_flags & SUSPENDS:
            return False
        where = running[-1][3]
        return not where.growing and not here.changed(where.looked_at, frame.f_lasti) and not self._outer()

    def _around(self, frame: Any) -> list[Any]:
        """The frames around one, from the inside out, up to where nothing can have changed since a look at them."""
        found = []
        while (frame := frame.f_back) is not None:
            found.append(frame)
            if not self._shares and self._frames.is_seen(frame) and not frame.f_code.co_flags & SUSPENDS:
                break
        return found

    def _meet(self, frame: Any) -> None:
        """Know the functions around an operation that have run none of their own so far."""
        new = []
        while frame is not None and self._frames.is_new(frame):
            new.append(frame)
            frame = frame.f_back
        for one in new:
            where = self._frames.where(one)
            if where is NOWHERE:  # so are those around it
                return
            names = self._known(one.f_code).names
            met = names is None or any(is_operation(name) or has_variable(one.f_code, name) for name in names)
            if met and (id(where.owner), where.prefix) in self._unmet:  # and not another one of this name
                self._unmet.remove((id(where.owner), where.prefix))
                self._set_alert()

    def _look_back(self, frame: Any) -> None:
        """See which variables of functions that have ended got values after their last operation."""
        running = self._running.get(threading.get_ident())
        while running:
            ended, here, task, where = running[-1]
            if ended is frame or ended is frame.f_back or is_running(ended):
                return
            running.pop()
            if graph_task() == task:  # not what a checkpoint has run again
                self._look_at_variables(ended, here, where)
            where.is_followed = False  # a generator may go on
            self._set_alert()

    def _look_at_variables(self, frame: Any, here: Here, where: Where | None = None, again: bool = False) -> None:
        """See which variables of a function have got other values; `again`: its place is about to run, maybe again.

        `where` is given if it has ended.
        """
        is_over = where is not None
        where = where or self._frames.where(frame)
        if where is NOWHERE or id(where.owner) not in self._wanted or is_wrapper(frame.f_code, where):
            return
        last = where.looked_at
        names = here.changed(last, frame.f_lasti) if where.is_followed else here.watch
        if where.growing:
            names = tuple([name for name in here.watch if name in where.growing or name in names])
        if not names:
            if frame.f_lasti in here.skip:
                here.quiet.setdefault(last, set()).add(frame.f_lasti)
            return
        where.looked_at = frame.f_lasti
        assert here.spots is not None
        growing: set[str] = set()
        values = variables(frame, names, growing)
        where.growing = growing
        if not where.is_followed:
            where.is_followed = True
            self._running.setdefault(threading.get_ident(), []).append((frame, here, graph_task(), where))
            self._set_alert()
            self._remember_given(frame, here, where, values)
        if len(values) < len(names):
            where.held.forget(set(names).difference(dict(values)), here.spots, frame.f_lasti, again)
        for name, value in values:
            if where.held.is_known(name, value, here.spots, frame.f_lasti, again):
                continue
            where.held.put(name, value)
            if name in here.spots.shared:
                if self._is_taken(frame, where, name, value) or not here.spots.may_assign(name, last, frame.f_lasti):
                    continue  # another function has
                self._take(frame, where, name, value)
            spot = here.spots.giving(name, frame.f_lasti)
            # A function that this one has called may have switched gradients off.
            may_change = self._changes and not is_over and (again or context() == where.call.context)
            if not may_change or not here.spots.is_fresh(name, frame.f_lasti):
                self._reach(where, name, value, spot, late=True)
            elif (new := self._reach(where, name, value, spot, older=True)) is not None:
                rebind(frame, name, new)
                for session in (*self._outer(), self):
                    session._frames.where(frame).held.put(name, new)

    def _remember_given(self, frame: Any, here: Here, where: Where, values: list[tuple[str, Any]]) -> None:
        """What the variables of a function held when it was called: arguments, attributes, as far as can be told."""
        assert here.spots is not None
        names = here.spots.rebound.intersection(here.watch)
        if not names:
            return
        given = {**dict(values), **arguments(frame)}
        if not where.prefix:
            given.update(self._attributes.get(id(where.owner), ()))
        for name in where.held.unknown(names):
            if not here.spots.is_assigned(name, frame.f_lasti):
                where.held.put(name, given.get(name))

    def _take(self, frame: Any, where: Where, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._taken[id(value), place_of(frame, name)] = weakref.ref(value), weakref.ref(where)

    def _is_taken(self, frame: Any, where: Where, name: str, value: Any) -> bool:
        """Whether another function has assigned a value."""
        taken, by = self._taken.get((id(value), place_of(frame, name)), (None, None))
        return taken is not None and by is not None and taken() is value and by() is not where


def is_wrapper(code: types.CodeType, where: Where) -> bool:
    """Whether a function stands for a forward, as a decorator's does, and is not itself one."""
    if where.prefix or code.co_name == "forward" or code.co_name in COMPREHENSIONS:
        return False
    return code not in codes_of(where.owner)
