"""Measuring tensors on a CPU in a single pass, by a little C that is compiled on first use, where there is a compiler.

That takes an eighth of a second and leaves nothing behind. Without a compiler NumPy does the same in six passes.

Of many tensors together a thread of the C code measures some, where the machine has a core that torch does not use.
The call returns when all are measured: whatever the program does next, nobody is reading its memory.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenterhook.stats.columns import BINS, START, TABLE

Measured = tuple[NDArray[np.float64], NDArray[np.int32]]  # numbers and histograms, a row for each tensor
_SOURCE = Path(__file__).with_name("native.c")
_SHEET = 256  # rows
_MOST = 8  # sheets that are kept for later
_ROW, _BINS = 8 * len(TABLE), 4 * BINS  # bytes
_JOB = np.dtype([(name, np.int64) for name in ("data", "minus", "copy", "size", "row", "bins")])  # as native.c has it
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "one": [_POINTER, _LONG, _POINTER, _POINTER],
    "all": [_POINTER, _LONG, ctypes.c_int],
    "fires": [_POINTER, _LONG, _LONG, _LONG, _POINTER],
    "renew": [],
}


def measure_native(tensors: Sequence[Tensor]) -> Measured | None:
    """The numbers and histograms of flat float32 tensors, a row each; None where there is no compiled code."""
    if _compiled() is None:
        return None
    sheet = Sheet(len(tensors))
    sheet.add_all([[]] * len(tensors), tensors)
    return sheet.numbers, sheet.bins


def is_native() -> bool:
    """Whether there is compiled code."""
    return _compiled() is not None


class Sheet:
    """Rows of numbers and histograms that compiled code fills in; `places` says whose each is."""

    def __init__(self, rows: int = _SHEET) -> None:
        self.numbers, self.bins = np.empty((rows, len(TABLE))), np.empty((rows, BINS), np.int32)
        self._at = self.numbers.ctypes.data, self.bins.ctypes.data
        self._rows, self._code = rows, _compiled()
        self._one = self._code.one
        self.places: list[list[int]] = []

    @property
    def room(self) -> int:
        """How many rows are left."""
        return self._rows - len(self.places)

    def add(self, places: list[int], tensor: Tensor) -> bool:
        """Measure contiguous float32 values; False where there is no room."""
        k = len(self.places)
        if k == self._rows:
            return False
        self.places.append(places)
        numbers, bins = self._at
        self._one(tensor.data_ptr(), tensor.numel(), numbers + k * _ROW, bins + k * _BINS)
        return True

    def add_all(
        self,
        places: Sequence[list[int]],
        tensors: Sequence[Tensor],
        minus: Sequence[Tensor] = (),
        copies: Sequence[Tensor] = (),
    ) -> None:
        """Measure many, perhaps by two cores; each less another, or copied to another in passing."""
        rows = np.arange(len(self.places), len(self.places) + len(tensors))
        self.places += places
        jobs = np.zeros(len(tensors), _JOB)
        jobs["data"] = [tensor.data_ptr() for tensor in tensors]
        if minus:
            jobs["minus"] = [tensor.data_ptr() for tensor in minus]
        if copies:
            jobs["copy"] = [tensor.data_ptr() for tensor in copies]
        jobs["size"] = [tensor.numel() for tensor in tensors]
        jobs["row"] = self._at[0] + rows * _ROW
        jobs["bins"] = self._at[1] + rows * _BINS
        self._code.all(jobs.ctypes.data, len(tensors), idle_core() and _helper())

    def clear(self) -> None:
        """Make room for other values, once these were read."""
        self.places = []
        if len(_sheets) < _MOST:
            _sheets.append(self)


_sheets: list[Sheet] = []


def new_sheet() -> Sheet:
    """An empty one. Memory that is not new costs nothing."""
    return _sheets.pop() if _sheets else Sheet()


def mark_firing(values: Tensor, outer: int, inner: int, known: Tensor) -> None:
    """Mark which units have a value above 0, of contiguous float32 values of [outer, unit, inner]."""
    _compiled().fires(values.data_ptr(), outer, known.numel(), inner, known.data_ptr())


def idle_core() -> bool:
    """Whether there is a core that torch does not use."""
    return torch.get_num_threads() < _cores()


@functools.cache
def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _helper() -> bool:
    """Start the thread."""
    return bool(_compiled().start() == 0)


def _after_fork() -> None:
    _helper.cache_clear()
    if _compiled.cache_info().currsize and (code := _compiled()) is not None:
        code.renew()


os.register_at_fork(after_in_child=_after_fork)


def _header() -> str:
    """columns.py for native.c: a row of numbers, and one of no values."""
    members = ", ".join(column.name for column in TABLE)
    start = ", ".join(str(number).replace("inf", "INFINITY") for number in START)
    row = f"typedef struct {{ double {members}; }} Row;\nstatic const Row START = {{{start}}};\n"
    return f"#include <math.h>\n{row}enum {{ BINS = {BINS} }};\n"


@functools.cache
def _compiled() -> Any:
    if os.environ.get("TENTERHOOK_CC") == "0":
        return None
    compiler = os.environ.get("TENTERHOOK_CC") or os.environ.get("CC", "cc")
    options = ("-O3", "-shared", "-fPIC", "-pthread")
    for flags in (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ()):
        try:
            with tempfile.TemporaryDirectory(prefix="tenterhook-") as folder:
                library = Path(folder) / "native.so"
                (Path(folder) / "columns.h").write_text(_header())
                command = [*compiler.split(), *options, *flags, "-I", folder, str(_SOURCE), "-o", str(library)]
                subprocess.run(command, check=True, capture_output=True, timeout=30)
                code = ctypes.CDLL(str(library))
            for name, types in _FUNCTIONS.items():
                function = getattr(code, name)
                function.argtypes, function.restype = types, None
        except (OSError, subprocess.SubprocessError, AttributeError):
            continue
        return code
    return None
