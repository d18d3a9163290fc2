"""The batches of a stream, one by one, each with a checksum: a damaged one is left out, and the others are still read.

Beside `stats.arrows` is `stats.index`, a line of text for each batch: where it begins, how long it is, its rows, its
first and last step, and the CRC-32 of all that and of its bytes. What comes after the last line, and all of a stream
without an index, is read unchecked up to where it ends.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tenterhook.store.schemas import arrow

_END_MARK = 8  # bytes


class Batch(NamedTuple):
    """Where a batch is, as the index has it."""

    offset: int
    length: int
    rows: int
    first: int  # step
    last: int
    checksum: int

    @property
    def facts(self) -> str:
        """What the checksum is of, beside the bytes."""
        return " ".join(map(str, self[:-1]))

    @property
    def line(self) -> str:
        """As it is in the index."""
        return f"{self.facts} {self.checksum:08x}\n"

    def holds(self, data: Any) -> bool:
        """Whether these are its bytes."""
        return len(data) == self.length and checksum(self.facts, zlib.crc32(data)) == self.checksum


@dataclass(frozen=True)
class Dropped:
    """A batch that was left out."""

    file: str
    first: int
    last: int
    rows: int

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.file} is damaged: {self.rows:,} rows of {steps} were left out"


def checksum(facts: str, of_bytes: int) -> int:
    """Of a batch, from the checksum of its bytes, which come first: they are summed while they are written."""
    return zlib.crc32(facts.encode(), of_bytes)


def spread(many: int, most: int) -> list[int]:
    """At most so many of the numbers below `many`, evenly, the first and the last too."""
    chosen = min(many, most)
    return sorted({i * (many - 1) // max(1, chosen - 1) for i in range(chosen)})


class Stream:
    """A stream on disk, which may still grow. `dropped` says what was left out by what was read so far."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.dropped: dict[int, Dropped] = {}  # by offset
        self._index: list[Batch] = []
        self._read = 0  # bytes of the index
        self._told = 0  # batches that `news` has given
        self._header: bytes | None = None

    def index(self) -> Sequence[Batch]:
        """The batches that have a checksum; more each time while a run is being recorded."""
        try:
            with self.path.with_suffix(".index").open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return ()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._index += [batch for line in whole.splitlines() if (batch := _parsed(line)) is not None]
        return self._index

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All of them in turn, with these columns or all."""
        index = list(self.index())
        for batch in index:
            if (found := self.read(batch, columns)) is not None:
                yield found
        yield from self._rest(index, columns)

    def news(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The batches that have come since this was last asked; of a stream without an index, all of them once."""
        index = self.index()
        if index:
            new, self._told = index[self._told :], len(index)
            yield from (found for batch in new if (found := self.read(batch, columns)) is not None)
        elif not self._told:
            for found in self.batches(columns):
                self._told = 1
                yield found

    def read(self, batch: Batch, columns: Sequence[str] | None = None) -> Any:
        """One batch; None where it is damaged, which is noted."""
        data = self._bytes(batch.offset, batch.length)
        if batch.holds(data):
            for found in self._decoded(self._with_schema(batch, data), columns):
                return found
        self.dropped[batch.offset] = Dropped(self.name, batch.first, batch.last, batch.rows)
        return None

    @property
    def has_ended(self) -> bool:
        """Whether the end mark was written: no batch will follow."""
        end = max((batch.offset + batch.length for batch in self.index()), default=0)
        return self.path.is_file() and self.path.stat().st_size - end == _END_MARK

    @property
    def name(self) -> str:
        """The file, with the folder of its rank."""
        return f"{self.path.parent.name}/{self.path.name}"

    def _rest(self, index: Sequence[Batch], columns: Sequence[str] | None) -> Iterator[Any]:
        pa = arrow()
        if not self.path.is_file():
            return
        if not index:
            if self.path.stat().st_size:
                with pa.memory_map(str(self.path)) as file:
                    yield from self._decoded(file, columns)
            return
        end = max(batch.offset + batch.length for batch in index)
        if self.path.stat().st_size - end > _END_MARK:
            rest = Batch(end, 0, 0, 0, 0, 0)
            yield from self._decoded(self._with_schema(rest, self._bytes(end, -1)), columns)

    def _decoded(self, source: Any, columns: Sequence[str] | None) -> Iterator[Any]:
        """The whole batches; one that is cut off or cannot be read ends them."""
        pa = arrow()
        try:
            reader = pa.ipc.open_stream(pa.BufferReader(source) if isinstance(source, bytes) else source)
            if columns is not None:
                fields = [i for i, name in enumerate(reader.schema.names) if name in columns]
                if isinstance(source, bytes):
                    options = pa.ipc.IpcReadOptions(included_fields=fields)
                    reader = pa.ipc.open_stream(pa.BufferReader(source), options=options)
            while True:
                found = reader.read_next_batch()
                found.validate(full=True)  # offsets that point elsewhere would crash whoever follows them
                yield found if columns is None else found.select([n for n in found.schema.names if n in columns])
        except (StopIteration, pa.ArrowException, OSError, ValueError):
            return

    def _with_schema(self, batch: Batch, data: bytes) -> bytes:
        """A stream of this batch alone: the first one has the schema before it. If that is damaged, ours holds."""
        if batch.offset == 0:
            return data
        if self._header is None:
            first = self._index[0]
            start = self._bytes(first.offset, first.length)
            whole = first.offset == 0 and first.holds(start)
            size = 8 + int.from_bytes(start[4:8], "little")
            self._header = start[:size] if whole else self.schema.serialize().to_pybytes()
        return self._header + data

    def _bytes(self, offset: int, length: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except (OSError, OverflowError, MemoryError):
            return b""


def _parsed(line: bytes) -> Batch | None:
    try:
        offset, length, rows, first, last, said = line.split()
        batch = Batch(int(offset), int(length), int(rows), int(first), int(last), int(said, 16))
    except ValueError:
        return None
    return batch if batch.offset >= 0 and batch.length > 0 else None
