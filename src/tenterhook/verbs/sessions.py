"""What is attached to a model, and by which line of code."""

from typing import Any, NamedTuple

from torch import nn

from tenterhook.addresses.sites import check_model
from tenterhook.hooks.opened import all_open
from tenterhook.hooks.session import Session
from tenterhook.say import file_here
from tenterhook.tables import Table


class Attached(NamedTuple):
    """One open session: its verb, the line that entered it, in which thread, and its addresses."""

    verb: str
    file: str
    line: int
    thread: str
    addresses: tuple[str, ...]


class Sessions(list[Attached]):
    """The open sessions of a model, the oldest first. Iterate, or print."""

    def __str__(self) -> str:
        return str(self._table()) if self else "no session is open on this model"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows = [(one.verb, f"{file_here(one.file)}:{one.line}", one.thread, _some(one.addresses)) for one in self]
        return Table(("session", "entered at", "thread", "addresses"), rows)


def sessions(model: nn.Module) -> Sessions:
    """The sessions of `capture`, `observe` and `edit` that are open on a model or a part of it, in any thread.

        print(sessions(model))
        sessions(model)[0].line

    Each has its `verb`, the `file` and `line` that entered it, its `thread` and its `addresses`.
    """
    check_model(model, "sessions")
    modules = set(map(id, model.modules()))
    return Sessions(_attached(session) for session in all_open() if _is_on(session, modules))


def _is_on(session: Session, modules: set[int]) -> bool:
    return any(id(tap.site.owner()) in modules for tap in session.taps)


def _attached(session: Session) -> Attached:
    line: Any = session.entered
    return Attached(session.verb, line.file, line.number, line.thread, tuple([str(tap.site) for tap in session.taps]))


def _some(addresses: tuple[str, ...]) -> str:
    more = f" … ({len(addresses)} in all)" if len(addresses) > 4 else ""
    return ", ".join(addresses[:4]) + more
