"""Writing a run: a folder, run.json, and a stream per table that can be read while it grows."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tenterhook.store.arrays import array
from tenterhook.store.schemas import arrow, schemas


def new_folder(root: Path, name: str) -> Path:
    """A folder for a new run, `<utc>-<name>`, and a link `latest` to it."""
    root.mkdir(parents=True, exist_ok=True)
    ignore = root / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"
    for k in range(1, 10_000):
        folder = root / (stamp if k == 1 else f"{stamp}-{k}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        _link(root / "latest", folder.name)
        return folder
    raise FileExistsError(f"no name left for a run beside {folder}")


def _link(link: Path, target: str) -> None:
    new = link.with_name(f".latest-{os.getpid()}")
    try:
        new.symlink_to(target)
        new.replace(link)
    except OSError:  # no links on this file system; open_run looks for the newest folder
        new.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a file so that a reader sees the old one or the new one, whatever happens meanwhile."""
    new = path.with_name(f".{path.name}-{os.getpid()}")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


class RankWriter:
    """The tables of one rank, each an Arrow IPC stream that grows by whole batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._schemas = schemas()
        self._streams: dict[str, tuple[Any, Any]] = {}

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Append rows to a table, given as columns: lists, arrays, or Arrow arrays; what is missing is null.

        They are with the operating system afterwards, which has them even if this process is killed.
        """
        pa = arrow()
        schema = self._schemas[table]
        many = len(next(iter(columns.values())))
        arrays = [array(columns[f.name], f.type) if f.name in columns else pa.nulls(many, f.type) for f in schema]
        file, stream = self._streams.get(table) or self._open(table)
        stream.write_batch(pa.record_batch(arrays, schema=schema))
        file.flush()

    def close(self) -> None:
        """End the streams."""
        for file, stream in self._streams.values():
            with file:
                stream.close()
        self._streams.clear()

    def _open(self, name: str) -> tuple[Any, Any]:
        pa = arrow()
        file = (self.folder / f"{name}.arrows").open("wb")
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)  # zstd takes thrice as long
        self._streams[name] = (file, pa.ipc.new_stream(file, self._schemas[name], options=options))
        return self._streams[name]
