"""What rounding explains.

An operation that adds up n products in another order, or in fused parts, makes errors of random sign: of the size of
the precision, growing with √n (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). They do
not make a whole value larger or smaller. So a difference is more than rounding if its largest is more than a few
units + √n, in units of precision × largest value; or if b is a scaled (its slope) by more than a few units, as another
epsilon in a norm would have it: that is small, but it has the same sign everywhere.

Both are about one step from equal inputs: comparisons are made with the inputs of a. `reference=True` asks float64.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from tenterhook.comparing.apart import Apart

FEW = 5.0  # units: several operations, each with half a unit, in the worst case of a few
SCALED = 8.0


def is_rounding(apart: Apart, length: int) -> bool:
    """True if a difference is one that rounding may make, in sums of some length."""
    if apart.is_equal:
        return True
    if apart.what or not apart.eps or not apart.scale:
        return False
    allowed = FEW + math.sqrt(length)
    return apart.units <= allowed and abs(apart.slope) <= apart.eps * max(SCALED, allowed / math.sqrt(apart.size))


def in_sum(apart: Apart, outer: Sequence[Apart], parameter: Tensor) -> tuple[Apart, int]:
    """The gradient of a parameter beside what it adds up, and of how many rows: `outer`, what its module's output has.

    They may cancel: the sum of a bias before a softmax is 0, and what is there instead is rounding of what was added.
    """
    scale = max((one.scale for one in outer), default=0.0)
    rows = sum(one.size for one in outer) // max(1, min(parameter.shape, default=1))
    if scale > apart.scale:
        apart = apart._replace(scale=scale, slope=apart.slope * apart.scale / scale)
    return apart, rows


def length_of(module: nn.Module | None) -> int:
    """How many products the operations of a module add up, at most; 1 where it has no weights."""
    return 1 if module is None else max(map(_fan_in, module.modules()), default=1)


def _fan_in(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):  # which look up
        return 1
    weights = [p for p in module.parameters(recurse=False) if p.dim() > 1 and not nn.parameter.is_lazy(p)]
    is_plain = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return max((p.shape[1:].numel() if is_plain else max(p.shape) for p in weights), default=1)
