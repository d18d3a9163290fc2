"""Rows of a batch that holds the same inputs several times over, block by block, and how far outputs are apart."""

import torch
from torch import Tensor

from tenterhook.values.numbers import difference, largest
from tenterhook.values.tree import Path, can_have_gradient

Outputs = dict[Path, Tensor]  # the leaves of an output


def row_dim(together: Tensor, alone: Tensor, n: int) -> int | None:
    """The dimension that is n times as large with n times the rows, if just one is."""
    if together.dim() != alone.dim():
        return None
    grown = [d for d, (many, few) in enumerate(zip(together.shape, alone.shape, strict=True)) if many != few]
    return grown[0] if len(grown) == 1 and together.shape[grown[0]] == n * alone.shape[grown[0]] else None


def tells_order(alone: Tensor, dim: int, rows: int) -> bool:
    """True if the clean block would show it if rows were not laid out edit by edit.

    A dimension larger than the rows is rows × something, or something × rows: of `cat([h, -h])` the first half belongs
    to all edits, and so does the second. The block at the beginning then holds the first of these parts several
    times, and is as it was alone only if all parts are alike.
    """
    size = alone.shape[dim]
    parts = size if size % rows else size // rows
    cuts = (alone.unflatten(dim, (p, -1)) for p in range(2, parts + 1) if parts % p == 0)
    return not any(close(cut, cut.narrow(dim, 0, 1).expand_as(cut)) for cut in cuts)


def is_repeated(together: Tensor, alone: Tensor, dim: int, n: int) -> bool:
    """True if all n blocks are as they were alone, so that their order does not matter."""
    return all(close(block_of(together, dim, i, n), alone) for i in range(n))


def block_of(tensor: Tensor, dim: int, i: int, n: int) -> Tensor:
    """The i-th of n blocks, which shares the memory."""
    size = tensor.shape[dim] // n
    return tensor.narrow(dim, i * size, size)


def are_close(some: Outputs, others: Outputs) -> bool:
    """True if two outputs have the same leaves with nearly the same values."""
    return some.keys() == others.keys() and all(close(some[path], others[path]) for path in some)


def close(a: Tensor, b: Tensor) -> bool:
    """True if two tensors differ by no more than another order of the same operations may make."""
    if not can_have_gradient(a) or a.shape != b.shape:
        return bool(torch.equal(a, b))
    tolerance = {8: 1e-9, 4: 1e-4}.get(torch.finfo(b.dtype).bits // 8, 2e-2)
    a, b = _wide(a), _wide(b)
    differ = (a != b) & ~(a.isnan() & b.isnan())  # what fills masked places is alike, and may be huge
    a, b = a[differ], b[differ]
    most = float(b.abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=max(most, 1e-6) * tolerance, equal_nan=True)


def distances(made: dict[int, Outputs], other: Outputs) -> Tensor:
    """How far each of several outputs is from another one, NaN being farthest; a device is waited for once."""
    most = torch.stack([_apart(one, other) for one in made.values()])
    return most.nan_to_num(torch.inf).cpu()


def _apart(one: Outputs, other: Outputs) -> Tensor:
    """The largest difference of two outputs."""
    found = [largest(difference(tensor, one[path])).double() for path, tensor in other.items() if tensor.numel()]
    if not found:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([tensor.to(found[0].device) for tensor in found]).amax()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
