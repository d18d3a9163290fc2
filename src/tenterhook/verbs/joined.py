"""Several captured values as one tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tenterhook.values.tree import describe, shape_of

_Shown = Mapping[str, Any]  # values by their addresses


def stacked(values: _Shown, dim: int) -> Tensor:
    """All of one shape, along a new dimension."""
    tensors = _tensors(values, "stack")
    if len({shape_of(tensor) for tensor in tensors.values()}) > 1:
        raise ValueError(f"only values of one shape can be stacked, and these are\n{_listed(tensors)}\n{_OTHERWISE}")
    return torch.stack([*tensors.values()], dim)


def joined(values: _Shown, dim: int) -> Tensor:
    """One after the other along a dimension that they have."""
    tensors = _tensors(values, "cat")
    shapes = [list(shape_of(tensor)) for tensor in tensors.values()]
    if any(not -len(shape) <= dim < len(shape) for shape in shapes):
        raise ValueError(
            f"there is no dimension {dim} to join these along; seen.stack(…) makes one:\n{_listed(tensors)}"
        )
    for shape in shapes:
        del shape[dim]
    if any(shape != shapes[0] for shape in shapes):
        what = f"values that are joined along dimension {dim} have one shape but for that, and these are"
        raise ValueError(f"{what}\n{_listed(tensors)}\n{_OTHERWISE}")
    return torch.cat([*tensors.values()], dim)


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_OTHERWISE = "bring them to one shape with `reduce=` when capturing, or take them one by one: seen.calls(…)"


def _tensors(values: _Shown, what: str) -> dict[str, Tensor]:
    found = {}
    for name, value in values.items():
        if type(value) in _NUMBERS:
            value = torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")
        if not isinstance(value, Tensor):
            hint = "name one of its leaves, as in 'lstm[0]'" if value is not None else "no gradient came there"
            raise TypeError(f"{name} is {describe(value)}, and {what} is for tensors; {hint}")
        found[name] = value
    if len(places := {str(tensor.device) for tensor in found.values()}) > 1:
        raise ValueError(f'these values are on {", ".join(sorted(places))}; use seen.to("cpu").{what}(…)')
    return found


def _listed(tensors: Mapping[str, Tensor]) -> str:
    lines = [f"  {name}  {describe(tensor)}" for name, tensor in [*tensors.items()][:12]]
    return "\n".join([*lines, *([f"  … {len(tensors) - 12} more"] if len(tensors) > 12 else [])])
