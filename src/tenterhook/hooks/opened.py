"""Which sessions are open, and by which line of the user's code each was entered."""

import contextlib
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tenterhook.platform.frames import frame_here, frames_from

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

_OURS = str(Path(__file__).parents[1] / "_")[:-1]
_open: "dict[int, weakref.ref[Session]]" = {}  # by the id of the session


class Line(NamedTuple):
    """A line of the user's code, and the thread that ran it."""

    file: str
    number: int
    thread: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def note(session: "Session") -> Line:
    """A session is entered. Returns the line, past our own functions and those of `with`."""
    _open[id(session)] = weakref.ref(session)
    frame: Any = frame_here(1)
    for one in frames_from(frame):
        file = one.f_code.co_filename
        if not file.startswith(_OURS) and file != contextlib.__file__:
            return Line(file, one.f_lineno, threading.current_thread().name)
    return Line("?", 0, threading.current_thread().name)


def forget(session: "Session") -> None:
    """It is left."""
    _open.pop(id(session), None)


def all_open() -> "list[Session]":
    """Those that are open, in any thread, in the order in which they were entered."""
    return [session for ref in list(_open.values()) if (session := ref()) is not None]
