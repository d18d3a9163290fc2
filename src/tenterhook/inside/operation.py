"""Torch's functions as they are called in code: their names, and what a fused kernel hides."""

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tenterhook.platform.operations import OVERLOADS, SPACES

attention = F.scaled_dot_product_attention
# These make no value of the model's.
NO_VALUES = {"grad", "data", "requires_grad_", "detach_", "retain_grad", "backward", "register_hook", "share_memory_"}
_TORCH = torch.__file__.rpartition("/")[0] + "/"
_SOURCES = tuple(
    _TORCH + name for name in ("nn/functional.py", "functional.py", "_tensor.py", "_jit_internal.py", "special")
)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


def name_of(function: Any) -> str:
    """What an operation is called: `add`, `softmax`."""
    return _plain(str(getattr(function, "__name__", type(function).__name__)))


def _plain(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name.lstrip("_")


def called_operation(callee: Any, method: str) -> str | None:
    """The name of the operation that is called; None if it is none. `callee` may be the tensor whose method it is."""
    if callee is abs:
        return "abs"
    name = _plain(method) if isinstance(callee, Tensor) else _operation(callee)
    return None if name is None or name in NO_VALUES else name


@functools.lru_cache(maxsize=1000)
def _builtin(callee: Any) -> bool:
    owner = getattr(callee, "__objclass__", None) or getattr(callee, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return False
    names = (getattr(callee, "__module__", None), getattr(owner, "__module__", None), getattr(owner, "__name__", None))
    return any(str(name).partition(".")[0] == "torch" for name in names)


def _operation(callee: Any) -> str | None:
    if isinstance(callee, types.MethodType):
        callee = callee.__func__
    if isinstance(callee, _BUILTIN):
        owner = getattr(callee, "__self__", None)
        is_torch = isinstance(owner, Tensor) or _builtin(callee)
    elif isinstance(callee, types.FunctionType):
        is_torch = is_own_function(callee)
    else:
        is_torch = isinstance(callee, OVERLOADS)
    return name_of(callee) if is_torch else None


def is_own_function(function: types.FunctionType) -> bool:
    """Whether it is an operation that torch has written in Python."""
    return function.__code__.co_filename.startswith(_SOURCES)


@functools.cache
def is_operation(name: str) -> bool:
    """Whether something of torch's is called so."""
    return any(hasattr(space, name) for space in SPACES) or hasattr(Tensor, f"__{name}__")


def probabilities(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The probabilities inside scaled_dot_product_attention, before dropout, from its own arguments."""
    with torch.no_grad():
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~allowed, float("-inf"))
        if attn_mask is not None:
            is_choice = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_choice else scores + attn_mask
        # A row in which nothing is allowed gives zeros, as in the kernel.
        return scores.softmax(-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0)
