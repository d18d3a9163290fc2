"""Steps become rows of the run on disk, and go past the rules."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tenterhook.record.judge import Judge
from tenterhook.record.overhead import Overhead
from tenterhook.record.places import Places
from tenterhook.record.rule import Finding
from tenterhook.record.step import Step
from tenterhook.stats.arithmetic import Floats
from tenterhook.stats.columns import TABLE, Column
from tenterhook.stats.histograms import Histograms
from tenterhook.store.arrays import encoded, lists, strings
from tenterhook.store.levels import levels_of
from tenterhook.store.schemas import VERSION, arrow
from tenterhook.store.write import RankWriter, write_json

_OF_STEPS = ("time", "seconds", "loss", "losses", "backwards", "skipped", "scale", "rates", "sampled", "spent")
_OF_FINDINGS = ("step", "rule", "severity", "text", "why", "then", "until")
_OF_PLACES = ("model", "site", "what")
_EVERY = 2.0  # seconds after which steps go to disk, at the latest with the next one
_ROWS = 16384


class Log:
    """One rank's part of a run. `models` are descriptions, asked for when the file about the rank is written."""

    def __init__(self, folder: Path, rank: int, judge: Judge, info: dict[str, Any], places: Places) -> None:
        self.rank, self.judge = rank, judge
        self.writer = RankWriter(folder / f"rank-{rank}")
        self.steps = self.sampled = self.unmeasured = 0
        self.overhead = Overhead(info.get("schedule", {}).get("dense", 0))
        self._places, self._written_places = places, 0
        self._texts: dict[str, list[bytes]] = {}
        self._waiting: list[Step] = []
        self._findings: list[Finding] = []
        self._rows, self._flushed = 0, time.monotonic()
        if rank == 0 or not (folder / "run.json").exists():
            write_json(folder / "run.json", {"format": VERSION, **info})

    def take(self, step: Step) -> bool:
        """Note a step and judge it; whether there was something to find."""
        self.steps += 1
        self.sampled += step.sampled
        self.unmeasured += step.unmeasured
        self.overhead.add(step)
        self._waiting.append(step)
        self._rows += len(step.rows)
        findings = self.judge.look(step)
        self._findings += findings
        if findings or self._rows >= _ROWS or time.monotonic() - self._flushed >= _EVERY:
            self.flush()
        return any(finding.until is None for finding in findings)

    def flush(self) -> None:
        """Write all that was noted."""
        steps, self._waiting = self._waiting, []
        findings, self._findings = self._findings, []
        self._rows, self._flushed = 0, time.monotonic()
        if sampled := [step for step in steps if len(step.rows)]:
            self._write_places()  # in this order: see Levels
            self.writer.write("stats", _stats_of(sampled, self._texts_of_places()))
            self.writer.write("levels", _levels_of(sampled))
        if steps:
            numbers = [step.number for step in steps]
            self.writer.write("steps", {"step": numbers, **_columns(steps, _OF_STEPS)})
        if findings:
            places = [finding.place for finding in findings]
            self.writer.write("findings", _columns(findings, _OF_FINDINGS) | _columns(places, _OF_PLACES))

    def close(self) -> None:
        """Write the rest, and end the files."""
        try:
            self.flush()
        finally:
            self.writer.close()

    def describe(self, **facts: Any) -> None:
        """What is known of the rank so far: models, how it ended, the states of the rules."""
        numbers = {"steps": self.steps, "sampled": self.sampled, "unmeasured": self.unmeasured}
        known: dict[str, Any] = {"rank": self.rank, "pid": os.getpid(), **numbers, **self.overhead.shares()}
        known["rules"] = [asdict(state) for state in self.judge.states()]
        write_json(self.writer.folder / "rank.json", {**known, **facts})

    def _write_places(self) -> None:
        new = self._places.all[self._written_places :]
        self._written_places += len(new)
        if new:
            numbers = [place.number for place in new]
            self.writer.write("places", {"place": numbers, **_columns(new, (*_OF_PLACES, "dtype"))})

    def _texts_of_places(self) -> dict[str, list[bytes]]:
        """What the columns say about where a row is from, for all places so far, by their numbers."""
        if len(self._texts.get("site", ())) < len(self._places.all):
            columns = _columns(self._places.all, _OF_PLACES)
            self._texts = {name: [encoded(text) for text in texts] for name, texts in columns.items()}
        return self._texts


def _columns(items: Sequence[Any], names: Iterable[str]) -> dict[str, list[Any]]:
    """Attributes of all items, None where an item is None."""
    return {name: [None if item is None else getattr(item, name) for item in items] for name in names}


def _stats_of(steps: list[Step], texts: dict[str, list[bytes]]) -> dict[str, Any]:
    """The rows of some steps as columns of the table."""
    pa = arrow()
    places = np.concatenate([step.rows.which for step in steps]).tolist()
    numbers = np.concatenate([step.rows.numbers for step in steps])
    found = Histograms.joined([step.rows.histograms for step in steps])
    columns: dict[str, Any] = {
        "step": np.repeat([step.number for step in steps], [len(step.rows) for step in steps]),
        **{name: strings([column[number] for number in places]) for name, column in texts.items()},
        "calls": np.concatenate([step.calls for step in steps]),
        **{column.name: _on_disk(column, numbers[:, i]) for i, column in enumerate(TABLE)},
        "bins": lists(found.starts, found.bins, pa.int16()),
        "counts": lists(found.starts, found.counts, pa.int32()),
    }
    for name in ("dead", "saturated"):
        if any(getattr(step, name) for step in steps):
            columns[name] = [getattr(step, name).get(number) for step in steps for number in step.rows.which.tolist()]
    return columns


def _levels_of(steps: list[Step]) -> dict[str, Any]:
    """The levels of some steps; where the places are those of the step before, they are left out."""
    layouts = [None, *(step.rows.layout for step in steps)]
    places = [
        None if layout == before else step.rows.which.tolist()
        for step, layout, before in zip(steps, layouts[1:], layouts, strict=False)
    ]
    starts = np.cumsum([0, *(len(step.rows) for step in steps)])
    levels = lists(starts, np.concatenate([levels_of(step.rows) for step in steps]), arrow().int16())
    return {"step": [step.number for step in steps], "places": places, "levels": levels}


def _on_disk(column: Column, numbers: Floats) -> Any:
    if not column.is_nullable:
        return numbers.astype(column.dtype)
    none = numbers == column.start
    return np.ma.array(numbers, mask=none)
