"""The units of activations: which of a ReLU's never fire, and which share of a sigmoid's values is at its ends."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.platform.engine import permuted_axes, shape_given, swapped_axes
from tenterhook.record.gather import is_dense, is_plain
from tenterhook.record.parts import Micro
from tenterhook.stats.native import mark_firing

_WINDOW = 8  # sampled calls over which a unit must be silent to be dead
_LINEAR = {f"{name}Backward0" for name in ("Addmm", "Mm", "Linear", "MkldnnLinear", "Bmm", "Baddbmm")}
_OVER_CHANNELS = ("Convolution", "BatchNorm", "GroupNorm")
_SATURATING = {nn.Tanh: (0.0, 0.97), nn.Sigmoid: (0.5, 0.47)}  # centre, distance


class Saturation:
    """Which share of the values is at the ends of a sigmoid or tanh."""

    def __init__(self, centre: float, far: float) -> None:
        self._centre, self._far = centre, far

    def look(self, tensor: Tensor, place: int, micro: Micro) -> None:
        """See what the module has given."""
        if is_dense(tensor):
            share = ((tensor.detach() - self._centre).abs() > self._far).double().mean()
            micro.scalars.add(("saturated", place, micro.sample.last or ""), share)


class Firing:
    """Which units of a ReLU fire, over some calls; one module may be used after several others."""

    def __init__(self) -> None:
        # By the module before: over how many calls, which units have fired, and on which axis these are.
        self._alive: dict[str, tuple[int, Tensor | None, int]] = {}

    def look(self, tensor: Tensor, place: int, micro: Micro) -> None:
        """See what the module has given."""
        if not is_dense(tensor) or tensor.dim() < 2 or not tensor.numel() or not tensor.is_floating_point():
            return
        use = micro.sample.last or ""
        calls, alive, axis = self._alive.get(use, (0, None, 0))
        if calls == 0 or axis >= tensor.dim():
            axis = axis_of_units(tensor)
        tensor, units = tensor.detach(), tensor.shape[axis]
        if alive is None or alive.numel() != units or alive.device != tensor.device:
            calls, alive = 0, torch.zeros(units, dtype=torch.bool, device=tensor.device)
        alive = _mark(tensor, axis, alive)
        self._alive[use] = calls + 1, alive, axis
        if calls + 1 == _WINDOW:
            micro.scalars.add(("dead", place, use), 1 - alive.double().mean())
            del self._alive[use]


def watcher_of(module: nn.Module) -> Saturation | Firing | None:
    """What watches the units of a module, if anything does."""
    if isinstance(module, nn.ReLU | nn.ReLU6):
        return Firing()
    limits = _SATURATING.get(type(module))
    return None if limits is None else Saturation(*limits)


def _mark(tensor: Tensor, axis: int, alive: Tensor) -> Tensor:
    """Which units were alive before, or fire now."""
    outer, units = math.prod(tensor.shape[:axis]), alive.numel()
    if not is_plain(tensor):
        return alive | (tensor.reshape(outer, units, -1) > 0).any(2).any(0)
    mark_firing(tensor, outer, tensor.numel() // (outer * units), alive)
    return alive


def axis_of_units(tensor: Tensor) -> int:
    """The channels of a convolution or of its norm, or the features of a linear layer.

    The graph tells, also where axes have changed places since. Where it does not, images have channels.
    """
    axes = list(range(tensor.dim()))  # where those of the value are in what a node gives; -1: nowhere
    shape: Sequence[int] = tensor.shape
    node: Any = tensor.grad_fn
    which = tensor.output_nr
    for _ in range(6):
        before, shape = shape, shape_given(node, which)
        if not shape:
            break
        if len(shape) != len(before):
            same = _same_axes(before, shape)
            axes = [same.get(axis, -1) for axis in axes]
        units = _units_of(node, len(shape))
        if units is not None:
            if units in axes:
                return axes.index(units)
            break
        axes = _before_moving(node, axes, len(shape))
        node, which = node.next_functions[0] if node.next_functions else (None, 0)
    return 1 if tensor.dim() > 3 else tensor.dim() - 1


def _units_of(node: Any, dims: int) -> int | None:
    """The axis on which a layer gives its units."""
    name = node.name()
    if any(kind in name for kind in _OVER_CHANNELS):
        return 1
    return dims - 1 if name in _LINEAR else None


def _before_moving(node: Any, axes: list[int], dims: int) -> list[int]:
    """Where axes were before a transposition."""
    if (swapped := swapped_axes(node)) is not None:
        one, other = (dim % dims for dim in swapped)
        return [{one: other, other: one}.get(axis, axis) for axis in axes]
    if (order := permuted_axes(node)) is not None:
        return [axis if axis < 0 else order[axis] % dims for axis in axes]
    return axes


def _same_axes(shape: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """Which axes have stayed as they were where their number has changed: from the first on, and up to the last."""
    many, first, last = min(len(shape), len(before)), 0, 1
    while first < many and shape[first] == before[first]:
        first += 1
    while last <= many - first and shape[-last] == before[-last]:
        last += 1
    same = {axis: axis for axis in range(first)}
    return same | {len(shape) - i: len(before) - i for i in range(1, last)}
