"""The steps of all optimizers, told to whoever wants to know: one pair of torch's global hooks for all recorders.

Torch goes through its table of such hooks while they run, and must not find it changed by another thread, which may
end or begin a recording at any time.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tenterhook.platform.compiler import never_compile
from tenterhook.platform.frames import frame_here, frames_of_threads
from tenterhook.platform.optimizers import closure_in, is_stepping
from tenterhook.record.events import Event, Skipped, Stepped, Stepping
from tenterhook.record.guard import Guard, guarded
from tenterhook.record.optimizers import KnownOptimizer, Optimizers, versions_of

_lock = threading.Lock()
_told: tuple["Steps", ...] = ()
_handles: list[Any] = []  # torch's, while anybody is told


class TakesSteps(Protocol):
    """Who is told of steps."""

    def feed(self, event: Event) -> None:
        """Something has happened."""
        ...

    def before_step(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        """Its gradients are ready, and it is about to change the parameters."""
        ...

    def after_step(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        """It has."""
        ...


class Steps:
    """Tells a recorder of the steps of optimizers that concern it, until it is removed."""

    def __init__(
        self, guard: Guard, optimizers: Optimizers, stepping: Callable[[], Collection[int]], taker: TakesSteps
    ) -> None:
        self.guard = guard
        self._optimizers, self._stepping, self._taker = optimizers, stepping, taker
        self._begun: dict[int, int] = {}  # by thread: how many steps optimizers, whichever, have begun

    def listen(self) -> None:
        """From now on."""
        _change(lambda told: (*told, self))

    def remove(self) -> None:
        """No longer."""
        _change(lambda told: tuple(one for one in told if one is not self))

    def begun(self) -> int:
        """How many steps optimizers have begun in this thread."""
        return self._begun.get(threading.get_ident(), 0)

    @guarded
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """What an optimizer is about to do; with a closure it is only known once that has run."""
        self._begun[threading.get_ident()] = self.begun() + 1
        known = self._optimizers.known(optimizer)
        if not self._optimizers.counts(optimizer, known):
            if known is not None:
                known.at_begin = self.begun(), versions_of(optimizer)
            return None
        known = known or self._optimizers.add(optimizer)
        if stepping := self._stepping():  # as seldom: around this one, or its own last step has raised
            self._optimizers.note_wrappers(optimizer, stepping, frame_here())
            self._taker.feed(Stepping(known.number))
        at, closure = closure_in(args, kwargs) if kwargs or len(args) > 1 else (0, None)
        if closure is None:
            self._ready(optimizer, known)
            return None

        def then_look(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self._after_closure(optimizer, known)
            return result

        if isinstance(at, str):
            return args, {**kwargs, at: then_look}
        return (*args[:at], then_look, *args[at + 1 :]), kwargs

    @guarded
    def _after_closure(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        if known.number not in self._stepping():
            self._ready(optimizer, known)

    def _ready(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        joins = self._optimizers.join(optimizer, known)
        if joins is not None:
            self._taker.feed(joins)
        self._taker.before_step(optimizer, known)

    @guarded
    def after(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        known = self._optimizers.known(optimizer)
        if known is None:
            return
        if known.number in self._stepping():
            self._taker.after_step(optimizer, known)
            self._taker.feed(Stepped(known.number))
        elif known.at_begin[0] == self.begun() and known.at_begin[1] != versions_of(optimizer):
            known.wraps = False  # it has stepped by itself

    def left_out(self, optimizer: Optimizer) -> None:
        """A GradScaler has left out a step."""
        known = self._optimizers.known(optimizer)
        wraps = known is not None and known.wraps
        if wraps or self._optimizers.counts(optimizer, known):
            self._taker.feed(Skipped(None if wraps else self._optimizers.add(optimizer).number))


def _change(change: Callable[[tuple[Steps, ...]], tuple[Steps, ...]]) -> None:
    global _told
    with _lock:
        _told = change(_told)
        if bool(_told) == bool(_handles):
            return
        _wait_for_others()
        if _told:
            _handles.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))
        while _handles and not _told:
            _handles.pop().remove()


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = None
    for one in _told:
        new = one.before(optimizer, args, kwargs)
        if new is not None:
            changed = args, kwargs = new
    return changed


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for one in _told:
        one.after(optimizer)


def _wait_for_others() -> None:
    """For a second at most: until no other thread is in an optimizer's step."""
    for _ in range(1000):
        frames = [frame for thread, frame in frames_of_threads().items() if thread != threading.get_ident()]
        if not any(map(is_stepping, frames)):
            return
        time.sleep(0.001)


def _renew() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it


os.register_at_fork(after_in_child=_renew)
never_compile(_before, _after, Steps.before)  # all that are guarded share their code
