"""The statistics of many tensors on a CUDA device in one launch. Imported where there are such: it needs Triton.

A program of the kernel measures one chunk of one tensor, which it finds in a table of addresses and sizes, and adds
what it found to that tensor's row. There are two ways to measure a chunk:

    quick       a full chunk of a large tensor, as if its values were finite and neither huge nor tiny: at the speed
                of memory, in float32; its sum of squares tells afterwards whether they were
    careful     every other chunk, also those that turned out not to be so: in float64

To count a chunk in the histogram costs as much as to measure it eight times, so of a large tensor's chunk only the
first 1/32 is counted.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import ctypes
import math
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenterhook.stats.columns import BINS, INDEX, TABLE

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARPS, _REGISTERS = 4, 64  # many small programs on a multiprocessor: some load while others count

# A kernel sees such constants only. Sizes are in elements: larger chunks would leave a tensor with too few programs,
# smaller ones would make too many additions to its row.
_CHUNK = tl.constexpr(65536)
_SAMPLE = tl.constexpr(2048)
_SMALL = tl.constexpr(4096)  # the chunk of a tensor that is no larger than _CHUNK, and is counted as a whole
_LANES = tl.constexpr(512)  # 32-bit words of a load: 16 bytes for each thread
_UNROLLED = tl.constexpr(4)
_BINS = tl.constexpr(BINS)
_COLUMNS = tl.constexpr(len(TABLE))
_NAN, _POS_INF, _NEG_INF, _ZEROS, _SUM, _SUMSQ, _MIN, _MAX = (
    tl.constexpr(INDEX[name]) for name in ("nan", "pos_inf", "neg_inf", "zeros", "sum", "sumsq", "min", "max")
)
_INF = tl.constexpr(math.inf)


def measure_cuda(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers and histogram of dense tensors of float32, bfloat16 or float16 on one device, without waiting for it.

    They are read on the current stream of the device, so that whoever used them there may let go of them at once.
    """
    return Plan(tensors).measure()


class Plan:
    """The tables for some tensors. As long as these keep their memory, they can be measured with it again and again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        addresses = [t.data_ptr() for t in tensors]
        self._rows, self._device = len(tensors), tensors[0].device
        sizes = [t.numel() for t in tensors]
        plans = [_plan(size) for size in sizes]
        ends = list(accumulate(programs for programs, _ in plans))
        table = array("q", [0, *ends[:-1], *addresses, *sizes, *[_KINDS[t.dtype] for t in tensors]])
        self._filled = b"".join([table.tobytes(), *[row for _, row in plans]])
        self._programs, self._start = ends[-1], len(table)

    def measure(self) -> tuple[Tensor, Tensor]:
        """One launch."""
        filled, device = self._filled, self._device
        staged = torch.empty(len(filled) // 8, dtype=torch.float64, device="cpu", pin_memory=True)
        ctypes.memmove(staged.data_ptr(), filled, len(filled))
        uploaded = staged.to(device, non_blocking=True)  # torch keeps what is staged until it has been copied
        histogram = torch.zeros((self._rows, BINS), dtype=torch.int32, device=device)
        if self._programs:
            with torch.cuda.device(device):
                _compiled(device)[(self._programs, 1, 1)](uploaded, histogram, self._rows)
        return uploaded.as_strided((self._rows, len(TABLE)), (len(TABLE), 1), self._start), histogram


@lru_cache(maxsize=4096)
def _plan(size: int) -> tuple[int, bytes]:
    """How many programs measure a tensor of this size, and its row of numbers before they do."""
    chunk, sampled = _SMALL.value, size
    if size > _CHUNK.value:
        chunk = _CHUNK.value
        sampled = size // chunk * _SAMPLE.value + min(size % chunk, _SAMPLE.value)
    known = {"count": size, "sampled": sampled}
    row = [known.get(column.name, column.start) for column in TABLE]
    return -(-size // chunk), struct.pack(f"{len(row)}d", *row)


@lru_cache(maxsize=64)
def _compiled(device: torch.device):
    """The kernel for the current device: to launch it so takes less than half the time of `_measure[grid](...)`."""
    return _measure.warmup(torch.float64, torch.int32, 1, grid=(1,), num_warps=_WARPS, maxnreg=_REGISTERS)


@triton.jit(do_not_specialize=["rows"])
def _measure(table, histogram, rows):
    """Measure one chunk. The table: first programs, addresses, sizes, kinds; after it, the rows of numbers."""
    program = tl.program_id(0)
    columns = table.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, 256)
    tensor = -1  # to count the first programs up to this one is quicker than a search, which waits for load after load
    for at in range(0, rows, 256):
        firsts = tl.load(columns + at + lane, mask=at + lane < rows, other=1 << 40)
        tensor += tl.sum((firsts <= program).to(tl.int32))
    address = tl.load(columns + rows + tensor)
    size = tl.load(columns + 2 * rows + tensor)
    kind = tl.load(columns + 3 * rows + tensor)
    row = table + 4 * rows + tensor * _COLUMNS

    large = size > _CHUNK
    chunk = tl.where(large, _CHUNK, _SMALL)
    start = (program - tl.load(columns + tensor)) * chunk
    address += start * tl.where(kind == 0, 4, 2)
    count = tl.minimum(size - start, chunk).to(tl.int32)
    _count(address, kind, tl.where(large, tl.minimum(count, _SAMPLE), count), histogram + tensor * _BINS)
    done = False
    if (count == _CHUNK) & (address % 16 == 0):
        if kind == 0:
            done = _quick(address, 0, row)
        elif kind == 1:
            done = _quick(address, 1, row)
        else:
            done = _quick(address, 2, row)
    if not done:
        _careful(address, kind, count, row)


@triton.jit
def _quick(address, KIND: tl.constexpr, row):
    """Add a full chunk to the row, unless its sum of squares is NaN, infinite or so small that digits are lost.

    Values are summed around a shift, or little would be left of a small deviation from a large mean. It is the mean of
    the first values, but only where that says more than their deviation: it must not come from one outlier.
    """
    lane = tl.arange(0, _LANES)
    a, b = _pair(address, KIND, 0, lane)
    mean = tl.sum(a + b) / (2 * _LANES)
    shift = tl.where(2 * mean * mean > tl.sum(a * a + b * b) / (2 * _LANES), mean, 0.0)
    sum1 = tl.zeros([_LANES], tl.float32)
    sum2 = tl.zeros([_LANES], tl.float32)
    low = tl.full([_LANES], _INF, tl.float32)
    high = tl.full([_LANES], -_INF, tl.float32)
    zeros = tl.zeros([_LANES], tl.int32)
    for at in range(0, _CHUNK, 2 * _LANES * _UNROLLED):
        for step in tl.static_range(_UNROLLED):
            a, b = _pair(address, KIND, at + step * 2 * _LANES, lane)
            low = tl.minimum(low, tl.minimum(a, b))
            high = tl.maximum(high, tl.maximum(a, b))
            zeros += (a == 0).to(tl.int32) + (b == 0).to(tl.int32)
            a -= shift
            b -= shift
            sum1 += a + b
            sum2 = a * a + (b * b + sum2)
    by = shift.to(tl.float64)
    off1 = tl.sum(sum1).to(tl.float64)
    off2 = tl.sum(sum2).to(tl.float64)
    least = tl.min(low)
    most = tl.max(high)
    done = (off2 < _INF) & ((off2 > 1e-30) | (least == most))
    if done:
        total1 = off1 + _CHUNK * by
        total2 = off2 + 2 * by * off1 + _CHUNK * by * by
        _add(row, tl.sum(zeros), total1, total2, least, most)
    return done


@triton.jit
def _pair(address, KIND: tl.constexpr, at, lane):
    """Two values for each lane, from the given element on; those of 16 bits as the halves of a word."""
    if KIND == 0:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + at + lane
        a = tl.load(words)
        b = tl.load(words + _LANES)
    else:
        words = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + at // 2 + lane)
        if KIND == 1:
            a = (words << 16).to(tl.float32, bitcast=True)
            b = (words & -65536).to(tl.float32, bitcast=True)
        else:
            a = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            b = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return a, b


@triton.jit
def _careful(address, kind, count, row):
    """Add any chunk to the row."""
    lane = tl.arange(0, _LANES)
    sum1 = tl.zeros([_LANES], tl.float64)
    sum2 = tl.zeros([_LANES], tl.float64)
    low = tl.full([_LANES], _INF, tl.float32)
    high = tl.full([_LANES], -_INF, tl.float32)
    odd = tl.zeros([_LANES], tl.int32)  # three counts of 8 bits, for a lane sees 128 values at most
    zeros = tl.zeros([_LANES], tl.int32)
    for at in range(0, count, _LANES):
        inside = at + lane < count
        x = _load(address, kind, at + lane, inside)
        zeros += (inside & (x == 0)).to(tl.int32)
        odd += tl.where(x != x, 1, tl.where(x == _INF, 1 << 8, tl.where(x == -_INF, 1 << 16, 0)))
        finite = inside & (tl.abs(x) < _INF)
        low = tl.minimum(low, tl.where(finite, x, _INF))
        high = tl.maximum(high, tl.where(finite, x, -_INF))
        wide = tl.where(finite, x, 0.0).to(tl.float64)
        sum1 += wide
        sum2 += wide * wide
    _add(row, tl.sum(zeros), tl.sum(sum1), tl.sum(sum2), tl.min(low), tl.max(high))
    if tl.max(odd) > 0:
        tl.atomic_add(row + _NAN, tl.sum(odd & 255).to(tl.float64), sem="relaxed")
        tl.atomic_add(row + _POS_INF, tl.sum((odd >> 8) & 255).to(tl.float64), sem="relaxed")
        tl.atomic_add(row + _NEG_INF, tl.sum(odd >> 16).to(tl.float64), sem="relaxed")


@triton.jit
def _add(row, zeros, sum1, sum2, least, most):
    tl.atomic_add(row + _ZEROS, zeros.to(tl.float64), sem="relaxed")
    tl.atomic_add(row + _SUM, sum1, sem="relaxed")
    tl.atomic_add(row + _SUMSQ, sum2, sem="relaxed")
    tl.atomic_min(row + _MIN, least.to(tl.float64), sem="relaxed")
    tl.atomic_max(row + _MAX, most.to(tl.float64), sem="relaxed")


@triton.jit
def _count(address, kind, count, bins):
    """Add the first values of a chunk to the histogram."""
    lane = tl.arange(0, _SAMPLE)
    counts = tl.zeros([_BINS], tl.int32)
    for at in range(0, count, _SAMPLE):
        inside = at + lane < count
        bits = _load(address, kind, at + lane, inside).to(tl.int32, bitcast=True)
        counts += tl.histogram((bits >> 23) & 511, _BINS, mask=inside)
    tl.atomic_add(bins + tl.arange(0, _BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _load(address, kind, at, inside):
    """Values of a chunk in float32, 0 where there is none."""
    if kind == 0:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0)
    elif kind == 1:
        x = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=inside, other=0).to(tl.float32)
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=inside, other=0).to(tl.float32)
    return x
