"""Tensors of every kind as what can be measured: real, dense, in one piece of memory."""

import torch
from torch import Tensor

_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16)


def plain(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, in any order; None where they cannot be had (sparse, quantised, meta, vmap)."""
    with torch._C.DisableTorchFunctionSubclass():  # what a subclass does to operations is not for us
        return _plain(tensor)


def _plain(tensor: Tensor) -> Tensor | None:
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return None
    tensor = tensor.detach()
    local = getattr(tensor, "_local_tensor", None)  # of a DTensor: what this rank holds
    if local is not None:
        tensor = local
    if tensor.is_nested:
        tensor = tensor.values()  # all rows, one after another
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or _is_wrapped(tensor):
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _AS_THEY_ARE:
        exact = tensor.dtype in (torch.float64, torch.int64, torch.int32, torch.uint64, torch.uint32)
        tensor = tensor.to(torch.float64 if exact and not tensor.is_cuda else torch.float32)
    return flat(tensor)


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


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether there is no memory behind it: inside vmap, or while something is traced."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or (
        type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not _has_memory(tensor)
    )


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False
