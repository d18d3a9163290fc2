"""What a session knows of one function whose operations it sees: what is wanted there, and where nothing is to do."""

import inspect
import types

from tenterhook._bytecode import LOOKERS
from tenterhook._names import Spot, Spots

SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Here:
    """What a session knows of one function that ran."""

    __slots__ = (
        "_changed",
        "code",
        "nameless",
        "names",
        "outside",
        "patience",
        "quiet",
        "ran",
        "skip",
        "spots",
        "unproven",
        "watch",
    )

    def __init__(self, code: types.CodeType, spots: Spots | None) -> None:
        self.code = code  # kept alive, so that its id stays its own
        self.spots = spots  # None if it is not the model's
        self.names: set[str] | None = set()  # those that are wanted; None if it may be any
        self.nameless = True  # whether what no variable takes may be wanted
        self.patience = 16  # how many operations of which nobody wants anything before the mode may pause
        self.ran = False  # whether an operation was seen in it
        self.watch: tuple[str, ...] = ()  # the variables to look after
        self.unproven: set[int] = set()  # the arithmetic that gives them a value and was never seen to be an operation
        self.forget()

    def forget(self) -> None:
        """What was found out about its places no longer holds."""
        self.skip: set[int] = set()  # those whose results nobody wants
        self.outside: set[int] = set()  # those that were run where nothing is wanted
        self.quiet: dict[int, set[int]] = {}  # by the place where the variables were looked at: where they are the same
        known = {} if self.spots is None else self.spots.known_changes
        self._changed: dict[tuple[int, int], tuple[str, ...]] = known.setdefault(self.watch, {})

    def wants(self, spot: Spot) -> bool:
        """Whether somebody may want what is made at a place in it."""
        if not self.names:
            return self.names is None
        if spot.is_statement:
            return spot.writes_into is None or spot.writes_into in self.names
        return not self.names.isdisjoint(spot.variables) or (self.nameless and spot.is_nameless)

    def lines(self, hands_up: bool) -> frozenset[int] | None:
        """The lines in which there may be something to do; None if it must not be traced."""
        if self.spots is None or self.names is None:
            return None
        asked = hands_up, self.nameless, frozenset(self.names), self.watch
        known = self.spots.known_lines
        if asked not in known:
            known[asked] = self._find_lines(hands_up) if _may_be_traced(self.code) else None
        return known[asked]

    def _find_lines(self, hands_up: bool) -> frozenset[int] | None:
        assert self.spots is not None
        counts = (lambda spot: self.wants(spot) or spot.exit is not None) if hands_up else self.wants
        return self.spots.lines(counts, {*(self.names or ()), *self.watch})

    def changed(self, since: int, now: int) -> tuple[str, ...]:
        """The variables that may be others than they were, from one place in the code to another."""
        found = self._changed.get((since, now))
        if found is None:
            found = self._changed[since, now] = self._may_have_changed(since, now)
        return found

    def _may_have_changed(self, since: int, now: int) -> tuple[str, ...]:
        spots = self.spots
        if spots is None or since < 0 or (since >= now and not spots.loops):
            return self.watch
        if spots.loops:
            found = {name for name in self.watch if spots.passes(since, spots.stores((name,)), now)}
        else:
            found = {name for name in self.watch if any(since <= at < now for at in spots.stores((name,)))}
        if found or spots.loops:  # others assign to these, too
            found |= spots.shared
        return tuple([name for name in self.watch if name in found])


def _may_be_traced(code: types.CodeType) -> bool:
    if code.co_flags & SUSPENDS or not code.co_flags & inspect.CO_OPTIMIZED:
        return False
    if {*code.co_cellvars, *code.co_freevars} - {"__class__"}:  # a tracer would write back what a thread has changed
        return False
    return LOOKERS.isdisjoint(code.co_names) and "f_locals" not in code.co_names
