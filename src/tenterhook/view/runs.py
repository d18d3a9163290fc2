"""The runs that a page may show, by their names."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tenterhook.store.run import Run, open_run
from tenterhook.view.answers import Answers, NoAnswer

_OPEN_AT_ONCE = 6  # runs and ranks whose levels are kept
Asked = tuple[str, int | None]  # the name of a run, "" for the first, and a rank, None for its first


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Some runs by the names of their folders, of which those that are called alike are numbered."""
    found: dict[str, Run] = {}
    for run in runs:
        name = run.folder.resolve().name
        alike = sum(one.folder.resolve().name == name for one in found.values())
        found[f"{name} ({alike + 1})" if alike else name] = run
    return found


class Runs:
    """The runs that may be looked at: those that were asked for, and what is in the folder of the first."""

    def __init__(self, given: Sequence[Run]) -> None:
        self._given = {name: run.folder.resolve() for name, run in named(given).items()}
        self.first = next(iter(self._given))
        self._open: OrderedDict[tuple[str, int], tuple[Answers, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Their names, newest first."""
        return sorted(self._folders(), reverse=True)

    def folder(self, name: str) -> Path:
        """The folder of a run by its name; only a name that is in the list is one."""
        folders = self._folders()
        if name and name not in folders:
            raise NoAnswer(f"there is no run {name!r} beside {self.first}")
        return folders[name or self.first]

    def _folders(self) -> dict[str, Path]:
        files = self._given[self.first].parent.glob("*/run.json")
        beside = {file.parent.name: file.parent for file in files if not file.parent.is_symlink()}
        return beside | self._given

    def answer(self, asked: Asked, name: str, window: dict[str, str], other: Asked | None = None) -> bytes:
        """An answer about one of them, beside another one or not."""
        both = [self._opened(*one) for one in (asked, other) if one is not None]
        with contextlib.ExitStack() as stack:
            for _, lock in sorted({id(lock): (k, lock) for k, _, lock in both}.values(), key=lambda one: one[0]):
                stack.enter_context(lock)  # always in the same order: two pages may ask for both
            answers = [one for _, one, _ in both]
            return answers[0].answer(name, window, *answers[1:])

    def _opened(self, name: str, rank: int | None) -> tuple[tuple[str, int], Answers, threading.Lock]:
        name, folder = name or self.first, self.folder(name)
        key = (name, -1 if rank is None else rank)
        with self._lock:
            if key not in self._open:
                self._open[key] = Answers(open_run(folder), rank, name), threading.Lock()
            self._open.move_to_end(key)
            while len(self._open) > _OPEN_AT_ONCE:
                self._open.popitem(last=False)
            return key, *self._open[key]

    def revision(self, run: str) -> int:
        """Another number whenever something was written."""
        files = [*self.folder(run).glob("rank-*/*"), *self.folder(run).glob("rank-*/snapshots/*.json")]
        found = 0
        for file in files:
            try:
                found += file.stat().st_size + file.stat().st_mtime_ns % 1_000_003
            except OSError:
                continue
        return found
