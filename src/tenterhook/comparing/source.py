"""Where the values of a come from while b runs: from a itself, which runs in turn with b, or from a file.

    source.at(key, until)     the value of a at a place; None where a gets to one of `until` first, or to its end

The two run in strict alternation. b runs where `compare` was called; a in a thread of its own, which waits at each of
its values until b asks for a later one. So a value is there, as it is, while it is compared, and nobody keeps it.
Where a comes by its values in another order than b, those that it passes are copied until b asks for them, or until
the module around them has ended.
"""

import contextvars
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from tenterhook.comparing.states import Cell, put, taken
from tenterhook.platform.threads import in_same_state
from tenterhook.values.tree import rebuild_live

_STOP = object()


class Key(NamedTuple):
    """A place: a pair of modules (by its name in a), what of it, and which call."""

    name: str
    role: str  # "in", "out", "grad", or the name of a value inside a forward
    call: int = 0


class Event(NamedTuple):
    """A value that came."""

    key: Key
    value: Any
    around: tuple[Key, ...] = ()  # the outputs of the calls that it is in
    wrote: bool = False  # of an output: whether the module wrote into what it was given
    spot: Any = None  # of a value inside a forward: the instruction that makes it
    owner: str = ""  # of a gradient: the module whose backward made it
    random: Any = None  # the random states with which a goes on; None where it is further already


class Source(Protocol):
    """See the module."""

    def at(self, key: Key, until: Collection[Key]) -> Event | None:
        """The value of a at a place."""

    def passed(self, around: Key) -> list[Event]:
        """What a has passed in a call, and b has not asked for."""

    def left(self) -> Iterable[Key]:
        """What nobody asked for."""

    def close(self) -> None:
        """No more is asked."""


class Stopped(BaseException):
    """Ends a where b needs no more of it."""


class Kept:
    """Values from a file."""

    error: BaseException | None = None

    def __init__(self, values: Mapping[Key, Any]) -> None:
        self._values = dict(values)

    def at(self, key: Key, until: Collection[Key]) -> Event | None:
        """The value of a at a place."""
        return Event(key, self._values.pop(key)) if key in self._values else None

    def left(self) -> Iterable[Key]:
        """What nobody asked for."""
        return list(self._values)

    def passed(self, around: Key) -> list[Event]:
        """Values in a file have no order."""
        return []

    def close(self) -> None:
        """Nothing to do."""


class Live:
    """A model that runs in turn with the other."""

    def __init__(self, run: "Callable[[Live], object]", cells: Sequence[Cell], start: Sequence[Any]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._cells, self._theirs = cells, list(start)
        self._go: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._now: Event | None = None  # where a waits
        self._waiting: dict[Key, Event] = {}  # what a has passed
        self._left: list[Key] = []
        self._is_over = False
        context, state = contextvars.copy_context(), in_same_state()
        self._thread = threading.Thread(target=lambda: context.run(self._main, run, state), daemon=True)
        self._thread.start()

    # In the thread of a.

    def _main(self, run: "Callable[[Live], object]", state: Any) -> None:
        try:
            if self._go.get() is _STOP:
                return
            with ExitStack() as stack:
                for one in state:
                    stack.enter_context(one())
                self.result = run(self)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._came.put(None)

    def tell(self, event: Event) -> None:
        """Hand over a value, and wait."""
        self._came.put(event)
        if self._go.get() is _STOP:
            raise Stopped

    # In the thread of b.

    def at(self, key: Key, until: Collection[Key]) -> Event | None:
        """The value of a at a place."""
        if key in self._waiting:
            return self._waiting.pop(key)
        while (now := self._next()) is not None:
            if now.key == key:
                self._now = None
                self._forget(key)
                return now._replace(random=self._theirs)
            if now.key in until:
                return None
            self._waiting[now.key] = now._replace(value=rebuild_live(now.value, lambda _, t: t.detach().clone()))
            self._now = None
        return None

    def _next(self) -> Event | None:
        """Where a is, or gets next."""
        if self._now is None and not self._is_over:
            mine = taken(self._cells)
            put(self._cells, self._theirs)
            try:
                self._go.put(None)
                self._now = self._came.get()
            finally:
                self._theirs = taken(self._cells)
                put(self._cells, mine)
            self._is_over = self._now is None
        return self._now

    def passed(self, around: Key) -> list[Event]:
        """What a has passed in a call, and b has not asked for."""
        return [event for event in self._waiting.values() if around in event.around]

    def _forget(self, key: Key) -> None:
        """A call is over on both sides: b will not ask for what was in it."""
        if key.role == "out" and self._waiting:
            for other in [k for k, event in self._waiting.items() if key in event.around]:
                self._left.append(other)
                del self._waiting[other]

    def left(self) -> Iterable[Key]:
        """What nobody asked for; a runs to its end."""
        while (now := self._next()) is not None:
            self._left.append(now.key)
            self._now = None
        return [*self._left, *self._waiting]

    def close(self) -> None:
        """Let it end."""
        if self._thread.is_alive():
            self._go.put(_STOP)
            self._thread.join()
