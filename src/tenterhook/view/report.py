"""A run as one file: the page, with every answer that it may ask for inside. It opens from disk, without a network."""

import base64
import gzip
import html
import json
import os
from pathlib import Path

from tenterhook.report.verdict import Verdict
from tenterhook.store.run import Run
from tenterhook.view.answers import Answers
from tenterhook.view.page import NotBuilt, page, policy

_COLUMNS = 1000  # of a matrix
_STRETCHES = 40  # of a histogram over time


def write_report(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write it, into a folder as report.html; the path is given back."""
    path = Path(path)
    path = path / "report.html" if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{os.getpid()}")
    new.write_text(report_of(run), encoding="utf-8")
    new.replace(path)
    return path


def report_of(run: Run) -> str:
    """The text of the file."""
    html_page = page()
    packed = base64.b64encode(gzip.compress(_packed(run), 6)).decode()
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


def _packed(run: Run) -> bytes:
    """All answers one after another, behind a line that says how long each one is."""
    answers = Answers(run, run.ranks[0] if run.ranks else 0)
    sizes, parts = {}, []
    for name in answers.names():
        columns = _STRETCHES if name.startswith("site/") else _COLUMNS
        part = answers.answer(name, {"columns": str(columns)})
        part += b" " * (len(part) % 2)  # matrices begin at an even byte
        sizes[name] = len(part)
        parts.append(part)
    head = json.dumps(sizes).encode()
    return head + b" " * (-(len(head) + 1) % 2) + b"\n" + b"".join(parts)
