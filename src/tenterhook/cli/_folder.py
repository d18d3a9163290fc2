"""The folder of a run, which all ranks that torchrun has started share."""

import os
import time
from pathlib import Path

from tenterhook.store import new_folder


def folder_for_run(root: Path, name: str) -> Path:
    """A new folder; under torchrun the first rank to come makes it, and the others find it by a note."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return new_folder(root, name)
    # torchrun is the parent of all ranks of a machine; its job has a name only where several machines take part.
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    job = os.environ.get("TORCHELASTIC_RUN_ID", "") if several else str(os.getppid())
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    root.mkdir(parents=True, exist_ok=True)
    note = root / f".group-{job}-{os.environ.get('MASTER_PORT', '')}-{again}"
    try:
        with note.open("x") as file:
            folder = new_folder(root, name)
            file.write(folder.name)
        return folder
    except FileExistsError:
        for _ in range(600):
            if found := note.read_text():
                return root / found
            time.sleep(0.05)
        raise TimeoutError(f"no rank has written {note}") from None
