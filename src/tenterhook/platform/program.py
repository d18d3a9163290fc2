"""What Python does when it runs a program: finding `-m module`, and waiting for threads at the end.

Relies on: `runpy._get_module_details(name, error)`, which gives `(name, spec, code)` or raises that error, here
`runpy._Error`; `threading._shutdown`, which waits for all threads that are no daemons, and may be called again.
"""

import runpy
import threading
import types
from typing import Any


class NoSuchModule(Exception):
    """`python -m` would not find it, or could not run it; the message is Python's."""


def find_module(name: str) -> tuple[Any, types.CodeType]:
    """What `python -m name` runs."""
    try:
        _, spec, code = runpy._get_module_details(name, runpy._Error)  # type: ignore[attr-defined]
    except runpy._Error as error:  # type: ignore[attr-defined]
        raise NoSuchModule(str(error)) from None
    return spec, code


def join_threads() -> None:
    """Wait for all threads, as Python does when the main one is through."""
    threading._shutdown()  # type: ignore[attr-defined]
