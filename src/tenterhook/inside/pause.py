"""A mode that is off for a while: in a function that runs operation after operation of which nobody wants anything.

A mode costs half as much again as a small operation. To be told of each line that a frame begins costs a tenth
(`sys.settrace`); so the frame is traced, and the mode off, until it comes to a line in which something is wanted, until
any other function begins, or until it ends.

An exception may come in the tracer itself: a signal's, say. Python then traces no more, and tells nobody; so whoever
begins a pause must see to it that it is ended (`end`) before anything is wanted again.
"""

import sys
import threading
import time
from collections.abc import Callable, Container
from typing import Any

import torch

from tenterhook.hooks.modes import Mode
from tenterhook.platform.frames import let_go

_WORTH_IT = 1e-4  # seconds; to begin and to end one takes up to half of it, in newer Pythons


class Pause:
    """The time for which a mode is off, in one frame."""

    def __init__(self, mode: Mode, frame: Any, lines: Container[int], over: Callable[["Pause"], None]) -> None:
        self.frame = frame
        self.mark = frame.f_trace  # whose place the tracer takes
        self._mode = mode
        self._lines = lines  # those in which something is wanted
        self._over = over
        self._tracer: Any = None
        self._thread = threading.get_ident()
        self._is_off = self.was_worth_it = False
        self._since = 0.0

    def begin(self) -> None:
        """While the mode itself is running: it goes when the next line begins."""
        self.frame.f_trace = self._tracer = self._at_first
        sys.settrace(self._at_call)

    def _at_call(self, frame: Any, event: str, argument: Any) -> None:
        """A function begins, whichever."""
        traced = self.frame
        self.end()
        let_go(traced)

    def _at_first(self, frame: Any, event: str, argument: Any) -> None:
        """What happens first in the frame: a line begins, or it ends."""
        if event == "exception":  # which may be caught there
            return
        stack = torch.overrides._get_current_function_mode_stack()
        if event != "line" or frame.f_lineno in self._lines or stack != [self._mode]:  # others need their places
            self.end()
            return
        torch._C._pop_torch_function_stack()
        self._is_off, self._since = True, time.perf_counter()
        lines, end = self._lines, self.end

        def at_event(frame: Any, event: str, argument: Any) -> None:  # at each line: at the least cost
            if (event != "line" or frame.f_lineno in lines) and event != "exception":
                end()

        frame.f_trace = self._tracer = at_event

    def end(self) -> None:
        """Switch the mode on again, and trace no more."""
        if threading.get_ident() != self._thread or self.frame is None:
            return
        self.was_worth_it = self._is_off and time.perf_counter() - self._since > _WORTH_IT
        if sys.gettrace() == self._at_call:
            sys.settrace(None)
        if self.frame.f_trace == self._tracer:
            self.frame.f_trace = self.mark
        if self._is_off and self._mode not in torch.overrides._get_current_function_mode_stack():
            torch._C._push_on_torch_function_stack(self._mode)
        self._is_off = False
        self._over(self)
        self.frame = self._tracer = None
