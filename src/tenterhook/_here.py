"""What a session knows of one function whose operations it sees: what is wanted there, and where nothing is to do."""

import types
from bisect import bisect_left

from tenterhook._names import Spots


class Here:
    """What a session knows of one function that ran."""

    __slots__ = (
        "_unchanged",
        "changing",
        "code",
        "names",
        "outside",
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
        self.ran = False  # whether an operation was seen in it
        self.watch: tuple[str, ...] = ()  # the variables to look after
        self.unproven: set[int] = set()  # the arithmetic that gives them a value and was never seen to be an operation
        self.changing: list[int] = []  # where these may get other values, in order
        self.forget()

    def forget(self) -> None:
        """What was found out about its places no longer holds."""
        self.skip: set[int] = set()  # those whose results nobody wants
        self.outside: set[int] = set()  # those that were run where nothing is wanted
        self.quiet: dict[int, set[int]] = {}  # by the place where the variables were looked at: where they are the same
        self._unchanged: dict[tuple[int, int], bool] = {}

    def is_unchanged(self, since: int, now: int) -> bool:
        """Whether the variables must be what they were, from one place in the code to another."""
        found = self._unchanged.get((since, now))
        if found is None:
            found = self._unchanged[since, now] = self._cannot_change(since, now)
        return found

    def _cannot_change(self, since: int, now: int) -> bool:
        if self.spots is None or since < 0:
            return False
        if not self.spots.loops:
            return since < now and bisect_left(self.changing, since) == bisect_left(self.changing, now)
        return self.spots.shared.isdisjoint(self.watch) and not self.spots.passes(since, self.changing, now)
