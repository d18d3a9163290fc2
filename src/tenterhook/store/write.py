"""Writing a run: a folder, run.json, and a stream per table that can be read while it grows."""

import json
import os
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tenterhook.store.arrays import array
from tenterhook.store.batches import Batch, checksum
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
    """The tables of one rank, each an Arrow IPC stream that grows by whole batches, with an index beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._schemas = schemas()
        self._streams: dict[str, _Stream] = {}

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Append rows to a table, given as columns: lists, arrays, or Arrow arrays; what is missing is null.

        They are with the operating system afterwards, which has them even if this process is killed.
        """
        pa = arrow()
        schema = self._schemas[table]
        many = len(next(iter(columns.values())))
        arrays = [array(columns[f.name], f.type) if f.name in columns else pa.nulls(many, f.type) for f in schema]
        stream = self._streams.get(table)
        if stream is None:
            stream = self._streams[table] = _Stream(self.folder / f"{table}.arrows", schema)
        steps = columns.get("step", (0,))
        stream.append(pa.record_batch(arrays, schema=schema), int(min(steps)), int(max(steps)))

    def close(self) -> None:
        """End the streams."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


class _Stream:
    """A stream of one table, and its index: see batches.py."""

    def __init__(self, path: Path, schema: Any) -> None:
        pa = arrow()
        self._file = _Summed(path.open("wb"))
        self._index = path.with_suffix(".index").open("w")
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)  # zstd takes thrice as long
        self._stream = pa.ipc.new_stream(self._file, schema, options=options)

    def append(self, batch: Any, first: int, last: int) -> None:
        """Write a batch of these steps, then its line of the index."""
        begin, self._file.checksum = self._file.size, 0
        self._stream.write_batch(batch)
        self._file.flush()
        entry = Batch(begin, self._file.size - begin, len(batch), first, last, 0)
        self._index.write(entry._replace(checksum=checksum(entry.facts, self._file.checksum)).line)
        self._index.flush()

    def close(self) -> None:
        """Write the end mark."""
        with self._file.file, self._index:
            self._stream.close()


class _Summed:
    """A file that knows its size and the checksum of what was written since that was set to 0."""

    closed = False

    def __init__(self, file: Any) -> None:
        self.file, self.size, self.checksum = file, 0, 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        self.size += len(data)
        return int(self.file.write(data))

    def flush(self) -> None:
        self.file.flush()
