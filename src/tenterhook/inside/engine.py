"""Values inside a forward: every result of an operation, by the variable that takes it.

A function mode sees each call of a torch function. The frame that made the call tells what takes the result
(`_names`), and where that is (`_frames`). What an operation did not make right there is found in the frame's variables
when the next one runs (`_variables`).
"""

import copy
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tenterhook.addresses.grammar import split_number
from tenterhook.addresses.sites import Site
from tenterhook.errors import close_matches
from tenterhook.hooks.scope import Moment
from tenterhook.hooks.scope import here as open_sessions
from tenterhook.hooks.session import Session
from tenterhook.inside.frames import (
    NOWHERE,
    RUN_LATER,
    Where,
    asker,
    attributes,
    holder,
    holds_tensors,
    is_call_of,
    mark_of,
    marked,
    runs_module,
)
from tenterhook.inside.here import SUSPENDS, Here
from tenterhook.inside.names import Spot, spots
from tenterhook.inside.operation import attention, is_functional, opened, operation, probabilities, writes
from tenterhook.inside.pattern import Pattern, codes_of
from tenterhook.inside.pause import Pause
from tenterhook.inside.variables import NO_FRAME, Variables, busy, is_wrapper
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.bytecode import Exit, Taker
from tenterhook.platform.frames import CALLS, let_go
from tenterhook.platform.hook_tables import Hook

if TYPE_CHECKING:
    from tenterhook.inside.taps import WantedTap

_frame = sys._getframe
_PROBABILITIES = "probabilities"
_NO_VALUES = {"grad", "data", "requires_grad_", "detach_", "retain_grad", "backward", "register_hook", "share_memory_"}


class Inside(Variables):
    """The function mode of one session. It is on in one thread only, as torch's modes are."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._moment = Moment()
        self._probabilities = False
        self._quiet: set[int] = set()  # the places in the last frame at which there is nothing to do
        self._row = 0  # how many operations there were at these, one after the other
        self._patience = 0
        self._pause: Pause | None = None  # while one goes on
        self._may_pause = True
        self._traced: object = None  # the mark of the frame that was traced, until it is seen to
        self._called: set[int] = set()  # the modules that were called at all
        self._thread = threading.get_ident()
        self.was_elsewhere = False  # whether one was called in another thread
        self._may_change = False  # whether other hooks come after ours

    def want(self, tap: "WantedTap") -> None:
        """Look out for the values that a tap's address means."""
        owner = tap.site.owner()
        pattern = Pattern(tap)
        self._wanted.setdefault(id(owner), []).append(pattern)
        self._opened.update(filter(is_functional, pattern.helpers))
        if pattern.last == _PROBABILITIES:
            self._probabilities = True
            self._opened.add("multi_head_attention_forward")  # it may hide a fused kernel
        self._changes = self._frames.changes = self._changes or tap.changes
        self._frames.scope = tap.scope
        # Else no hook need be there to end a pause that an exception has cut short.
        self._may_pause = self._may_pause and not pattern.is_of_helpers and isinstance(owner, nn.Module)
        self._any_name = self._any_name or "*" in pattern.last
        if self._any_name:
            tap.scope.moment = self._moment
        if pattern.is_of_helpers:  # how their variables get values is not known yet
            self._hands_up = True
            if pattern.last != _PROBABILITIES or pattern.helpers[-1] not in ("**", attention.__name__):
                function = pattern.name if "**" in pattern.last else pattern.name.rpartition("/")[0]
                self._unmet.add((id(owner), function))
                self._is_met_anywhere = self._is_met_anywhere or hasattr(type(owner), (*pattern.helpers, "")[0])
                self._set_alert()
        if not isinstance(owner, nn.Module):
            self._frames.add_function(owner)
            self._active[id(owner)] = 1  # whether it runs is not known
            self._set_alert()

    def place_hooks(self, session: Session) -> None:
        """Be told of the calls of modules whose results a variable may take."""
        calls, results = self._to_hook()
        for module in (ref() for ref in session.modules):
            if id(module) not in calls or isinstance(module, torch.jit.ScriptModule):
                continue
            session.places.put(module._forward_pre_hooks, Calling(self), first=True)
            if id(module) in results:
                session.places.put_plainly(module._forward_hooks, Bound(self))

    def notes(self) -> Iterable[str]:
        if self.was_elsewhere:
            yield "what ran in other threads was not looked into: a function mode sees the one that entered the block"

    def _to_hook(self) -> tuple[set[int], set[int]]:
        """The ids of the modules whose calls must be known of, and of those whose results a variable may take."""
        calls = set(self._wanted)
        results: set[int] = set()
        for patterns in self._wanted.values():
            owner = patterns[0].tap.site.module
            for modules in {pattern.name: pattern.givers() for pattern in patterns}.values():
                results.update(map(id, modules))
            if any(code.co_flags & SUSPENDS for code in codes_of(owner)):
                results.add(id(owner))
        return calls | results, results

    def switch_on(self) -> bool:
        for patterns in self._wanted.values():  # their variables count from the start
            for code in codes_of(patterns[0].tap.site.module):
                self._known(code)
        return super().switch_on()

    def for_this_thread(self) -> "Inside":
        """The same for another thread: what it keeps of the last operation is its own."""
        twin = copy.copy(self)
        twin._thread = threading.get_ident()
        twin._is_twin = True
        twin._pause = twin._traced = None
        twin._set_alert()
        return twin

    def is_on(self) -> bool:
        stack = torch.overrides._get_current_function_mode_stack()
        return any(isinstance(mode, Inside) and mode._frames is self._frames for mode in stack)

    # What an operation made.

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame: Any = _frame(1)
        if frame.f_trace is self._mark and frame.f_lasti in self._quiet:  # at the least cost
            self._row += 1
            if self._row == self._patience:
                self._begin_pause(frame)
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._traced is not None:
            if (traced := marked(self._traced)) is not None:
                let_go(traced)
            self._traced = None
        here = self._here.get(id(frame.f_code)) or self._known(frame.f_code)
        if frame.f_lasti in here.skip and not self._alert and not here.watch:
            self._rest(frame, here, here.skip)
            return func(*args, **kwargs) if kwargs else func(*args)
        self._moment.over()
        iterates, asked = False, frame
        if busy and self._is_hidden():  # what a change or an observer computes is not the model's
            return func(*args, **kwargs) if kwargs else func(*args)
        if here.spots is None:
            iterates = frame.f_code.co_name == "__iter__"
            frame = asker(frame)
            if frame.f_trace is self._mark and frame.f_lasti in self._quiet:
                return func(*args, **kwargs) if kwargs else func(*args)
            here = self._known(frame.f_code)
        if here.spots is None:  # torch's own doings, or ours
            return func(*args, **kwargs) if kwargs else func(*args)
        here.ran = True
        spot = self._spot(here, frame.f_lasti)
        if not self._alert and not self._opened and self._is_idle(frame, here, spot):
            out = func(*args, **kwargs) if kwargs else func(*args)
            if here.unproven and holds_tensors(out):
                self._prove(here, here.spots[frame.f_lasti].offset)
            return out
        if self._alert or here.watch:
            self._notice(frame, here, writes(func))
        if self._probabilities and func is attention:
            self._compute_beside(frame, here, args, kwargs or {})
        if self._opened and operation(func) in self._opened and is_functional(func.__name__, func):
            with self:
                out = opened(func)(*args, **(kwargs or {}))
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        self._moment.over()
        if spot is not None and not (spot.is_nameless and here.names is not None and operation(func) not in here.names):
            taker = None if iterates and not spot.unpacks else spot.taker
            out = self._came(frame, spot, taker, func, args, kwargs or {}, out)
            if frame is asked and spot.called is not None:
                here.spots.proven.add(spot.offset)
        if here.unproven and holds_tensors(out):
            self._prove(here, here.spots[frame.f_lasti].offset)
        if self._hands_up and not iterates and operation(func) not in _NO_VALUES:
            spot = here.spots[frame.f_lasti]
            self._note_taker(frame, spot, out)
            out = self._hand_up(frame, spot, out, _is_among(out, args))
        self._moment.over()
        self._settle(frame, here)
        return out

    def _settle(self, frame: Any, here: Here) -> None:
        """After an operation: find the places of its frame at which there is nothing to do from here on."""
        if not self._alert and not here.watch:
            self._rest(frame, here, here.skip)
            return
        self._mark = NO_FRAME
        if self._shares or here.code.co_flags & SUSPENDS:  # others may assign to what is looked after
            return
        where = self._frames.where(frame) if here.watch else NOWHERE
        if not where.growing:
            at = where.looked_at
            self._rest(frame, here, here.quiet.setdefault(at, set()) if where.is_followed else here.skip)

    def _rest(self, frame: Any, here: Here, quiet: set[int]) -> None:
        """From here on there is nothing to do at some places of a frame, until another runs."""
        assert here.spots is not None
        if len(quiet) > 2 or here.spots.loops:  # else it is over before that pays
            self._mark, self._quiet, self._row, self._patience = mark_of(frame), quiet, 0, here.patience
        else:
            self._mark = NO_FRAME

    def _begin_pause(self, frame: Any) -> None:
        """Nobody wants anything of many operations in a row: have the mode off while it stays so."""
        lines = None if self._shares or self._opened else self._known(frame.f_code).lines()
        if lines is None or frame.f_lineno in lines or sys.gettrace() is not None or len(open_sessions()) > 1:
            return
        if not self._may_pause or self._may_catch(frame):
            return
        self._pause = Pause(self, frame, lines, self._end_pause)
        self._pause.begin()

    def _may_catch(self, frame: Any) -> bool:
        """Whether an exception may be caught where something is wanted, before a module is called again."""
        while frame is not None:
            here = self._here.get(id(frame.f_code))
            if frame.f_code.co_exceptiontable and here is not None and (here.names or here.names is None):
                return True
            frame = frame.f_back
        return False

    def _end_pause(self, pause: Pause) -> None:
        self._pause, self._traced, self._mark = None, pause.mark, NO_FRAME
        if not pause.was_worth_it:
            self._known(pause.frame.f_code).patience *= 4

    def _is_idle(self, frame: Any, here: Here, spot: Spot | None) -> bool:
        """Whether nobody wants what is made at a place, nor what another function makes of it: no such one runs."""
        assert here.spots is not None
        place = here.spots[frame.f_lasti]
        if place.exit is not None and frame.f_back.f_code.co_filename != CALLS:  # else a module returns it
            return False
        if place.is_shared and self._shares:
            return False
        if spot is None and not here.watch:
            return True
        is_new = self._frames.is_new(frame)  # so that nobody has looked at those around it
        if not self._watches or is_new or self._frames.is_within(frame, self._wanted):
            return False
        here.outside.add(frame.f_lasti)
        self._rest(frame, here, here.outside)
        return True

    def _came(
        self, frame: Any, spot: Spot, taker: Taker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """A result: hand it to whoever wants it. Returns what the model goes on with."""
        name = operation(func)
        value = args[0] if out is None and name == "setitem" else out
        if not holds_tensors(value) or name in _NO_VALUES:
            return out
        where = self._frames.where(frame)
        if id(where.owner) not in self._wanted:
            return out
        was_given = _is_among(value, args) or (bool(kwargs) and _is_among(value, kwargs.values()))
        if isinstance(taker, str) or (taker is not None and isinstance(value, tuple | list)):
            return self._bind(frame, where, spot, taker, value, was_given)
        if spot.is_statement and was_given and (written := holder(frame, value, spot.written)) is not None:
            if written in spot.written[:1] and value is args[0] and spot.says_what_it_writes:
                spot.writes_into = written
            self._reach(where, written, value, spot, in_place=True)
            return out
        new = self._reach(where, name, value, spot, older=was_given)
        return out if new is None else new

    def _compute_beside(self, frame: Any, here: Here, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a fused kernel does not give, for those who ask for it."""
        where = self._frames.where(frame)
        if id(where.owner) in self._wanted and here.spots is not None:
            inside, spot = where.within("scaled_dot_product_attention"), here.spots[frame.f_lasti]
            self._reach(inside, _PROBABILITIES, lambda: probabilities(*args, **kwargs), spot, beside=True)

    def _bind(self, frame: Any, where: Where, spot: Spot, taker: Taker, value: Any, older: bool) -> Any:
        """A value that a variable takes, or several take the parts of. Returns what the model goes on with."""
        if isinstance(taker, str):
            here = self._known(spot.code)
            if (here.names is not None and taker not in here.names) or not holds_tensors(value):
                return value
            new = self._reach(where, taker, value, spot, older=older)
            if new is not None:
                for outer in self._outer():
                    outer._frames.where(frame).held.exchange(taker, value, new)
                value = new
            if taker in here.watch:
                is_final = len(open_sessions()) < 2 and not self._may_change
                where.held.expect(taker, value, spot.offset, is_final)
            return value
        parts = taker.of(value) if taker is not None and isinstance(value, tuple | list) else None
        if taker is None or parts is None:
            return value
        new_parts = [self._bind(frame, where, spot, part, x, older) for part, x in zip(taker, parts, strict=True)]
        is_same = all(a is b for a, b in zip(new_parts, parts, strict=True))
        return value if is_same else taker.together(value, new_parts)

    def _hand_up(self, frame: Any, spot: Spot, value: Any, older: bool) -> Any:
        """A result that a function returns, to be taken by a variable of the caller, or of the caller's caller."""
        way = spot.exit
        while way is not None and holds_tensors(value):
            code, frame = frame.f_code, frame.f_back
            here = self._known(frame.f_code)
            if here.spots is None or code.co_flags & SUSPENDS:
                break
            spot = here.spots[frame.f_lasti]
            self._note_taker(frame, spot, value)
            is_wanted = here.names is None or not here.names.isdisjoint(spot.variables)
            if (not is_wanted and spot.exit is None) or not is_call_of(frame, spot.called, code):
                break
            if is_wanted:
                where = self._frames.where(frame)
                if id(where.owner) in self._wanted and not is_wrapper(frame.f_code, where):
                    if here.watch:
                        self._look_at_variables(frame, here)
                    value = self._bind(frame, where, spot, way.of(spot.taker), value, older)
            way = way.then(spot.exit)
        return value

    def _note_taker(self, frame: Any, spot: Spot, value: Any) -> None:
        """A value that goes to an attribute, or a variable of an enclosing function, which somebody may look after."""
        if spot.is_shared:
            for name in spot.variables:
                self._take(frame, self._frames.where(frame), name, value)

    # What no operation made.

    def bound(self, module: nn.Module, output: Any) -> Any:
        """A module's output, which a variable may take. Returns what the model goes on with, or None."""
        if (busy or threading.get_ident() != self._thread) and self._is_elsewhere():
            return None
        if (calls := self._active.pop(id(module), 0)) > 1:
            self._active[id(module)] = calls - 1
        elif calls:
            self._set_alert()
        if type(output) in RUN_LATER:
            self._frames.returned(output, _frame(2))
        self._moment.over()
        self._look_back(_frame(2))
        frame = _caller(_frame(2))
        here = self._known(frame.f_code)
        if here.spots is None or frame.f_lasti in here.skip or not holds_tensors(output):
            return None
        spot = self._spot(here, frame.f_lasti)
        new = output
        self._may_change = not isinstance(next(reversed(module._forward_hooks.values()), None), Bound)
        if spot is not None and spot.taker is not None:
            where = self._frames.where(frame)
            if id(where.owner) in self._wanted:  # the module may have only handed it on
                new = self._bind(frame, where, spot, spot.taker, new, older=True)
        if self._hands_up:
            self._note_taker(frame, here.spots[frame.f_lasti], new)
            new = self._hand_up(frame, here.spots[frame.f_lasti], new, older=True)
        self._may_change = False
        self._moment.over()
        return None if new is output else new

    def before(self, module: nn.Module) -> None:
        """A module is about to be called, and may write into what it is given."""
        if self._pause is not None:  # an error has ended the tracing
            self._pause.end()
        if (busy or threading.get_ident() != self._thread) and self._is_elsewhere():
            if not self._is_hidden():
                self._pass_by(module)
            return
        self._called.add(id(module))
        self._come_last(module)
        if id(module) in self._wanted:
            if not self._active:
                self._taken.clear()
            self._frames.called(module, _frame(2))
            self._active[id(module)] = self._active.get(id(module), 0) + 1
            self._set_alert()
            if names := self._own_attributes(module):
                self._attributes[id(module)] = attributes(module, names)
        if not self._watches and not self._hands_up:
            return
        frame = _caller(_frame(2))
        here = self._known(frame.f_code)
        if (self._alert or here.watch) and here.spots is not None and not self._is_settled(frame, here):
            self._moment.over()
            self._notice(frame, here, False)
            self._moment.over()

    def _pass_by(self, module: nn.Module) -> None:
        """A call in another thread: nothing is seen inside, but it counts if it does for the module itself."""
        scope = next(iter(self._wanted.values()))[0].tap.scope
        if graph_task() == scope.task:
            self.was_elsewhere = True
            if id(module) in self._wanted and scope in open_sessions():
                self._frames.new_call(module)

    def _come_last(self, module: nn.Module) -> None:
        """Have the user's hooks run first, also those that are newer than ours: a variable takes what they give."""
        hooks = module._forward_hooks
        if hooks and not isinstance(next(reversed(hooks.values())), Hook):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Bound)]:
                hooks.move_to_end(key)  # type: ignore[attr-defined]

    def _own_attributes(self, module: nn.Module) -> list[str]:
        """The attributes of a module that are looked after in its forward, as they are written there: `self.h`."""
        if not self._any_name:
            return [pattern.last for pattern in self._wanted[id(module)] if "." in pattern.last]
        return [
            name
            for code in codes_of(module)
            for name in spots(code).rebound
            if name.startswith(tuple(f"{first}." for first in code.co_varnames[:1]))
        ]

    def _is_elsewhere(self) -> bool:
        return self._is_hidden() or (threading.get_ident() != self._thread and not self.is_on())

    def finish(self, failed: bool) -> None:
        """Before the session ends: see to the functions that have, unless an exception ended them."""
        try:
            if not failed:
                self._look_back(_frame(1))
        finally:
            self._running.clear()
            self._attributes.clear()
            self._moment.over()
            self._mark = NO_FRAME
            if self._pause is not None:
                self._pause.end()
            self._traced = None

    def why_silent(self, site: Site) -> str:
        """Why nothing came to an address; empty if the forward never ran."""
        owner = site.module
        name, number = split_number(site.address.inner)
        if any(key[:2] == (id(owner), name) for key in self._taps) and number is not None:
            return f"it was not assigned {number + 1 if number >= 0 else -number} times within one call"
        *helpers, last = name.split("/")[1:]
        codes = codes_of(owner)
        if (
            not any(self._here[id(code)].ran for code in codes if id(code) in self._here)
            and id(owner) not in self._called
        ):
            if self.was_elsewhere:
                return "it ran in another thread, and a function mode sees only the one that entered the block"
            return "" if isinstance(owner, nn.Module) else "it was not called inside this session"
        if helpers and "*" not in helpers[-1]:
            codes = [here.code for here in self._here.values() if here.code.co_name == helpers[-1]]
            if not codes:
                return f"no function {helpers[-1]} ran in it; see sites(model, *inputs)"
        names = sorted({name for code in codes for name in spots(code).variables})
        if last in names:
            return "no tensor came to it: that line did not run, or it holds something else"
        near = close_matches(last, names)
        hint = f"did you mean {', '.join(near)}?" if near else f"its variables are {', '.join(names[:12]) or 'none'}"
        return f"no value of that name came while it ran; {hint} (all of them: sites(model, *inputs))"


def _caller(frame: Any) -> Any:
    """The frame that called a module, from a frame inside that call; not a `__call__` that only hands it on."""
    while frame.f_code.co_filename == CALLS or (
        frame.f_code.co_name == "__call__" and spots(frame.f_code)[frame.f_lasti].exit == Exit() and runs_module(frame)
    ):
        frame = frame.f_back
    return frame


def _is_among(value: Any, others: Iterable[Any]) -> bool:
    return id(value) in map(id, others)


class Bound(Hook):
    """The hook after a module's call: a variable may take its output."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        return self.inside.bound(module, output)


class Calling(Hook):
    """The hook before a module's call."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside

    def __call__(self, module: nn.Module, args: object) -> None:
        self.inside.before(module)
