"""The one function that instrumented copies of code call, and the places that they call it from.

    __tenterhook__(value, number, here, extra)      returns what the code goes on with

It is a builtin, so that copies hold nothing but numbers and can be pickled by value; and Dynamo knows that it must not
be traced. `here` is what the call for the beginning of the function returned: None where no session looks into it.
"""

import builtins
import linecache
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from tenterhook.platform.untraced import never_trace

NAME = "__tenterhook__"
Act = Callable[["Place", Any, Any, Any], Any]
acts: dict[str, Act] = {}  # by the kind of a place: what is done there


@dataclass(slots=True, eq=False)
class Place:
    """One place in a function where its copy calls us."""

    act: Act
    code: CodeType  # the function's own
    name: str  # the variable, operation or method
    line: int | None
    older: bool = True  # whether the value may have been there before
    handed_on: bool = False  # whether the value comes from a call or another variable
    is_statement: bool = False  # nobody takes what the call returns
    written: tuple[str, ...] = ()  # what a statement may write into, as it is written
    fills: str = ""  # the variable of the function to which a statement may add something, as to a list

    @property
    def text(self) -> str:
        """The line in the source, where there is one."""
        return linecache.getline(self.code.co_filename, self.line or 0).strip()

    @property
    def source(self) -> str:
        """file:line"""
        return f"{self.code.co_filename}:{self.line or self.code.co_firstlineno}"


_places: dict[int, Place] = {}


def register(place: Place) -> int:
    """A number for a place, which no other process has: a copy that is unpickled there finds nothing."""
    number = int.from_bytes(os.urandom(7), "little")
    _places[number] = place
    return number


def forget(numbers: Iterable[int]) -> None:
    """The copy that has these is gone."""
    for number in numbers:
        _places.pop(number, None)


def place_of(number: int) -> Place | None:
    """The place with a number."""
    return _places.get(number)


def tell(value: Any, number: int, here: Any, extra: Any) -> Any:
    """See the module."""
    if here is None:
        return value
    place = _places.get(number)
    return value if place is None else place.act(place, value, here, extra)


never_trace(tell, "a tenterhook session looks inside this function: compile or export it outside of the session")


def install() -> None:
    """Make it a builtin, before the first copy runs. It stays: a generator may outlive the session that changed it."""
    if not can_reach_by:
        setattr(builtins, NAME, tell)


can_reach_by: list[Any] = []  # what is in its place, while compiled code is looked into


def can_reach(function: FunctionType) -> bool:
    """Whether the code of a function finds the dispatcher: not where it has builtins of its own."""
    own: Any = function
    return own.__builtins__.get(NAME) in (tell, *can_reach_by) and NAME not in function.__globals__
