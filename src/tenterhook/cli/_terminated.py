"""SIGTERM, by which a scheduler ends a job: there is time to write what is known, and then the process ends by it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def at_termination(then: Callable[[], object]) -> Iterator[None]:
    """Have `then` called before SIGTERM ends this process. A handler that the program sets takes the place of ours."""
    mine = os.getpid()

    def handle(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if os.getpid() == mine:  # a worker that was forked has no run to write
                then()
        finally:
            os.kill(os.getpid(), number)  # whoever waits for this process sees how it ended

    usual = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if usual:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if usual and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
