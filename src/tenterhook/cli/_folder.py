"""The folder of a run, which all ranks that torchrun has started share."""

import os
import time
from pathlib import Path

from tenterhook.store import new_folder, open_run

_PATIENCE = 10.0  # seconds
_STALE = 60.0  # seconds; torchrun starts the ranks of all machines at the same time


def folder_for_run(root: Path, name: str) -> Path:
    """A new folder; under torchrun the first rank to come makes it, and the others find it by a note."""
    note = _note(root)
    if note is None:
        return new_folder(root, name)
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(600):
        try:
            with note.open("x") as file:
                folder = new_folder(root, name)
                file.write(folder.name)
            return folder
        except FileExistsError:
            found, old = _read(note)
            if old:  # of a job that was killed
                note.unlink(missing_ok=True)
            elif found:
                return root / found
            else:
                time.sleep(0.05)
    raise TimeoutError(f"no rank has written {note}")


def tidy(root: Path) -> None:
    """The run is over: take the note away."""
    note = _note(root)
    if note is not None:
        note.unlink(missing_ok=True)


def wait_for_ranks(folder: Path) -> None:
    """Until the other ranks have written what they have, or a few seconds: the verdict compares them."""
    run = open_run(folder)
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not all("ended" in run.rank_info(rank) for rank in run.ranks):
        time.sleep(0.05)


def _note(root: Path) -> Path | None:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    # torchrun is the parent of all ranks of a machine; its job has a name only where several machines take part,
    # and often that is just "none".
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    job = os.environ.get("TORCHELASTIC_RUN_ID", "") if several else str(os.getppid())
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return root / f".group-{job}-{os.environ.get('MASTER_PORT', '')}-{again}"


def _read(note: Path) -> tuple[str, bool]:
    """What a note says, and whether it is an old one."""
    try:
        return note.read_text(), time.time() - note.stat().st_mtime > _STALE
    except FileNotFoundError:
        return "", False
