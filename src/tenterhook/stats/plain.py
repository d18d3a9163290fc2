"""Tensors of every kind as what can be measured: real, dense, in one piece of memory."""

import torch
from torch import Tensor

from tenterhook.platform.fsdp import local_part
from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.modes import without_subclasses

_MEASURED = (torch.float32, torch.bfloat16, torch.float16)
_NOT_IN_FLOAT32 = (torch.float64, torch.int64, torch.int32, torch.uint64, torch.uint32)


def plain(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, in any order; None where they cannot be had (sparse, quantised, meta, vmap)."""
    with without_subclasses():
        values = _dense(tensor.detach())
        if values is None or values.is_meta or values.is_quantized or not _has_memory(values):
            return None
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        if values.dtype not in _MEASURED:
            is_wide = values.dtype in _NOT_IN_FLOAT32 and not values.is_cuda
            values = values.to(torch.float64 if is_wide else torch.float32)
        return flat(values)


def _dense(tensor: Tensor) -> Tensor | None:
    """A strided tensor with the values; None for other layouts."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return None
    local = local_part(tensor)
    if local is not None:
        tensor = local
    if tensor.is_nested:
        tensor = tensor.values()  # all rows, one after another
    return tensor if tensor.layout is torch.strided else None


def flat(tensor: Tensor) -> Tensor:
    """All elements in a row; as they lie in memory where they lie densely, for their order does not matter."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1).contiguous()  # every second column is a row too, but with gaps


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order: a transposed tensor, channels_last."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _has_memory(tensor: Tensor) -> bool:
    """Not inside vmap, and not while something is traced, where subclasses stand for values that are not there."""
    if is_of_transform(tensor):
        return False
    if type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return True
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False
