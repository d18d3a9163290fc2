"""Entries from the user's program: no exception of ours gets out, and their time is counted."""

import contextlib
import functools
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch import compiler

from tenterhook.platform.modes import any_mode, without_modes

clock = time.perf_counter
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = {getattr(signal, name) for name in _NAMES if hasattr(signal, name)}


class Guard:
    """What all entries of one recorder share: they are closed by the first error."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self.on = False
        self.lock = threading.RLock()
        self.spent = 0.0  # seconds in our own code, since the last step
        self.error: str | None = None
        self._failed = failed

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """What runs within is not recorded."""
        was_on, self.on = self.on, False
        try:
            yield
        finally:
            self.on = was_on

    def fail(self, error: BaseException) -> None:
        """An error of ours: record no more, and say so once. Never raises."""
        if self.error is None:
            self.error = f"{type(error).__name__}: {error}"
            self.on = False
            self._failed(self.error)


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an object that has a `guard` such an entry."""

    @functools.wraps(method)
    def safely(self: Any, *args: Any) -> Any:
        guard = self.guard
        if not guard.on or compiler.is_compiling():
            return None
        with guard.lock:
            start = clock()  # to wait for another thread is not our own time
            try:
                if not any_mode():
                    return method(self, *args)
                with without_modes():  # the user's are not for us
                    return method(self, *args)
            except Exception as error:
                guard.fail(error)
                if _is_of_a_signal(error):
                    raise  # a time limit of the program's, for example: it has only come while our code ran
                return None
            finally:
                guard.spent += clock() - start

    return safely


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program has raised this."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [code for one in handlers if (code := getattr(one, "__code__", None)) is not None]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Have signals wait, such as Ctrl-C: a step that is half written would be lost, and what comes after it too."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
