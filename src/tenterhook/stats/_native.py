"""Measuring tensors on a CPU in a single pass, by a little C that is compiled on first use, where there is a compiler.

That takes an eighth of a second and leaves nothing behind. Without a compiler NumPy does the same in six passes.

Where the machine has a core that torch does not use, a thread of the C code takes part. It never waits for Python, nor
Python for it, but in `finish`, which must come before the program goes on: it may free or write into what is read.
"""

import atexit
import ctypes
import functools
import os
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenterhook.stats._layout import BINS, NUMBERS

Rows = tuple[NDArray[np.float64], NDArray[np.int32]]
_SOURCE = Path(__file__).with_name("_native.c")
_SHEET = 256  # rows
_MOST = 8  # sheets that are kept for later
_ROW, _BINS = 8 * len(NUMBERS), 4 * BINS  # bytes
_JOB = [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_void_p] * 2


def measure_native(tensors: Sequence[Tensor]) -> Rows | None:
    """The numbers and histograms of flat float32 tensors, a row each; None where there is no compiled code."""
    if _compiled() is None:
        return None
    sheet = Sheet(len(tensors))
    for tensor in tensors:
        sheet.add([], tensor)
    return sheet.numbers, sheet.bins


def is_native() -> bool:
    """Whether there is compiled code."""
    return _compiled() is not None


class Sheet:
    """Rows of numbers and histograms that compiled code fills in; `places` says whose each is."""

    def __init__(self, rows: int = _SHEET) -> None:
        self.numbers, self.bins = np.empty((rows, len(NUMBERS))), np.empty((rows, BINS), np.int32)
        self._at = self.numbers.ctypes.data, self.bins.ctypes.data
        self._measure = _compiled().now
        self.places: list[list[int]] = []
        self.lost: list[list[int]] = []  # the places of what was written into before it was measured

    @property
    def is_full(self) -> bool:
        """Whether there is no row left."""
        return len(self.places) == len(self.numbers)

    def add(
        self,
        places: list[int],
        tensor: Tensor,
        crew: "Crew | None" = None,
        minus: Tensor | None = None,
        copy: Tensor | None = None,
    ) -> None:
        """Measure contiguous float32 values, less others, or copy them meanwhile; by the thread where one is given."""
        k = len(self.places)
        self.places.append(places)
        job = (
            tensor.data_ptr(),
            None if minus is None else minus.data_ptr(),
            None if copy is None else copy.data_ptr(),
            tensor.numel(),
            self._at[0] + k * _ROW,
            self._at[1] + k * _BINS,
        )
        if crew is None:
            self._measure(*job)
        else:
            crew.take(_Held(tensor, self, k, (minus, copy)), job)

    def clear(self) -> None:
        """Make room for other values, once these were read."""
        self.places, self.lost = [], []
        if len(_sheets) < _MOST:
            _sheets.append(self)


_sheets: list[Sheet] = []


def new_sheet() -> Sheet:
    """An empty one. Memory that is not new costs nothing."""
    return _sheets.pop() if _sheets else Sheet()


def finish() -> None:
    """Have everything measured that waits for the thread. Takes part in it."""
    if _crew.cache_info().currsize and (crew := _crew()) is not None:
        crew.finish()


def idle_core() -> "Crew | None":
    """The thread, if there is a core that torch does not use."""
    return _crew() if torch.get_num_threads() < _cores() else None


@functools.cache
def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Held:
    """What the thread may still be reading and writing."""

    __slots__ = ("also", "k", "number", "sheet", "tensor", "version")

    def __init__(self, tensor: Tensor, sheet: Sheet, k: int, also: object) -> None:
        self.tensor, self.sheet, self.k, self.also = tensor, sheet, k, also
        self.version = tensor._version
        self.number: int | None = None  # None if a signal came before it was submitted, or before we knew


class Crew:
    """The thread, and what it works on."""

    def __init__(self, code: Any, submit: Any) -> None:
        self._submit, self._finish = submit, code.finish
        self._finished = ctypes.c_int64.in_dll(code, "finished")
        self._lock = threading.RLock()
        self._for_good: list[_Held] = []
        self.held: deque[_Held] = deque()

    def take(self, held: _Held, job: tuple[Any, ...]) -> None:
        """Have something measured, and keep it until then."""
        with self._lock:
            self.held.append(held)
            held.number = self._submit(*job)
            self.let_go()

    def finish(self) -> None:
        """Wait until all is measured, and take part in it."""
        with self._lock:
            self._finish()
            self.let_go()

    def let_go(self) -> None:
        """Of what is measured. Where a tensor was written into in the meantime, that may have been too early."""
        done = self._finished.value
        while self.held and (self.held[0].number is None or self.held[0].number < done):
            one = self.held.popleft()
            if one.number is None:
                self._for_good.append(one)  # it may be waiting for the thread
            elif one.tensor._version != one.version:
                one.sheet.lost.append(one.sheet.places[one.k])
                one.sheet.places[one.k] = []


@functools.cache
def _crew() -> Crew | None:
    code = _compiled()
    if code is None or code.start() != 0:
        return None
    submit = ctypes.PyDLL(None, handle=code._handle).submit  # a call so short that letting go of the GIL is longer
    submit.restype, submit.argtypes = ctypes.c_int64, _JOB
    atexit.register(finish)
    return Crew(code, submit)


os.register_at_fork(after_in_child=_crew.cache_clear)  # a forked process has no such thread


@functools.cache
def _compiled() -> Any:
    if os.environ.get("TENTERHOOK_CC") == "0":
        return None
    compiler = os.environ.get("TENTERHOOK_CC") or os.environ.get("CC", "cc")
    options = ("-O3", "-shared", "-fPIC", "-pthread")
    for flags in (("-march=native",), ()):
        try:
            with tempfile.TemporaryDirectory(prefix="tenterhook-") as folder:
                library = Path(folder) / "native.so"
                command = [*compiler.split(), *options, *flags, str(_SOURCE), "-o", str(library)]
                subprocess.run(command, check=True, capture_output=True, timeout=30)
                code = ctypes.CDLL(str(library))
            code.now.argtypes, code.now.restype = _JOB, None
            code.finish.restype = None
        except (OSError, subprocess.SubprocessError, AttributeError):
            continue
        return code
    return None
