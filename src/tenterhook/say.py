"""What we say, on stderr: the program's own output is on stdout, and stays as it is."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(text: str, stream: Any = None) -> None:
    """Print a line. A stream that is closed, full or not able to write it is no reason to stop a training."""
    stream = sys.stderr if stream is None else stream
    with contextlib.suppress(Exception):
        if stream is not None and hasattr(stream, "fileno") and stream in (sys.__stdout__, sys.__stderr__):
            stream.flush()
            _write(stream.fileno(), f"{text}\n".encode(stream.encoding, "backslashreplace"))
        elif stream is not None:
            stream.write(f"{text}\n")
            stream.flush()


def counted(many: int, what: str) -> str:
    """How many there are: `1 sample`, `1,200 samples`."""
    return f"{many:,} {what}" if many == 1 else f"{many:,} {what}s"


def file_here(file: str) -> str:
    """A file as it is named from the current directory, where it lies below that."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


class Progress:
    """How far a loop is, on one line of a terminal: nothing where stderr is a file or a pipe."""

    def __init__(self, name: str, what: str, many: int | None, *, shown: bool) -> None:
        self._name, self._what, self._many = name, what, many
        self._stream: Any = sys.stderr if shown and sys.stderr is not None and sys.stderr.isatty() else None
        self._began = self._last = time.monotonic()
        self._is_there = False
        self.done = 0

    def __enter__(self) -> "Progress":
        return self

    def one_more(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if self._stream is None or now - self._last < 0.2:
            return
        self._last, self._is_there = now, True
        of = "" if self._many is None else f" of {self._many:,}"
        rate = self.done / (now - self._began)
        self._put(f"\r\x1b[K{self._name}: {self.done:,}{of} {self._what}, {rate:.3g} a second")

    def __exit__(self, *error: object) -> None:
        if self._is_there:
            self._put("\r\x1b[K")

    def _put(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._stream.write(text)
            self._stream.flush()


def _write(file: int, rest: bytes) -> None:
    """Past the buffer: what cannot be written would stay in it, and Python would end with 120 because of that."""
    while rest:
        rest = rest[os.write(file, rest) :]
