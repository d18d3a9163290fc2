"""How far two tensors are apart, in chunks, so that nothing large is made."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tenterhook.platform.tensors import has_numbers
from tenterhook.values.numbers import largest
from tenterhook.values.tree import can_have_gradient, shape_of

CHUNK = 1 << 20  # numbers that are compared at a time


class Apart(NamedTuple):
    """How far b is from a."""

    largest: float = 0.0  # max |b - a|
    scale: float = 0.0  # max |a|, of the finite values
    cosine: float = 1.0
    slope: float = 0.0  # how far b is a, scaled: 1e-5 where b is 1.00001 a
    size: int = 0
    eps: float = 0.0  # the precision of the coarser of the two; 0 for integers
    what: str = ""  # why they cannot be compared number by number, or what is special

    @property
    def is_equal(self) -> bool:
        """True if all numbers are the same."""
        return self.largest == 0.0 and not self.what

    @property
    def units(self) -> float:
        """The largest difference over the largest value, in units of the precision."""
        if self.is_equal:
            return 0.0
        if not self.eps or not self.scale:
            return math.inf
        return self.largest / (self.eps * self.scale)

    @property
    def order(self) -> float:
        """For the worst of several."""
        return math.inf if self.what or math.isnan(self.units) else self.units


SAME = Apart()
NO_NUMBERS = Apart(size=-1)  # on the meta device the shape is all there is


def apart(a: Tensor, b: Tensor, coarse: float = 0.0) -> Apart:
    """Measure two tensors, which may be on different devices and of different dtypes.

    `coarse`: the precision of what was computed, where that is less than the dtype says (TF32, autocast).
    """
    if shape_of(a) != shape_of(b):
        return Apart(math.inf, what=f"{_times(a)} against {_times(b)}")
    if not (has_numbers(a) and has_numbers(b)):
        return NO_NUMBERS
    a, b = _plain(a.detach()), _plain(b.detach())
    a, b = in_range_of(b, a), in_range_of(a, b)
    if can_have_gradient(a) != can_have_gradient(b) and torch.bool in (a.dtype, b.dtype):
        return Apart(math.inf, what=f"{_name(a)} against {_name(b)}")
    eps = max(_eps(a), _eps(b))
    eps = max(eps, coarse) if eps else 0.0
    if not a.numel():
        return SAME
    if a.device != b.device:
        a = a.to(b.device)
    if a.dtype == b.dtype and torch.equal(a, b):
        scale = float(largest(a)) if a.is_floating_point() and a.itemsize > 1 else 0.0  # float8 has no such operation
        return Apart(scale=scale, size=a.numel(), eps=eps)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    if not can_have_gradient(a) and not can_have_gradient(b):
        wide = torch.float64
    sums = [_sums(*pair, wide) for pair in _chunks(a, b)]
    return _together(sums, a.numel(), eps)


def _chunks(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    if a.numel() <= CHUNK:
        return [(a, b)]
    rows = max(1, CHUNK * a.shape[0] // a.numel()) if a.dim() else 1
    pairs = list(zip(a.split(rows), b.split(rows), strict=True))
    return [small for pair in pairs for small in (_chunks(pair[0][0], pair[1][0]) if _is_long(pair[0]) else [pair])]


def _is_long(a: Tensor) -> bool:
    return a.shape[0] == 1 and a.numel() > CHUNK


def _sums(a: Tensor, b: Tensor, wide: torch.dtype) -> list[float]:
    """Of one chunk: max |Δ|, max |a|, a·a, b·b, a·b, Δ·a, and whether something was not finite on one side alone."""
    a, b = a.to(wide).reshape(-1), b.to(wide).reshape(-1)
    if wide.is_complex:
        a, b = torch.view_as_real(a).reshape(-1), torch.view_as_real(b).reshape(-1)
    found = _stacked(a, b)
    if all(map(math.isfinite, found)):
        return [*found, 0.0]
    alike = (a == b) | (a.isnan() & b.isnan())  # equal infinities differ by nothing
    odd = bool((~alike & ~(a.isfinite() & b.isfinite())).any())
    fine = a.isfinite() & b.isfinite()
    return [*_stacked(torch.where(fine, a, 0).double(), torch.where(fine, b, 0).double()), float(odd)]


def _stacked(a: Tensor, b: Tensor) -> list[float]:
    d = b - a
    return torch.stack([largest(d), largest(a), a.dot(a), b.dot(b), a.dot(b), d.dot(a)]).tolist()


def _together(sums: list[list[float]], size: int, eps: float) -> Apart:
    columns = list(zip(*sums, strict=True))
    largest, scale = max(columns[0]), max(columns[1])
    aa, bb, ab, da = (math.fsum(column) for column in columns[2:6])
    what = "not finite on one side" if any(columns[6]) else ""
    norms = math.sqrt(aa) * math.sqrt(bb)
    cosine = ab / norms if norms else float(aa == bb)
    return Apart(largest, scale, min(cosine, 1.0), da / aa if aa else 0.0, size, eps, what)


def in_range_of(b: Tensor, a: Tensor) -> Tensor:
    """A value of a as far as the dtype of b reaches: the lowest number of each dtype, as in a mask, is one."""
    if not (a.is_floating_point() and b.is_floating_point()) or torch.finfo(a.dtype).max <= torch.finfo(b.dtype).max:
        return a
    info = torch.finfo(b.dtype)
    return torch.where(a.isinf(), a, a.clamp(info.min, info.max))


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if can_have_gradient(tensor) else 0.0


def _times(tensor: Tensor) -> str:
    return "×".join(map(str, shape_of(tensor))) or "scalar"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
