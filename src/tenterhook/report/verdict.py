"""The verdict: what the rules found in a run, as a person reads it. Works on the files; torch is not needed."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenterhook.say import counted
from tenterhook.store.run import Run
from tenterhook.store.schemas import SEVERITIES

_MARKS = {"error": "✖", "warn": "▲", "note": "●"}
_COLOURS = {"error": "31;1", "warn": "33;1", "note": "36", "clean": "32", "dim": "2", "bold": "1"}
RANKS = "ranks that disagree"
Line = tuple[str, int]  # with its width, for colours take none


@dataclass
class Verdict:
    """Findings, worst first, and what was clean or not checked; `str()` is the box."""

    folder: str
    title: str
    findings: list[dict[str, Any]] = field(default_factory=list)
    clean: list[str] = field(default_factory=list)
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    nothing: str = "nothing was trained"  # why there was nothing to check

    @classmethod
    def of(cls, run: Run, shown: Path | None = None) -> "Verdict":
        """The verdict on a run as it is on disk now; `shown` is its folder as a person knows it."""
        info = run.rank_info(0)
        findings = [row for row in run.findings().to_pylist()]
        states = info.get("rules", [])
        verdict = cls(str(shown or run.folder), _title(run, info), _grouped(findings))
        found = {row["rule"] for row in verdict.findings}
        verdict.clean = [s["rule"] for s in states if s["state"] == "clean" and s["rule"] not in found]
        verdict.unchecked = [(s["rule"], s["why"]) for s in states if s["state"] == "not checked"]
        if len(run.ranks) > 1:
            verdict._compare_ranks(run)
        if not info.get("models"):
            verdict.nothing = "no model was seen"
        elif info.get("passes"):
            verdict.nothing = "no rule had what it needs"
        verdict.remarks = list(_remarks(run, info))
        order = {name: i for i, name in enumerate(reversed(SEVERITIES))}
        verdict.findings.sort(key=lambda row: (order.get(row["severity"], 9), row["step"]))
        return verdict

    @property
    def worst(self) -> str | None:
        """The severity of the worst finding, or None."""
        return self.findings[0]["severity"] if self.findings else None

    def __str__(self) -> str:
        return self.box()

    def box(self, width: int = 100, colour: bool = False) -> str:
        """The verdict in a frame of this width."""
        paint = _paint if colour else _plain
        inner = max(60, width) - 4
        lines = [line for lines in self._lines(inner, paint) for line in lines]
        head = textwrap.shorten(self.title, inner - 15, placeholder=" …")
        foot = f'tenterhook summary {self.folder}  ·  tenterhook.open_run("{self.folder}")'
        if len(foot) > inner - 2:
            foot = f"tenterhook summary {self.folder}"
        top = f"┌ {paint('tenterhook', 'bold')} ─ {head} {'─' * (inner - len(head) - 13)}┐"
        bottom = f"└ {foot} {'─' * max(0, inner - len(foot))}┘"
        return "\n".join([top, *(f"│ {text}{' ' * (inner - length)} │" for text, length in lines), bottom])

    def _lines(self, width: int, paint: Any) -> Iterator[list[Line]]:
        for row in self.findings:
            yield [*_finding(row, width, paint), ("", 0)]
        if not self.findings:
            said = "nothing found" if self.clean else f"nothing to check: {self.nothing}"
            yield _wrapped("✔" if self.clean else "○", said, width, paint, "clean" if self.clean else "dim")
        if self.clean:
            yield _wrapped("✔", f"{len(self.clean)} clean: {', '.join(self.clean)}", width, paint, "clean")
        if self.unchecked and (self.clean or self.findings):
            yield _wrapped("○", f"{len(self.unchecked)} not checked:", width, paint, "dim")
            for name, why in self.unchecked:
                yield _wrapped(" ", f"{name}: {why}", width, paint, "dim")
        for remark in self.remarks:
            yield _wrapped("·", remark, width, paint, "dim")

    def _compare_ranks(self, run: Run) -> None:
        """Parameters that every rank should have alike, step by step."""
        import pyarrow.compute as pc

        table = run.table("stats")
        rows = table.filter(pc.equal(table["what"], "parameter")).select(
            ["step", "model", "site", "rank", "sum", "sumsq", "count"]
        )
        seen: dict[Any, tuple[int, Any]] = {}
        compared = False
        for row in sorted(rows.to_pylist(), key=lambda r: (r["step"], r["rank"])):
            key = (row["step"], row["model"], row["site"])
            value = (row["sum"], row["sumsq"], row["count"])
            rank, first = seen.setdefault(key, (row["rank"], value))
            compared |= rank != row["rank"]
            if first[2] == value[2] and not _alike(first, value):
                text = f"ranks {rank} and {row['rank']} have different values"
                why = "each rank trains a model of its own, and what is saved is only one of them"
                then = "wrap the model in DistributedDataParallel; seed all ranks alike before it is built"
                where = {"model": row["model"], "site": row["site"], "what": "parameter", "rank": row["rank"]}
                texts = {"rule": RANKS, "severity": "error", "text": text, "why": why, "then": then}
                self.findings.append({"step": row["step"], **texts, **where, "more": 0})
                return
        if compared:
            self.clean.append(RANKS)
        else:
            self.unchecked.append((RANKS, "no step was sampled by two ranks"))


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or abs(x - y) <= 1e-6 * (abs(x) + abs(y)) for x, y in zip(a[:2], b[:2], strict=True))


def _grouped(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each rule, rank and severity: the first, and how many more there are."""
    groups: dict[Any, dict[str, Any]] = {}
    for row in findings:
        key = (row["rule"], row["severity"])
        if key in groups:
            groups[key]["more"] += 1
        else:
            groups[key] = {**row, "more": 0}
    return list(groups.values())


def _title(run: Run, info: dict[str, Any]) -> str:
    models = info.get("models", [])
    if not models:
        what = "no model was seen"
    elif len(models) == 1:
        one = models[0]
        what = f"{one['name']} ({one['class']}{_parameters(one.get('parameters'))})"
    else:
        total = sum(model.get("parameters", 0) for model in models)
        what = f"{len(models)} models ({', '.join(m['name'] for m in models[:3])}{_parameters(total)})"
    steps, sampled = info.get("steps", 0), info.get("sampled", 0)
    if "ended" not in info:  # what the tables hold, which are written more often
        column = run.steps(0)["sampled"].to_pylist()
        steps, sampled = len(column), sum(column)
    parts = [what, f"{counted(steps, 'step')}, {sampled:,} sampled"]
    if len(run.ranks) > 1:
        parts.append(f"{len(run.ranks)} ranks")
    return " · ".join(parts)


def _parameters(number: int | None) -> str:
    """Nothing where there are none, or the model was gone before they were counted."""
    return f", {_many(number)} parameter{'' if number == 1 else 's'}" if number else ""


def _many(number: int) -> str:
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return str(number)


def _remarks(run: Run, info: dict[str, Any]) -> Iterator[str]:
    schedule = run.info.get("schedule", {})
    yield from _remarks_on_cost(schedule, info)
    if info.get("passes") and not info.get("optimizers", 1):
        yield "no optimizer of torch.optim has stepped: a step is a call of a model, and its backward pass"
        changed = "parameters changed from one backward pass to the next, so updates were recorded, too"
        yield changed if info.get("by_hand") else "no parameter of a model was seen to change between backward passes"
    if info.get("further_models"):
        yield f"models after the first {len(info['models'])} were not recorded"
    if many := info.get("unmeasured"):
        were = f"{counted(many, 'value')} {'was' if many == 1 else 'were'}"
        yield f"{were} not measured: sparse, or otherwise without numbers, or written into before"
    if info.get("fused"):
        yield "what is inside of an nn.TransformerEncoderLayer was not recorded where torch runs it as one operation"
    if schedule.get("sites") and not len(run.table("stats", 0)):
        yield f"nothing in the models answers to --sites {','.join(schedule['sites'])}"
    if info.get("failed"):
        yield f"recording stopped early: {info['failed']}"
    if "ended" not in info:
        yield "the program has not ended, or was killed; this is how far it was written"
    elif info["ended"] not in ("finished", "exit 0"):
        yield f"the program ended with {info['ended']}"
    if any(model.get("compiled") for model in info.get("models", [])):
        yield "activations were not recorded: the model runs under torch.compile"


def _remarks_on_cost(schedule: dict[str, Any], info: dict[str, Any]) -> Iterator[str]:
    dense, budget = schedule.get("dense", 0), schedule.get("budget") or 0
    share, later, seconds = (info.get(name) for name in ("overhead", "overhead_later", "overhead_seconds"))
    if share is not None:
        time = "" if seconds is None else f"{seconds:.2g} s, " if seconds < 10 else f"{seconds:,.0f} s, "
        usual = "" if later is None else f" ({later:.1%} after the first {counted(dense, 'step')})"
        yield f"overhead: watching took {time}{share:.1%} of the training's own time{usual}"
    elif seconds:
        yield f"overhead: watching took {seconds:.2g} s, most of the time of such short steps"
    if left_out := info.get("passed_over"):
        what = f"left out to stay near the budget of {budget:.0%}: {counted(left_out, 'sample')}"
        yield f"{what}; what came and went in between was not seen; --every N samples whatever it costs"


def _finding(row: dict[str, Any], width: int, paint: Any) -> list[Line]:
    """The rule at the left, where and since when at the right; below, what was found, why it matters, what to do."""
    what = row.get("what")
    parts = [
        f"{row['model']}: {row['site']}" if row.get("site") else row.get("model"),
        what.replace("_", " ") if what not in (None, "output", "parameter") else None,
        f"rank {row['rank']}" if row.get("rank") else None,
        _when(row["step"], row.get("until")),
        f"and {row['more']} more" if row["more"] else None,
    ]
    head = f"{_MARKS.get(row['severity'], '●')} {row['rule']}"
    where = textwrap.shorten(" · ".join(filter(None, parts)), max(20, width - len(head) - 2), placeholder=" …")
    gap = max(2, width - len(head) - len(where))
    lines = [(paint(head, row["severity"]) + " " * gap + where, len(head) + gap + len(where))]
    for label, text in (("", row["text"]), ("why   ", row["why"]), ("next  ", row["then"])):
        if text:
            found = textwrap.wrap(text, width, initial_indent=f"  {label}", subsequent_indent=" " * (2 + len(label)))
            start = 2 + len(label)
            lines += [(f"{paint(line[:start], 'dim')}{line[start:]}", len(line)) for line in found]
    return lines


def _when(step: int, until: int | None) -> str:
    if until is None:
        return f"since step {step:,}"
    return f"step {step:,}" if step == until else f"steps {step:,}–{until:,}"


def _wrapped(mark: str, text: str, width: int, paint: Any, colour: str) -> list[Line]:
    lines = textwrap.wrap(f"{mark} {text}", width, subsequent_indent="  ", drop_whitespace=True)
    if mark == " ":
        lines = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return [(paint(line, colour), len(line)) for line in lines]


def _plain(text: str, _: str) -> str:
    return text


def _paint(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
