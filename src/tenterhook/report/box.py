"""The verdict on paper: a frame, in it the findings by their causes, then what was checked and what it cost."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tenterhook.report.causes import Finding, by_severity, worst_of
from tenterhook.say import counted

if TYPE_CHECKING:
    from tenterhook.report.verdict import Verdict

MARKS = {"error": "✖", "warn": "▲", "note": "●"}
_COLOURS = {"error": "31;1", "warn": "33;1", "note": "36", "clean": "32", "dim": "2", "bold": "1"}
_NOTES, _FINDINGS, _ALSO = 3, 8, 4  # how many are shown, in short

Line = list[tuple[str, str]]  # texts with their colours


def box(verdict: "Verdict", width: int, colour: bool, everything: bool) -> str:
    """The verdict in a frame of this width."""
    inner = max(40, width) - 4
    lines = [*(_all(verdict, inner) if everything else _short(verdict, inner))]
    models = _shortened(verdict.models, inner - 18 - len(verdict.steps))
    top: Line = [("┌ ", ""), ("tenterhook", "bold"), (f" ─ {models} · {verdict.steps} ", "")]
    summary = f"tenterhook summary {verdict.folder}"
    foot = f'└ tenterhook.open_run("{verdict.folder}") ' if everything else f"└ {summary} --all "
    rows = [
        _painted(top, colour) + "─" * (inner + 3 - _length(top)) + "┐",
        *(f"│ {_painted(line, colour)}{' ' * (inner - _length(line))} │" for line in lines),
        foot if len(foot) > inner + 3 else foot + "─" * (inner + 3 - len(foot)) + "┘",
    ]
    return "\n".join(rows)


def _short(verdict: "Verdict", width: int) -> Iterator[Line]:
    """Findings by their causes, notes in a line each, and how much was checked."""
    faults = [group for group in verdict.groups if worst_of(group) != "note"]
    yield from _faults(faults, verdict.about, width) if faults else _nothing(verdict, width)
    yield from _notes([group for group in verdict.groups if worst_of(group) == "note"], width)
    if checked := _checked(verdict):
        yield from _wrapped("✔" if verdict.clean else "○", checked, width, "clean" if verdict.clean else "dim")
    for remark in verdict.remarks:
        yield from _wrapped("·", remark, width, "dim")


def _faults(groups: list[list[Finding]], about: dict[str, str], width: int) -> Iterator[Line]:
    yield from _groups(groups[:_FINDINGS], about, width)
    if more := [group[0]["rule"] for group in groups[_FINDINGS:]]:
        yield from _wrapped("▲", f"{counted(len(more), 'more finding')}: {_tally(more)}", width, "warn")


def _groups(groups: list[list[Finding]], about: dict[str, str], width: int) -> Iterator[Line]:
    for heading, some in _by_model(groups, about):
        yield from heading
        for group in some:
            yield from [*_finding(group[0], width, worst_of(group)), *_also(group, width), []]


def _notes(groups: list[list[Finding]], width: int) -> Iterable[Line]:
    if len(groups) <= _NOTES:
        return [_note(group, width) for group in groups]
    return _wrapped("●", f"{len(groups)} notes: {_tally(group[0]['rule'] for group in groups)}", width, "note")


def _all(verdict: "Verdict", width: int) -> Iterator[Line]:
    """Every finding, and every rule with its state."""
    groups = by_severity([finding] for finding in verdict.findings)
    yield from _groups(groups, verdict.about, width)
    if not groups:
        yield from _nothing(verdict, width)
    if verdict.clean:
        yield from _wrapped("✔", f"{len(verdict.clean)} clean: {', '.join(verdict.clean)}", width, "clean")
    if verdict.unchecked:
        yield from _wrapped("○", f"{len(verdict.unchecked)} not checked:", width, "dim")
        for rule, why in verdict.unchecked:
            yield from _wrapped("  ·", f"{rule}: {why}", width, "dim")
    for remark in verdict.details:
        yield from _wrapped("·", remark, width, "dim")


def _nothing(verdict: "Verdict", width: int) -> list[Line]:
    if verdict.clean or verdict.findings:
        but = f" but {counted(len(verdict.findings), 'note')}" if verdict.findings else ""
        return _wrapped("✔", f"nothing found{but}", width, "clean")
    return _wrapped("○", f"nothing to check: {verdict.nothing}", width, "dim")


def _checked(verdict: "Verdict") -> str:
    clean = f"{counted(len(verdict.clean), 'rule')} clean" if verdict.clean else ""
    not_checked = f"{len(verdict.unchecked)} not checked" if verdict.unchecked else ""
    return ", ".join(filter(None, (clean, not_checked, verdict.left_out)))


def _by_model(groups: list[list[Finding]], about: dict[str, str]) -> Iterator[tuple[list[Line], list[list[Finding]]]]:
    """The groups of each model under its name, where findings are of several; those of no model by themselves."""
    of: dict[str | None, list[list[Finding]]] = {}
    for group in groups:
        model = group[0]["model"]
        of.setdefault(model if model in about else None, []).append(group)
    if len(of) < 2:
        yield [], groups
        return
    for model, some in of.items():
        heading: Line = [(model or "the training as a whole", "bold"), (f" {about.get(model or '', '')}", "dim")]
        yield [heading], some


def _finding(row: Finding, width: int, severity: str) -> Iterator[Line]:
    """The rule at the left, where and since when at the right; below, what was found, why it matters, what to do.

    A place that leaves no room for the step gets a line of its own.
    """
    when, place = time_of(row), place_of(row)
    rule = _shortened(f"{MARKS.get(severity, '●')} {row['rule']}", width - len(when) - 2)
    fits = len(rule) + len(place) + len(when) + 5 <= width
    right = f"{place} · {when}" if place and fits else when
    yield [(rule, severity), (" " * (width - len(rule) - len(right)), ""), (right, "")]
    if not fits:
        yield from _indented("  in    ", place, width)
    for label, text in (("  ", row["text"]), ("  why   ", row["why"]), ("  next  ", row["then"])):
        if text:
            yield from _indented(label, text, width)


def _also(group: list[Finding], width: int) -> Iterator[Line]:
    """What else the same fault has set off, in a line for each rule."""
    rules: dict[str, list[Finding]] = {}
    for row in sorted(group[1:], key=lambda row: row["step"]):
        rules.setdefault(row["rule"], []).append(row)
    for i, (rule, rows) in enumerate([*rules.items()][:_ALSO]):
        first = f"{rule}, step {rows[0]['step']:,}"
        more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
        where = _shortened(place_of(rows[0]) or rows[0]["text"], width - len(first) - len(more) - 11)
        yield [("  also  " if i == 0 else " " * 8, "dim"), (first, ""), (f" · {where}{more}" if where else more, "dim")]
    if len(rules) > _ALSO:
        yield [(_shortened(f"        {len(rules) - _ALSO} more: {_tally([*rules][_ALSO:])}", width), "")]


def _note(group: list[Finding], width: int) -> Line:
    row, when = group[0], time_of(group[0])
    more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    mark = f"● {_shortened(row['rule'], width // 2)}{more}"
    rest = "".join(f" · {text}" for text in (place_of(row), row["text"]) if text)
    rest = _shortened(rest, width - len(mark) - len(when) - 2)
    return [(mark, "note"), (f"{rest:{width - len(mark) - len(when)}}", ""), (when, "")]


def place_of(row: Finding) -> str:
    """Where it is, and of what."""
    what = row.get("what")
    parts = [
        f"{row['model']}: {row['site']}" if row.get("site") else row.get("model"),
        what.replace("_", " ") if what not in (None, "output", "parameter") else None,
        f"rank {row['rank']}" if row.get("rank") else None,
    ]
    return " · ".join(filter(None, parts))


def time_of(row: Finding) -> str:
    """In which steps it was found."""
    step, until = row["step"], row.get("until")
    if until is None:
        return f"since step {step:,}"
    return f"step {step:,}" if step == until else f"steps {step:,}–{until:,}"


def _tally(rules: Iterable[str]) -> str:
    """Names, and how often each comes where that is more than once."""
    names = [*rules]
    return ", ".join(f"{name} ({many})" if (many := names.count(name)) > 1 else name for name in dict.fromkeys(names))


def _wrapped(mark: str, text: str, width: int, colour: str) -> list[Line]:
    indent = " " * (len(mark) + 1)
    return [[(line, colour)] for line in textwrap.wrap(f"{mark} {text}", width, subsequent_indent=indent)]


def _indented(label: str, text: str, width: int) -> list[Line]:
    """A text beside a dim label."""
    start = len(label)
    lines = textwrap.wrap(text, width - start) or [""]
    return [[(label if i == 0 else " " * start, "dim"), (line, "")] for i, line in enumerate(lines)]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)].rstrip()}…" if width > 4 else ""


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _painted(line: Line, colour: bool) -> str:
    return "".join(f"\x1b[{_COLOURS[name]}m{text}\x1b[0m" if colour and name else text for text, name in line)
