"""What the variables of one running function are known to hold, so that an assignment is told from one that was seen.

A value that was made for a variable is told of when it is made, and may be on its way to it; one that a variable holds
and nobody told of was assigned. All are referred to weakly: nothing lives longer for being looked at.
"""

import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

from torch import Tensor

from tenterhook.inside.names import Spots


class _Made(NamedTuple):
    """What was made for a variable, and told of."""

    value: Callable[[], Any]  # refers to it weakly
    place: int
    is_final: bool  # whether nobody can have changed it after us


class Held:
    """What the variables of one call of a function hold."""

    __slots__ = ("_coming", "_last")

    def __init__(self) -> None:
        self._last: dict[str, Callable[[], Any]] = {}  # by variable: what it held when last seen
        self._coming: dict[str, list[_Made]] = {}  # by variable: what was made for it since

    def put(self, name: str, value: Any) -> None:
        """A variable was seen to hold a value."""
        self._last[name] = _reference(value)

    def unknown(self, names: Iterable[str]) -> set[str]:
        """Of some variables those of which nothing is known."""
        return set(names) - self._last.keys()

    def expect(self, name: str, value: Any, place: int, is_final: bool) -> None:
        """A value was made for a variable, which gets it next."""
        coming = self._coming.setdefault(name, [])
        if coming and coming[-1].place == place:  # the one before is taken by now
            self._last[name] = coming.pop().value
        coming.append(_Made(_reference(value), place, is_final))

    def exchange(self, name: str, old: Any, new: Any) -> None:
        """Another session has put something else in place of a value that was made for a variable."""
        coming = self._coming.get(name, [])
        for i, one in enumerate(coming):
            if one.value() is old:
                coming[i] = one._replace(value=_reference(new))

    def forget(self, names: Set[str], spots: Spots, place: int, again: bool) -> None:
        """Some variables hold no tensor now: if one gets the same again, that is another assignment."""
        for name in names & self._last.keys():
            del self._last[name]
        for name in names & self._coming.keys():
            self._take_stored(name, spots, place, again)

    def is_known(self, name: str, value: Any, spots: Spots, place: int, again: bool) -> bool:
        """Whether a variable holds what it did when last seen, or what was made for it since and is told of."""
        stored = self._take_stored(name, spots, place, again)
        if stored is not None:
            self._last[name] = stored.value
        before = self._last.get(name)
        if before is not None and _is_same(before(), value):
            return True
        waiting = self._coming.get(name, [])
        for i, one in enumerate(waiting):
            if _is_same(one.value(), value):  # it has got it after all
                self._last[name], self._coming[name] = one.value, waiting[i + 1 :]
                return True
        if stored is None:
            return False
        taken = spots.stored_at(name, stored.place)
        if spots.may_assign(name, taken + 1, place, but=taken) and (
            stored.is_final or not spots.is_last_giver(name, stored.place, spots[place].offset)
        ):
            return False
        self.put(name, value)  # another session, or a hook of the user's, has changed it since
        return True

    def _take_stored(self, name: str, spots: Spots, place: int, again: bool) -> _Made | None:
        """Of what was made for a variable, take away what it has got by now. Returns the last of that.

        `again`: the place is about to run, maybe not for the first time.
        """
        if name not in self._coming:
            return None
        stored, waiting = None, []
        at = spots[place].offset
        for one in self._coming.pop(name):
            if one.place <= at < spots.stored_at(name, one.place) and not (again and one.place == at):
                waiting.append(one)
            else:
                stored = one
        if waiting:
            self._coming[name] = waiting
        return stored


def _is_same(told: Any, value: Any) -> bool:
    """Whether a variable holds what was made for it; a starred one gets a list of Python's own."""
    if told is value or not isinstance(told, list) or not isinstance(value, list):
        return told is value
    return len(told) == len(value) and all(a is b for a, b in zip(told, value, strict=True))


def _reference(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: value
