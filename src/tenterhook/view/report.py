"""A run as one file: the page, with every answer that it may ask for inside. It opens from disk, without a network."""

import base64
import gzip
import html
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tenterhook.report.verdict import Verdict
from tenterhook.store.run import Run
from tenterhook.view.answers import Answers, NoAnswer
from tenterhook.view.page import NotBuilt, page, policy
from tenterhook.view.runs import named

_COLUMNS = 1000  # of a matrix
_STRETCHES = 40  # of a histogram over time
_RANKS = 8  # unless others are asked for


def write_report(run: Run, path: str | os.PathLike[str], *others: Run, ranks: Collection[int] | None = None) -> Path:
    """Write it, and others to compare it with, into a folder as report.html; the path is given back.

    `ranks` are those that it has, all of them unless they are many: at most eight, first those with findings.
    """
    path = Path(path)
    path = path / "report.html" if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{os.getpid()}")
    new.write_text(report_of(run, *others, ranks=ranks), encoding="utf-8")
    new.replace(path)
    return path


def report_of(run: Run, *others: Run, ranks: Collection[int] | None = None) -> str:
    """The text of the file."""
    html_page = page()
    packed = base64.b64encode(gzip.compress(_packed([run, *others], ranks), 6)).decode()
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy(html_page, "data:"))}">'
    title = f"<title>{html.escape(run.folder.resolve().name)} · tenterhook</title>"
    data = f'<script type="text/plain" id="answers">{packed}</script>'  # base64: nothing in it can end the element
    before, found, after = html_page.partition("<title>tenterhook</title>")
    assert found, "the page has no title to replace"
    head, found, rest = after.partition("<!-- answers -->")
    assert found, "the page has no place for its answers"
    return before + meta + title + head + data + rest


def framed(run: Run) -> str:
    """The page in a frame, for a notebook; the verdict as text where the page is not built."""
    try:
        text = html.escape(report_of(run))
    except NotBuilt:
        return f"<pre>{html.escape(str(Verdict.of(run)))}</pre>"
    style = "width: 100%; height: 720px; border: 1px solid #8884; border-radius: 6px"
    return f'<iframe srcdoc="{text}" style="{style}" sandbox="allow-scripts"></iframe>'


def ranks_of(run: Run, asked: Collection[int] | None) -> tuple[int, ...]:
    """The ranks that a report has: those that are asked for, else all, of many those with findings and the first."""
    ranks = run.ranks or [0]
    if asked is not None:
        if none := sorted(set(asked) - set(ranks)):
            has = f"it has {', '.join(map(str, ranks))}"
            raise NoAnswer(f"there is no rank {', '.join(map(str, none))} in {run.folder.name}; {has}")
        return tuple(sorted(set(asked)))
    bad = {row["rank"] for row in run.findings().to_pylist()} if len(ranks) > _RANKS else set()
    return tuple(sorted(sorted(ranks, key=lambda rank: (rank != ranks[0], rank not in bad, rank))[:_RANKS]))


def _packed(runs: Sequence[Run], ranks: Collection[int] | None) -> bytes:
    """All answers one after another, behind a line that says how long each one is.

    They are called as the page asks for them: run, rank and name; where it compares, also the other run and rank.
    """
    sizes, parts = {}, []
    for name, answer in _answers(named(runs), ranks):
        part = answer + b" " * (len(answer) % 2)  # matrices begin at an even byte
        sizes[name] = len(part)
        parts.append(part)
    head = json.dumps(sizes).encode()
    return head + b" " * (-(len(head) + 1) % 2) + b"\n" + b"".join(parts)


def _answers(runs: dict[str, Run], ranks: Collection[int] | None) -> Iterator[tuple[str, bytes]]:
    chosen = {name: ranks_of(run, ranks) for name, run in runs.items()}
    yield "runs", json.dumps({"first": next(iter(runs)), "names": list(runs), "ranks": chosen}).encode()
    first: Answers | None = None
    for run_name, run in runs.items():
        for rank in chosen[run_name]:
            answers = Answers(run, rank, run_name, chosen[run_name])
            own = f"{run_name}/{rank}"
            for name, answer in answers.everything(_COLUMNS, _STRETCHES):
                yield f"{own}/{name}", answer
            if first is not None:
                for name, answer in first.all_differences(answers, _COLUMNS):
                    yield f"{first.name}/{first.rank}/{own}/{name}", answer
            first = first or answers
