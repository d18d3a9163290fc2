"""Steps become rows of the run on disk, and go past the rules."""

import os
import platform
import socket
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tenterhook.record.judge import Judge
from tenterhook.record.places import Places
from tenterhook.record.rule import Finding
from tenterhook.record.step import Step
from tenterhook.stats.arithmetic import Floats
from tenterhook.stats.columns import TABLE, Column
from tenterhook.stats.histograms import Histograms
from tenterhook.store.schemas import VERSION, arrow
from tenterhook.store.write import RankWriter, write_json

_OF_STEPS = ("time", "seconds", "loss", "losses", "backwards", "skipped", "scale", "rates", "sampled", "spent")
_OF_FINDINGS = ("step", "rule", "severity", "text", "why", "then")
_EVERY = 2.0  # seconds after which steps go to disk, at the latest with the next one
_ROWS = 16384


class Log:
    """One rank's part of a run. `models` are descriptions, asked for when the file about the rank is written."""

    def __init__(self, folder: Path, rank: int, judge: Judge, info: dict[str, Any], places: Places) -> None:
        self.folder = folder
        self.judge = judge
        self.places = places
        self._named: tuple[int, dict[str, Any]] = (-1, {})
        self.writer = RankWriter(folder / f"rank-{rank}")
        self.rank = rank
        self.steps = self.sampled = self.unmeasured = 0
        self.dense: int = info.get("schedule", {}).get("dense", 0)
        self._all, self._later = _Cost(), _Cost()
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
            self.writer.write("stats", stats_columns(sampled, self._names()))
        if steps:
            columns = {name: [getattr(step, name) for step in steps] for name in _OF_STEPS}
            self.writer.write("steps", {"step": [step.number for step in steps], **columns})
        if findings:
            columns = {name: [getattr(f, name) for f in findings] for name in _OF_FINDINGS}
            columns |= {name: [getattr(f.place, name, None) for f in findings] for name in ("model", "site", "what")}
            self.writer.write("findings", columns)

    def _names(self) -> dict[str, Any]:
        """The texts of all places, as Arrow arrays to take from."""
        if self._named[0] != len(self.places.all):
            columns = {name: [getattr(p, name) for p in self.places.all] for name in ("model", "site", "what")}
            self._named = len(self.places.all), {name: arrow().array(texts) for name, texts in columns.items()}
        return self._named[1]

    def close(self) -> None:
        """Write the rest, and end the files."""
        try:
            self.flush()
        finally:
            self.writer.close()

    def describe(self, **facts: Any) -> None:
        """What is known of the rank so far: models, how it ended, the states of the rules."""
        states = [asdict(state) for state in self.judge.states()]
        numbers = {
            "steps": self.steps,
            "sampled": self.sampled,
            "unmeasured": self.unmeasured,
            **self.overhead(),
            "rules": states,
        }
        write_json(self.writer.folder / "rank.json", {"rank": self.rank, "pid": os.getpid(), **numbers, **facts})

    def overhead(self) -> dict[str, float | None]:
        """The share of time that recording took, of all steps and of those after the dense start."""
        return {"overhead": self._all.share(), "overhead_later": self._later.share()}

    def _count(self, step: Step) -> None:
        self.steps += 1
        self.sampled += step.sampled
        self.unmeasured += step.unmeasured
        if step.number:  # the first one has imports and allocations in it
            self._all.add(step)
            if step.number >= self.dense:
                self._later.add(step)


class _Cost:
    """What recording took of some steps: by its own clock, and on a GPU also by comparing sampled steps with others."""

    def __init__(self) -> None:
        self.seconds = self.spent = 0.0
        self._many = [0, 0]  # steps, sampled or not
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=500), deque(maxlen=500))

    def add(self, step: Step) -> None:
        self.seconds += step.seconds
        self.spent += step.spent
        self._many[step.sampled] += 1
        self._times[step.sampled].append(step.seconds)

    def share(self) -> float | None:
        if not self.seconds:
            return None
        counted = self.spent / max(self.seconds - self.spent, 1e-9)
        if min(map(len, self._times)) < 10 or not _on_gpu():
            return counted
        usual, sampled = (float(np.median(times)) for times in self._times)
        return max(counted, (sampled - usual) * self._many[True] / (usual * sum(self._many)))


def _on_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


def stats_columns(steps: list[Step], names: dict[str, Any]) -> dict[str, Any]:
    """The rows of some steps as columns of the table; `names` has the texts of all places."""
    pa = arrow()
    which = pa.array(np.concatenate([step.rows.which for step in steps]))
    numbers = np.concatenate([step.rows.numbers for step in steps])
    found = Histograms.joined([step.rows.histograms for step in steps])
    starts = pa.array(found.starts.astype(np.int32))
    columns: dict[str, Any] = {
        "step": np.repeat([step.number for step in steps], [len(step.rows) for step in steps]),
        **{name: column.take(which) for name, column in names.items()},
        "calls": np.concatenate([step.calls for step in steps]),
        **{column.name: _on_disk(column, numbers[:, i]) for i, column in enumerate(TABLE)},
        "bins": pa.ListArray.from_arrays(starts, pa.array(found.bins.astype(np.int16))),
        "counts": pa.ListArray.from_arrays(starts, pa.array(found.counts)),
    }
    for name in ("dead", "saturated"):
        if any(getattr(step, name) for step in steps):
            columns[name] = [getattr(step, name).get(place.number) for step in steps for place in step.rows.places]
    return columns


def _on_disk(column: Column, numbers: Floats) -> Any:
    if not column.is_nullable:
        return numbers.astype(column.dtype)
    none = numbers == column.start
    return arrow().array(np.where(none, 0.0, numbers), mask=none)


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
