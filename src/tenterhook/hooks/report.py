"""What a session says of itself: a table of its sites, and notes on what a user should know."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook import markup
from tenterhook.tables import Table
from tenterhook.values.tree import leaves

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session


class Report:
    """What a session saw or changed, site by site, and why the silent ones stayed silent. Print it."""

    def __init__(
        self, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], notes: list[str], right: Sequence[str]
    ) -> None:
        self.header = header
        self.rows = rows
        self.notes = notes
        self._right = right

    @property
    def silent(self) -> list[str]:
        """The addresses at which nothing was seen."""
        return [address for address, fired, *_ in self.rows if fired == "never"]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def html(self) -> str:
        """The report as a part of a page."""
        return self.table().html() + markup.notes(f"note: {note}" for note in self.notes)

    def _repr_html_(self) -> str:
        return markup.page(self.html())

    def table(self) -> Table:
        """The table alone."""
        return Table(self.header, self.rows, right=self._right)


def zeros_in(gradient: Any) -> str:
    """For a report: that a gradient is zero everywhere, or which leaves of it are."""
    found = [(path, not bool(leaf.count_nonzero())) for path, leaf in leaves(gradient) if _has_numbers(leaf)]
    if found and all(is_zero for _, is_zero in found):
        return ", all zeros"
    zeros = ["".join(f"[{key}]" for key in path) for path, is_zero in found if is_zero]
    return f", all zeros at {', '.join(zeros[:4])}" if zeros else ""


def _has_numbers(leaf: Tensor) -> bool:
    return leaf.numel() > 0 and not leaf.is_meta and leaf.layout == torch.strided


def notes_on(session: "Session") -> Iterator[str]:
    """What happened around a session's sites."""
    if session.compiled is not None and (note := session.compiled.note()):
        yield note
    yield from _notes_on_calls(session)
    for mode in session.modes:
        yield from mode.notes()
    if session.ended_by is not None and issubclass(session.ended_by, Exception):
        inside = session.raised.innermost(session.model()) if session.raised is not None else ""
        where = f" in {inside}" if inside else ""
        yield f"the block was left by {session.ended_by.__name__}{where}: a module that was running returned nothing"
    yield from _notes_of_taps(session)
    if _turned_fast_path_off(session):
        yield "hooks turn off PyTorch's fused transformer kernel in eval mode: last bits may differ from it"


def _notes_on_calls(session: "Session") -> Iterator[str]:
    """Which calls were not counted."""
    if any(tap.recomputed for tap in session.taps):
        yield "calls during backward were a checkpoint recomputing, and are not counted again"
    if any(tap.elsewhere for tap in session.taps):
        yield "calls from other threads or async tasks, or made by a change or an observer, were left alone"


def _notes_of_taps(session: "Session") -> Iterator[str]:
    """What single taps say, with the addresses of those that say it."""
    noted: dict[str, list[str]] = {}
    for tap in session.taps:
        if tap.note:
            noted.setdefault(tap.note, []).append(str(tap.site))
    for note, where in noted.items():
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        yield f"{', '.join(where[:3])}{more}: {note}"


def _turned_fast_path_off(session: "Session") -> bool:
    model = session.model()
    hooked = {id(tap.site.module) for tap in session.taps if tap.calls or tap.fired}
    modules = model.modules() if model is not None else ()
    fused = (m for m in modules if isinstance(m, nn.TransformerEncoderLayer) and not m.training)
    return any(id(inner) in hooked for layer in fused for inner in layer.modules())
