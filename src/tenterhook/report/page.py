"""The verdict in a notebook: the same parts as in the box."""

from collections.abc import Iterator
from typing import Any

from tenterhook import markup
from tenterhook.report.box import MARKS, place_of, time_of
from tenterhook.report.causes import Finding, by_severity, worst_of
from tenterhook.report.verdict import Verdict

_FINDINGS, _ALSO = 8, 4  # how many are shown, before the others are folded


class VerdictText(str):
    """The verdict as text, in its frame; a notebook shows it as a page."""

    __slots__ = ("_html",)
    _html: str

    @classmethod
    def of(cls, verdict: Verdict, everything: bool) -> "VerdictText":
        """The text of a verdict."""
        text = cls(verdict.box(everything=everything))
        text._html = page(verdict, everything)
        return text

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._html


def page(verdict: Verdict, everything: bool) -> str:
    """The verdict as HTML."""
    groups = by_severity([finding] for finding in verdict.findings) if everything else verdict.groups
    blocks = [markup.lines(_group(group), worst_of(group)) for group in groups]
    if not blocks:
        nothing = "✔ nothing found" if verdict.clean else f"○ nothing to check: {verdict.nothing}"
        blocks = [markup.lines([nothing], "clean" if verdict.clean else "")]
    rest = blocks[_FINDINGS:]
    parts = [markup.title(f"tenterhook ─ {verdict.models} · {verdict.steps}"), *blocks[:_FINDINGS]]
    if rest:
        parts.append(markup.folded(f"{len(rest)} more findings", "".join(rest)))
    return markup.page(*parts, *_checked(verdict), markup.notes(verdict.details if everything else verdict.remarks))


def _group(group: list[Finding]) -> Iterator[str]:
    row = group[0]
    yield " · ".join(filter(None, (f"{MARKS.get(worst_of(group), '●')} {row['rule']}", place_of(row), time_of(row))))
    for label, text in (("", row["text"]), ("why: ", row["why"]), ("next: ", row["then"])):
        if text:
            yield f"{label}{text}"
    for other in group[1 : 1 + _ALSO]:
        yield " · ".join(filter(None, (f"also: {other['rule']}", place_of(other), time_of(other))))
    if len(group) > 1 + _ALSO:
        yield f"and {len(group) - 1 - _ALSO} more findings"


def _checked(verdict: Verdict) -> Iterator[str]:
    if verdict.clean:
        yield markup.folded(f"✔ {len(verdict.clean)} rules clean", markup.notes([", ".join(verdict.clean)]))
    if verdict.unchecked:
        rows: Any = [tuple(one) for one in verdict.unchecked]
        yield markup.folded(f"○ {len(verdict.unchecked)} not checked", markup.table(("rule", "why not"), rows))
