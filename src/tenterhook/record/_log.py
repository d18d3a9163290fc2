"""Steps become rows of the run on disk, and go past the rules."""

import os
import platform
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tenterhook.record._judge import Judge
from tenterhook.record._rule import Finding
from tenterhook.record._step import Rows, Step
from tenterhook.store._schemas import VERSION, arrow
from tenterhook.store._write import RankWriter, write_json

_WHOLE = ("count", "nan", "pos_inf", "neg_inf", "zeros", "sampled")
_REAL = ("sum", "sumsq")
_OF_STEPS = ("time", "seconds", "loss", "backwards", "skipped", "scale", "rates", "sampled", "spent")
_OF_FINDINGS = ("step", "rule", "severity", "text", "why", "then")
_EVERY = 2.0  # seconds after which steps go to disk, at the latest with the next one
_ROWS = 16384


class Log:
    """One rank's part of a run. `models` are descriptions, asked for when the file about the rank is written."""

    def __init__(self, folder: Path, rank: int, judge: Judge, info: dict[str, Any]) -> None:
        self.folder = folder
        self.judge = judge
        self.writer = RankWriter(folder / f"rank-{rank}")
        self.rank = rank
        self.steps = self.sampled = 0
        self.seconds = self.spent = 0.0
        self._slow: list[float] = []  # seconds of sampled steps, and of the others
        self._fast: list[float] = []
        self._waiting: list[Step] = []
        self._findings: list[Finding] = []
        self._rows, self._flushed = 0, time.monotonic()
        if rank == 0 or not (folder / "run.json").exists():
            write_json(folder / "run.json", {"format": VERSION, **info})

    def take(self, step: Step) -> bool:
        """Note a step and judge it; whether there was something to find."""
        self._count(step)
        self._waiting.append(step)
        self._rows += len(step.rows)
        findings = self.judge.look(step)
        self._findings += findings
        if findings or self._rows >= _ROWS or time.monotonic() - self._flushed >= _EVERY:
            self.flush()
        return bool(findings)

    def flush(self) -> None:
        """Write all that was noted."""
        steps, self._waiting = self._waiting, []
        findings, self._findings = self._findings, []
        self._rows, self._flushed = 0, time.monotonic()
        sampled = [step for step in steps if len(step.rows)]
        if sampled:
            self.writer.write("stats", stats_columns(sampled))
        if steps:
            columns = {name: [getattr(step, name) for step in steps] for name in _OF_STEPS}
            self.writer.write("steps", {"step": [step.number for step in steps], **columns})
        if findings:
            columns = {name: [getattr(f, name) for f in findings] for name in _OF_FINDINGS}
            columns |= {name: [getattr(f.place, name, None) for f in findings] for name in ("model", "site", "what")}
            self.writer.write("findings", columns)

    def close(self) -> None:
        """Write the rest, and end the files."""
        try:
            self.flush()
        finally:
            self.writer.close()

    def describe(self, **facts: Any) -> None:
        """What is known of the rank so far: models, how it ended, the states of the rules."""
        states = [asdict(state) for state in self.judge.states()]
        numbers = {"steps": self.steps, "sampled": self.sampled, "overhead": self.overhead(), "rules": states}
        write_json(self.writer.folder / "rank.json", {"rank": self.rank, "pid": os.getpid(), **numbers, **facts})

    def overhead(self) -> float | None:
        """The share of time that recording took: where there are other steps to compare with, by comparison."""
        if not self.seconds:
            return None
        counted = self.spent / max(self.seconds - self.spent, 1e-9)
        if len(self._fast) < 10 or len(self._slow) < 10:
            return counted
        usual, more = float(np.median(self._fast)), float(np.median(self._slow))
        compared = max(0.0, more - usual) * len(self._slow) / max(usual * (len(self._slow) + len(self._fast)), 1e-9)
        return max(counted, compared) if _on_gpu() else counted

    def _count(self, step: Step) -> None:
        self.steps += 1
        self.sampled += step.sampled
        if step.number:  # the first one has imports and allocations in it
            self.seconds += step.seconds
            self.spent += step.spent
            (self._slow if step.sampled else self._fast).append(step.seconds)


def _on_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


def stats_columns(steps: list[Step]) -> dict[str, Any]:
    """The rows of some steps as columns of the table."""
    pa = arrow()
    places = [place for step in steps for place in step.rows.places]
    numbers = np.concatenate([step.rows.numbers for step in steps])
    histogram = np.concatenate([step.rows.histogram for step in steps])
    rows = Rows(places, numbers, histogram)
    row, key = np.nonzero(histogram)
    starts = np.searchsorted(row, np.arange(len(rows) + 1)).astype(np.int32)
    bins = pa.ListArray.from_arrays(pa.array(starts), pa.array(key.astype(np.int16)))
    counts = pa.ListArray.from_arrays(pa.array(starts), pa.array(histogram[row, key].astype(np.int32)))
    some = rows.finite > 0
    columns: dict[str, Any] = {
        "step": np.repeat([step.number for step in steps], [len(step.rows) for step in steps]),
        **{name: [getattr(place, name) for place in places] for name in ("model", "site", "what")},
        "calls": [many for step in steps for many in step.calls],
        **{name: getattr(rows, name).astype(np.int64) for name in _WHOLE},
        **{name: getattr(rows, name) for name in _REAL},
        "min": pa.array(np.where(some, rows.min, 0.0), mask=~some),
        "max": pa.array(np.where(some, rows.max, 0.0), mask=~some),
        "bins": bins,
        "counts": counts,
    }
    for name in ("dead", "saturated"):
        if any(getattr(step, name) for step in steps):
            columns[name] = [getattr(step, name).get(place.number) for step in steps for place in step.rows.places]
    return columns


def surroundings(command: list[str]) -> dict[str, Any]:
    """What run.json says about where and how: versions, command, git state, time."""
    import torch

    from tenterhook import __version__

    versions = {"tenterhook": __version__, "torch": torch.__version__, "python": platform.python_version()}
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if _on_gpu() else []
    return {
        "command": command,
        "folder": str(Path.cwd()),
        "started": time.time(),
        "versions": versions,
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "devices": devices,
        "git": git_state(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }


def git_state() -> dict[str, Any] | None:
    """The commit of the working directory and whether something is changed, or None."""
    import subprocess

    def git(*words: str) -> str:
        done = subprocess.run(("git", *words), capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
