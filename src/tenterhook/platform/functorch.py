"""Tensors inside the transforms of torch.func, such as vmap and grad.

Relies on: `torch._C._functorch`: `is_functorch_wrapped_tensor`, `get_unwrapped`, `is_batchedtensor` and
`maybe_get_bdim` (the dimension that vmap runs over) for a tensor of a transform; `peek_interpreter_stack`, None where
no transform runs, and `get_interpreter_stack`, whose entries have a `key()`: `TransformType.Grad` in grad and vjp.
"""

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    peek_interpreter_stack,
)

is_of_transform = is_functorch_wrapped_tensor
is_of_vmap = is_batchedtensor  # of the innermost transform; one of grad within vmap is not


def is_within_vmap(tensor: Tensor) -> bool:
    """True if any of the transforms that wrap a tensor is vmap."""
    return any(map(is_of_vmap, layers(tensor)))


def in_transform() -> bool:
    """True if a transform of torch.func runs now."""
    return peek_interpreter_stack() is not None


def in_transform_without_gradients() -> bool:
    """True if transforms run, and none of them is grad or vjp."""
    stack = get_interpreter_stack()
    return bool(stack) and all(one.key() != TransformType.Grad for one in stack)


def layers(tensor: Tensor) -> list[Tensor]:
    """A tensor, and what is inside each transform that wraps it; at last the values."""
    found = [tensor]
    while is_functorch_wrapped_tensor(found[-1]):
        found.append(get_unwrapped(found[-1]))
    return found


def values_of(tensor: Tensor) -> Tensor:
    """The values inside all transforms; the dimensions that vmap runs over come first, the outermost before all."""
    while is_functorch_wrapped_tensor(tensor):
        dim = maybe_get_bdim(tensor) if is_batchedtensor(tensor) else 0
        tensor = get_unwrapped(tensor)
        tensor = tensor.movedim(dim, 0) if dim else tensor
    return tensor


def usable(tensor: Tensor) -> Tensor:
    """A kept tensor without what tied it to where it was kept: an inference_mode, a torch.func transform."""
    tensor = values_of(tensor)
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor
