"""The ready-made changes: each is one function of a tensor and some arguments that returns a new tensor.

It has the same shape and dtype, unless it declares `any_shape`. What it replaces stays in the graph with a gradient of
zero, so that a backward pass finds every parameter that it would find otherwise.
"""

import operator
from contextlib import nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tenterhook.addresses.sites import Site
from tenterhook.changes.change import KINDS, Arguments, Number, as_change, ready
from tenterhook.changes.places import index_in
from tenterhook.values.tree import can_have_gradient, describe

Dims = int | tuple[int, ...]


@ready()
def zero(value: Tensor) -> Tensor:
    """Nothing but zeros."""
    return _filled(value, 0)


@ready()
def ones(value: Tensor) -> Tensor:
    """Nothing but ones."""
    return _filled(value, 1)


@ready(numbers=("by",), stands_for=(Tensor, Real))
def replace(value: Tensor, by: Tensor | Number) -> Tensor:
    """Another tensor, or a number everywhere. A tensor that broadcasts to the value's shape will do."""
    if not isinstance(by, Tensor):
        if not can_have_gradient(value) and by != int(by):
            raise ValueError(f"{by} is no {str(value.dtype).removeprefix('torch.')}, which the value is")
        return _filled(value, by)
    try:
        whole = (by.to(value.dtype) if can_have_gradient(value) else by).expand(value.shape)
    except RuntimeError:
        what = f"the replacement has shape {_times(by)}, the value {_times(value)}"
        raise ValueError(f"{what}; give single positions with at(...)") from None
    return _instead(value, whole)


@ready(numbers=("by",), operator=operator.mul)
def scale(value: Tensor, by: Tensor | Number) -> Tensor:
    """The value times a number, or times a tensor that broadcasts."""
    return value * by


@ready(numbers=("vector", "times"))
def add(value: Tensor, vector: Tensor | Number, times: Tensor | Number = 1.0) -> Tensor:
    """The value plus a vector, as in steering; `times` says how much of it."""
    return value + (vector * times if isinstance(times, Tensor) or times != 1.0 else vector)


def _with_a_bound(arguments: Arguments) -> Arguments:
    if arguments["min"] is arguments["max"] is None:
        raise ValueError("clamp: give it min, max or both")
    return arguments


@ready(prepare=_with_a_bound)
def clamp(value: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """The value held between two bounds."""
    return value.clamp(min, max)


@ready(random=True, numbers=("std",))
def noise(value: Tensor, std: Number, seed: int | None = None) -> Tensor:
    """The value plus normal noise: with a seed the same each time, without one from torch's own generator."""
    if seed is None:
        return value + torch.randn_like(value) * std
    generator = torch.Generator(value.device).manual_seed(seed)
    return value + torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device) * std


@ready()
def mean(value: Tensor, dim: Dims) -> Tensor:
    """The mean over some dimensions, in place of each value along them; `mean(0)`: over the rows of the batch."""
    return value.mean(dim, keepdim=True).expand_as(value).clone()


@ready(tensors=("rows",))
def resample(value: Tensor, rows: Tensor, seed: int = 0) -> Tensor:
    """For each row of the value a random row of another capture; the same ones at each call with the same seed."""
    if rows.shape[1:] != value.shape[1:] or not len(rows):
        raise ValueError(f"the rows to draw from have shape {_times(rows)}, the value {_times(value)}")
    generator = torch.Generator("cpu").manual_seed(seed)  # there: the same rows on every device
    drawn = torch.randint(len(rows), (len(value),), generator=generator, device="cpu")
    return _instead(value, rows[drawn.to(value.device)].to(value.dtype))


def _with_orthonormal_rows(arguments: Arguments) -> Arguments:
    direction: Tensor = arguments["direction"]
    if direction.dim() > 2:
        raise ValueError(f"project_out: several directions are the rows of a matrix, got {_times(direction)}")
    rows = torch.atleast_2d(direction)
    if direction.requires_grad:  # found anew each time, so that it can be learnt
        return {**arguments, "direction": rows}
    return {**arguments, "direction": _basis(rows)}


def _basis(rows: Tensor) -> Tensor:
    """Orthonormal rows for the same space, in float64; those that are so already stay as they are, bit for bit."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float64), copy=True)
    eps = torch.finfo(wide.dtype).eps
    one = torch.eye(len(rows), dtype=wide.dtype, device=wide.device)
    if torch.allclose(wide @ wide.mH, one, rtol=0, atol=64 * eps):
        return wide
    _, size, basis = torch.linalg.svd(wide, full_matrices=False)
    return basis[size > size.max() * len(rows) * torch.finfo(_at_least_float32(rows)).eps]


@ready(tensors=("direction",), prepare=_with_orthonormal_rows)
def project_out(value: Tensor, direction: Tensor, dim: int = -1) -> Tensor:
    """The value without its part along a direction, or along the plane of several (one a row)."""
    along = value.movedim(dim, -1)
    if direction.shape[-1] != along.shape[-1]:
        raise ValueError(f"the direction has {direction.shape[-1]} entries, the value {along.shape[-1]} along {dim}")
    device = value.device.type
    off = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
    with off:  # in less than the value's own precision, much would remain
        inverse = torch.linalg.pinv(direction) if direction.requires_grad else direction.mH
        return (along - along @ inverse @ direction).movedim(-1, dim)


def _with_a_possible_limit(arguments: Arguments) -> Arguments:
    limit = arguments["max_norm"]
    if not isinstance(limit, Tensor) and limit < 0:
        raise ValueError(f"clip_norm: no norm is below 0, so max_norm cannot be {limit}")
    return arguments


@ready(numbers=("max_norm",), prepare=_with_a_possible_limit)
def clip_norm(value: Tensor, max_norm: Number, dim: Dims | None = None) -> Tensor:
    """Scaled down where its 2-norm is over a limit; with `dim` each row by itself."""
    norm = torch.linalg.vector_norm(value, dim=dim, keepdim=dim is not None, dtype=_at_least_float32(value))
    tiny = torch.finfo(norm.dtype).tiny
    return value * (max_norm / norm.clamp(min=tiny)).clamp(max=1.0).to(value.dtype.to_real())


@ready(numbers=("times",))
def reverse(value: Tensor, times: Number = 1.0) -> Tensor:
    """Times −1, or −`times`: at a gradient, the reversal layer of domain-adversarial training."""
    return value * -times


def _with_change(arguments: Arguments) -> Arguments:
    return {**arguments, "change": as_change(arguments["change"])}


@ready(prepare=_with_change)
def at(value: Tensor, index: Any, change: Any, site: Site | None = None) -> Tensor:
    """A change at some positions only: `at((slice(None), 5), zero())` is `value[:, 5] = 0` on a copy."""
    index = index_in(value, index)
    out, part = value.clone(), value[index]
    new = change(part, site)
    if isinstance(new, Tensor) and (new.shape, new.dtype) != (part.shape, part.dtype):
        raise ValueError(f"at these positions it made {describe(new)} of {describe(part)}")
    out[index] = new
    return out


def _with_changes(arguments: Arguments) -> Arguments:
    return {"changes": tuple(map(as_change, arguments["changes"]))}


@ready(prepare=_with_changes, stands_for=(list, tuple))
def in_turn(value: Tensor, changes: Any, site: Site | None = None) -> Tensor:
    """Several changes, one after the other; a list in place of a change means this."""
    for change in changes:
        value = change(value, site)
    return value


@ready(any_shape=True, prepare=_with_change)
def any_shape(value: Tensor, change: Any, site: Site | None = None) -> Tensor:
    """A change whose result may have another shape or dtype than the value."""
    return change(value, site)


def _filled(value: Tensor, number: Number) -> Tensor:
    return value.masked_fill(torch.ones((), dtype=torch.bool, device=value.device), number)


def _instead(value: Tensor, other: Tensor) -> Tensor:
    """The other tensor, in memory of its own; the value keeps its place in the graph."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return other.clone(memory_format=torch.contiguous_format)
    return torch.where(torch.ones((), dtype=torch.bool, device=value.device), other, value)


def _at_least_float32(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _times(x: Tensor) -> str:
    return "×".join(map(str, x.shape)) or "scalar"


__all__ = sorted(KINDS)
