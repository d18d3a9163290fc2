"""What we say, on stderr: the program's own output is on stdout, and stays as it is."""

import contextlib
import os
import sys
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


def _write(file: int, rest: bytes) -> None:
    """Past the buffer: what cannot be written would stay in it, and Python would end with 120 because of that."""
    while rest:
        rest = rest[os.write(file, rest) :]
