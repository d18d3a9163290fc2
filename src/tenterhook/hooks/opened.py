"""Which sessions are open, and by which line of the user's code each was entered."""

import contextlib
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tenterhook.platform.frames import frame_here

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

_NO_USERS = (str(Path(__file__).parents[1] / "_")[:-1], contextlib.__file__)  # the files of this package, and of `with`
_open: "dict[int, weakref.ref[Session]]" = {}  # by the id of the session


class Line(NamedTuple):
    """A line of the user's code, and the thread that ran it."""

    file: str
    number: int
    thread_id: int

    @property
    def thread(self) -> str:
        """The name of the thread."""
        return next((one.name for one in threading.enumerate() if one.ident == self.thread_id), "one that has ended")


def note(session: "Session") -> Line:
    """A session is entered. Returns the line, past our own functions and those of `with`."""
    _open[id(session)] = weakref.ref(session)
    frame: Any = frame_here(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NO_USERS):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno, threading.get_ident())


def forget(session: "Session") -> None:
    """It is left."""
    _open.pop(id(session), None)


def all_open() -> "list[Session]":
    """Those that are open, in any thread, in the order in which they were entered."""
    return [session for ref in list(_open.values()) if (session := ref()) is not None]
