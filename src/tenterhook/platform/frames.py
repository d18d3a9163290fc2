"""The frames of running code: their local variables, read without keeping them alive.

Relies on: `sys._getframe` and `sys._current_frames`; before Python 3.13 `frame.f_locals` is a dict that the frame
keeps, so that reading it once keeps every variable alive until the frame ends, unless the dict is emptied again;
torch's calls of modules are all in the file of nn.Module.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import nn

from tenterhook.platform.bytecode import looks_at_variables

T = TypeVar("T")
frame_here = sys._getframe  # of whoever asks; a number says how many functions further out
frames_of_threads = sys._current_frames  # by thread
CALLS = nn.modules.module.__file__  # where a module's call leads to its forward
LOCALS_ARE_COPIED = sys.version_info < (3, 13)  # whether f_locals is one


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller_of_module(frame: FrameType | None) -> FrameType | None:
    """From a hook of a module: the function that called the module, past the frames of the call itself."""
    is_in_call = False
    for one in frames_from(frame):
        is_part = one.f_code.co_filename == CALLS or one.f_code.co_name == "__call__"
        if is_in_call and not is_part:
            return one
        is_in_call = is_in_call or one.f_code.co_filename == CALLS
    return None


def all_variables(frame: Any) -> dict[str, Any]:
    """What the local variables of a frame are now."""
    values = frame.f_locals
    found = dict(values)
    if not looks_at_variables(frame.f_code):  # else its own code may be looking at them
        empty_snapshot(frame, values)
    return found


def first_argument(frame: Any) -> Any:
    """What a function was given first."""
    return read_variable(frame, frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None


def read_variable(frame: Any, name: str) -> Any:
    """One local variable of a frame; None where there is none."""
    values = locals_of(frame)
    value = values.get(name)
    empty_snapshot(frame, values)
    return value


def locals_of(frame: Any) -> Any:
    """The variables of a frame; none where its code asks for them too: in older Pythons it would get the same dict."""
    return {} if LOCALS_ARE_COPIED and looks_at_variables(frame.f_code) else frame.f_locals


def keywords_of_call(frame: FrameType) -> dict[str, Any]:
    """Those of the module's call that a global hook runs in, which torch does not tell it."""
    try:
        return dict(all_variables(next(one for one in frames_from(frame) if one.f_code.co_filename == CALLS))["kwargs"])
    except (StopIteration, KeyError, TypeError):  # in another torch
        return {}


def given_to_module(frame: FrameType) -> tuple[Any, Any]:
    """The arguments of the module's call that a hook on it runs in; nothing where that cannot be seen."""
    try:
        values = all_variables(next(one for one in frames_from(frame) if one.f_code.co_filename == CALLS))
        return values["args"], values["kwargs"]
    except (StopIteration, KeyError):  # in another torch
        return (), {}


def empty_snapshot(frame: Any, values: Any) -> None:
    """Empty a copy of a function's variables, which would keep them alive, unless somebody else looks at it."""
    if not LOCALS_ARE_COPIED or not frame.f_code.co_flags & 1 or sys.gettrace() is not None:
        return
    # Its frame and who asked for it hold it, and the call of this function, as one of `_holders` does.
    if sys.getrefcount(values) <= 2 + _holders(object()):
        values.clear()


def _holders(thing: object) -> int:
    """How many hold what only this call is given: one more where torch.compile has changed how functions run."""
    return sys.getrefcount(thing)


class PerCall(Generic[T]):
    """Something to remember between the hooks before and after one call of a module.

    torch calls both from one frame, whatever else happens in between. Its id is the key.
    """

    def __init__(self) -> None:
        self._of: dict[int, T] = {}

    def put(self, value: T) -> None:
        """To be called from a hook's own `__call__`."""
        self._of[_call(sys._getframe(2))] = value

    def take(self, depth: int = 2) -> T | None:
        """What was put before this call; `depth` says how many functions are between this one and torch's."""
        return self._of.pop(_call(sys._getframe(depth)), None)

    def update(self, change: Callable[[T], T]) -> None:
        """From a function that another hook of the same call calls: change what is remembered, if anything is."""
        call = _call(sys._getframe(3))
        if call in self._of:
            self._of[call] = change(self._of[call])

    def clear(self) -> None:
        """Forget calls that ended in an exception."""
        self._of.clear()


def _call(frame: Any) -> int:
    """The frame that calls a hook, where a function of ours may be between the two."""
    above = frame
    while above is not None and above.f_code.co_filename != CALLS:
        above = above.f_back
    return id(frame if above is None else above)
