"""What a comparison found: a table in the order of the run, and the first place that makes a difference."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tenterhook import markup
from tenterhook.comparing.align import Alignment
from tenterhook.comparing.apart import Apart
from tenterhook.tables import Table

_SHOWN = 3  # rows at each end of a run of rows that say the same


class Row(NamedTuple):
    """One value of both: where, how far apart, and what that means."""

    address: str
    other: str  # the address in b
    source: str  # file:line
    shape: str
    apart: Apart
    verdict: str  # equal, within rounding, first, differs, grown, not compared
    own: Apart | None = None  # how far apart with the inputs of a, where that was asked
    note: str = ""
    wrong: tuple[float, float] | None = None  # with reference=True: how far a and b are from float64, at most

    @property
    def max(self) -> float:
        """The largest absolute difference."""
        return self.apart.largest

    @property
    def units(self) -> float:
        """That over the largest value, in units of the precision of the dtype."""
        return self.apart.units

    @property
    def cosine(self) -> float:
        """The cosine between the two."""
        return self.apart.cosine


@dataclass(frozen=True)
class First:
    """The first place whose own inputs agree, and whose output does not."""

    address: str  # of the module whose own code makes the difference
    other: str  # in b
    seen_at: str  # the value at which it shows: its output, or the input of a module that it calls
    apart: Apart
    call: int = 0
    line: str = ""  # the line in b
    source: str = ""  # file:line in b
    inner: str = ""  # the address of the value that the line makes
    why: tuple[str, ...] = ()  # what is different about the two modules themselves

    def __str__(self) -> str:
        where = self.address if self.address == self.other else f"{self.address} (b: {self.other})"
        if self.seen_at != self.address:
            where += f", seen at {self.seen_at}"
        lines = [f"first: {where}: {_in_words(self.apart)}"]
        if self.source:
            lines.append(f"  line  {_short(self.source)}  {self.line}" + (f"   ({self.inner})" if self.inner else ""))
        lines += [f"  why   {why}" for why in self.why[:4]]
        return "\n".join(lines)


@dataclass
class Comparison:
    """The outcome of `compare`. Print it; iterate for rows; `first` is the first place that makes a difference."""

    rows: list[Row]
    first: First | None
    alignment: Alignment | None = None
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    failed: tuple[str, str] = ("", "")  # what a and b raised, and where
    condition: str = ""
    notes: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, address: str) -> Row:
        """The row of an address of a."""
        for row in self.rows:
            if address in (row.address, row.address.removesuffix("@0")):
                return row
        raise KeyError(address)

    @property
    def equal(self) -> bool:
        """True if every value was the same to the last bit, and none was missing."""
        verdicts = {row.verdict for row in self.rows}
        return self.agree and "equal" in verdicts and verdicts <= {"equal", "not compared"}

    @property
    def agree(self) -> bool:
        """True if nothing differs by more than rounding explains."""
        has_grown = any(row.verdict == "grown" for row in self.rows)
        return bool(self.rows) and self.first is None and not any(self.failed) and not has_grown

    @property
    def verdict(self) -> str:
        """In one sentence."""
        compared = [row for row in self.rows if row.verdict != "not compared"]
        n = len(compared)
        if any(self.failed):
            who = " and ".join(f"{name} raised {what}" for name, what in zip("ab", self.failed, strict=True) if what)
            agreed = sum(row.verdict in ("equal", "within rounding") for row in compared)
            return f"{who}; {agreed} of the {n} values until then agree"
        if not compared:
            return f"no numbers: the shapes of {len(self.rows)} values agree" if self.rows else "nothing was compared"
        if self.first is not None:
            return str(self.first)
        if self.equal:
            return f"equal: {n} values, to the last bit"
        if not self.agree:
            return "they differ, and no place makes more than rounding: it has grown"
        worst = max(compared, key=lambda row: row.apart.order)
        return f"within rounding: {n} values, at most {worst.units:.1f} units apart, at {worst.address}"

    def __str__(self) -> str:
        lines = [self.verdict]
        if any(self.failed) and self.first is not None:
            lines.append(str(self.first))
        if self.rows:
            lines += ["", str(self.table())]
        lines += [f"note: {note}" for note in self._notes()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return markup.page(markup.title(self.verdict), self.table().html(), markup.notes(self._notes()))

    def _notes(self) -> list[str]:
        notes = list(self.notes)
        for who, names in (("a", self.only_a), ("b", self.only_b)):
            if names:
                more = f" … ({len(names)} in all)" if len(names) > 8 else ""
                notes.append(f"in {who} alone: {', '.join(names[:8])}{more}")
        return notes

    def table(self, everything: bool = False) -> Table:
        """The table; long runs of rows that say the same are cut unless everything is asked for."""
        renamed = any(row.address != row.other for row in self.rows)
        judged = any(row.wrong is not None for row in self.rows)
        header = ["address", *(["in b"] if renamed else []), "source", "value", "max |Δ|", "units", "cosine"]
        header += [*(["a / b from float64"] if judged else []), "verdict"]
        rows: list[list[str]] = []
        for _, group in groupby(self.rows, key=lambda row: row.verdict):
            same = list(group)
            cut = not everything and len(same) > 2 * _SHOWN + 1
            for i, row in enumerate(same):
                if cut and i == _SHOWN:
                    rows.append([f"… {len(same) - 2 * _SHOWN} more", *[""] * (len(header) - 2), row.verdict])
                if not cut or not _SHOWN <= i < len(same) - _SHOWN:
                    rows.append(_cells(row, renamed, judged))
        return Table(header, rows, right=("max |Δ|", "units", "cosine"))


def _cells(row: Row, renamed: bool, judged: bool) -> list[str]:
    verdict = row.verdict + (f": {row.note}" if row.note else "")
    figures = ["", "", ""] if row.verdict == "not compared" else _figures(row.apart)
    wrong = [("" if row.wrong is None else f"{row.wrong[0]:.3g} / {row.wrong[1]:.3g}")] if judged else []
    names = [row.address, row.other] if renamed else [row.address]
    return [*names, _short(row.source), row.shape, *figures, *wrong, verdict]


def _figures(apart: Apart) -> list[str]:
    if apart.is_equal:
        return ["0", "0", "1"]
    if apart.what:
        return ["–", "–", "–"]
    units = f"{apart.units:.3g}" if apart.eps else "–"
    return [f"{apart.largest:.3g}", units, f"{apart.cosine:.6g}"]


def _in_words(apart: Apart) -> str:
    if apart.what:
        return apart.what
    units = f", {apart.units:.3g} units" if apart.eps and apart.scale else ""
    return f"max |Δ| {apart.largest:.3g}{units}"


def _short(source: str) -> str:
    file, _, line = source.rpartition(":")
    return f"{Path(file).name}:{line}" if file else source
