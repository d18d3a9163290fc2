"""What a session knows of one function whose operations it sees: what is wanted there, and where nothing is to do."""

import inspect
import types

from tenterhook.inside.names import Spot, Spots
from tenterhook.platform.bytecode import LOOKERS

SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Found:
    """What was found out about the places of a function, for all who want the same there."""

    __slots__ = ("changed", "lines", "outside", "quiet", "skip")

    def __init__(self) -> None:
        self.skip: set[int] = set()  # those whose results nobody wants
        self.outside: set[int] = set()  # those that were run where nothing is wanted
        self.quiet: dict[int, set[int]] = {}  # by the place where the variables were looked at: where they are the same
        self.changed: dict[tuple[int, int], tuple[str, ...]] = {}  # see `Here.changed`
        self.lines: frozenset[int] | bool | None = False  # see `Here.lines`; False if nobody has asked


class Here:
    """What a session knows of one function that ran."""

    __slots__ = (
        "_found",
        "_hands_up",
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
        self.look_up(False, False, True)

    def look_up(self, hands_up: bool, shares: bool, is_special: bool) -> None:
        """What others have found out who want the same; `is_special`: it depends on more than what is wanted here."""
        names = None if self.names is None else frozenset(self.names)
        asked = names, self.nameless, self.watch, hands_up, shares
        known = {} if is_special or self.spots is None else self.spots.found
        if len(known) > 100:
            known.clear()
        found = known.setdefault(asked, Found())
        self._found, self._hands_up = found, hands_up
        self.skip, self.outside, self.quiet = found.skip, found.outside, found.quiet

    def wants(self, spot: Spot) -> bool:
        """Whether somebody may want what is made at a place in it."""
        if not self.names:
            return self.names is None
        if spot.is_statement:
            return spot.writes_into is None or spot.writes_into in self.names
        return not self.names.isdisjoint(spot.variables) or (self.nameless and spot.is_nameless)

    def lines(self) -> frozenset[int] | None:
        """The lines in which there may be something to do; None if it must not be traced."""
        if self._found.lines is False:
            self._found.lines = self._find_lines()
        assert not isinstance(self._found.lines, bool)
        return self._found.lines

    def _find_lines(self) -> frozenset[int] | None:
        if self.spots is None or self.names is None or (self.names and self.nameless) or not _may_be_traced(self.code):
            return None
        counts = (lambda spot: self.wants(spot) or spot.exit is not None) if self._hands_up else self.wants
        return self.spots.lines(counts, self.names.union(self.watch))

    def changed(self, since: int, now: int) -> tuple[str, ...]:
        """The variables that may be others than they were, from one place in the code to another."""
        found = self._found.changed.get((since, now))
        if found is None:
            found = self._found.changed[since, now] = self._may_have_changed(since, now)
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
    return {*LOOKERS, "f_locals", "gettrace", "settrace"}.isdisjoint(code.co_names)
