"""What a session kept, without the session: moved to another device, or read from a file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tenterhook.addresses.graph import variable
from tenterhook.addresses.sites import Selector, Site
from tenterhook.hooks.report import Report
from tenterhook.hooks.session import report_of
from tenterhook.values.tree import rebuild_live
from tenterhook.verbs.keep import Entry, Log


@dataclass(eq=False)
class PastTap:
    """What came at one site, or why nothing did."""

    number: int
    site: Site
    calls: int
    fired: int
    kept: list[Entry]
    asked: list[int]  # the calls that something would have been kept of
    why: str = ""

    @property
    def action(self) -> "PastTap":
        """As a tap's, which gives the entries."""
        return self

    def entries(self, tap: Any = None) -> list[Entry]:
        """What was kept, in the order of the calls."""
        return self.kept

    def expected(self, tap: Any = None) -> list[int]:
        """The calls that something is kept of, where something comes."""
        return self.asked


@dataclass(eq=False)
class Past:
    """Stands for the session of a capture."""

    taps: list[PastTap]
    remarks: list[str]
    model: Callable[[], Any]  # as of a session: None where it is not known
    log: Log = field(default_factory=Log)

    @classmethod
    def of(
        cls, session: Any, taps: Sequence[Any], reached: Sequence[Any], change: Callable[[Tensor], Tensor]
    ) -> "Past":
        """A copy of what some taps have kept, with other tensors; what was one tensor still is one."""
        known: dict[int, Tensor] = {}

        def changed(_: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = change(tensor)
            return known[id(tensor)]

        order = {id(tap): i for i, tap in enumerate(reached)}
        variables = Variables() if any(tap.site.address.path == "" for tap in taps) else None
        past = cls([], session.notes(), session.model if variables is None else lambda: variables)
        for tap in sorted(taps, key=lambda tap: order.get(id(tap), len(order))):
            kept = [Entry(entry.call, rebuild_live(entry.value, changed), ()) for entry in tap.action.entries(tap)]
            why = "" if tap.fired else session.why_silent(tap)
            past.add(tap.site, tap.calls, tap.fired, kept, list(tap.action.expected(tap)), why)
        return past

    def add(self, site: Site, calls: int, fired: int, kept: list[Entry], asked: list[int], why: str = "") -> None:
        """What came at one more site."""
        tap: Any = PastTap(len(self.taps), site, calls, fired, kept, asked, why)
        self.taps.append(tap)
        if kept:
            self.log.note(tap)

    def shown_taps(self) -> list[Any]:
        """All of them."""
        return self.taps

    def why_silent(self, tap: Any) -> str:
        """Why nothing came there, as the session said."""
        return str(tap.why)

    def notes(self) -> list[str]:
        """What a report says under its table."""
        return self.remarks

    def report(self, rows: Iterable[tuple[Any, str]]) -> Report:
        """What fired and what did not."""
        return report_of(((tap, what if tap.fired else tap.why) for tap, what in rows), self.notes())


class Variables:
    """Stands for a function that is not there: its variables can still be named."""

    def resolve(self, selector: Selector) -> list[Site]:
        """The site that a name means."""
        return [variable(selector, self)]
