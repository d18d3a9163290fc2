"""Runs trainings bare and watched, each in a process of its own, and compares what came of it."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tenterhook import TenterhookError, open_run
from tests.zoo.registry import Training

ROOT = Path(__file__).parents[2]
ENV = {name: value for name, value in os.environ.items() if not name.startswith("TENTERHOOK")}
ENV |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "COLUMNS": "100"}
LIMIT = 180.0  # seconds for one training; more is a hang
GOOD = ("named", "noted", "clean", "skipped")


@dataclass
class Result:
    """What came of one training."""

    training: Training
    verdict: str  # one of GOOD, or missed, accused, changed, hangs, broken
    found: dict[str, str] = field(default_factory=dict)  # the worst severity of each rule
    texts: list[str] = field(default_factory=list)
    detail: str = ""

    @property
    def said(self) -> str:
        return ", ".join(rule if level != "note" else f"({rule})" for rule, level in self.found.items())


def check(training: Training, options: list[str], device: str = "cpu") -> Result:
    """Run it twice, and judge what was found."""
    if training.missing:
        return Result(training, "skipped", detail=f"{', '.join(training.missing)} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        try:
            words = ("-m", "tests.zoo", training.name, "--device", device)
            bare = _python(*words)
            ours = ("-m", "tenterhook", "run", "--out", folder, *options)
            watched = _python(*ours, *words)
        except subprocess.TimeoutExpired as error:
            return Result(training, "hangs", detail=f"{error.cmd} ran for more than {LIMIT:.0f} s")
        if bare.returncode and device != "cpu":
            return Result(training, "skipped", detail=f"it is not written for {device}")
        if said := _differ(bare, watched):
            return Result(training, "changed", detail=said)
        return _judge(training, Path(folder))


def _python(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=ENV, timeout=LIMIT, capture_output=True, text=True)


def _differ(bare: subprocess.CompletedProcess, watched: subprocess.CompletedProcess) -> str:
    """In what the two runs differ, or how both fail; the last line of what they print is the digest of the weights."""
    if bare.returncode or "weights " not in bare.stdout:
        return f"fails by itself with exit code {bare.returncode}: {bare.stderr[-2000:]}"
    if watched.returncode != bare.returncode:
        return f"exit code {watched.returncode}, bare {bare.returncode}: {watched.stderr[-2000:]}"
    if watched.stdout != bare.stdout:
        return f"it printed {watched.stdout!r}, bare {bare.stdout!r}"
    return ""


def _judge(training: Training, folder: Path) -> Result:
    try:
        run = open_run(folder)
    except TenterhookError as error:
        return Result(training, "broken", detail=f"nothing was recorded: {error}")
    info = run.rank_info(0)
    states = info.get("rules", [])
    raised = [f"{state['rule']}: {state['why']}" for state in states if "the rule raised" in (state.get("why") or "")]
    if info.get("failed"):
        raised.append(f"recording stopped: {info['failed']}")
    detail = list(raised)
    rows = run.findings().to_pylist()
    found: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row["severity"] == "note"):
        found.setdefault(row["rule"], row["severity"])
    texts = [
        f"{row['severity']} {row['rule']}: {row['text']} [{row['site'] or ''}, step {row['step']}]" for row in rows
    ]
    verdict = "broken" if raised or not states else _verdict(training, found)
    if not found and all(state["state"] == "not checked" for state in states):
        detail.append("there was nothing that a rule could check")
    return Result(training, verdict, found, texts, "; ".join(detail))


def _verdict(training: Training, found: dict[str, str]) -> str:
    if not training.rules:
        return "accused" if set(found.values()) - {"note"} else "clean"
    levels = {level for rule, level in found.items() if rule in training.rules}
    return "missed" if not levels else "noted" if levels == {"note"} else "named"
