"""Torch's functions as a function mode meets them: their names, and the insides of those that hide something."""

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

attention = F.scaled_dot_product_attention
_names: dict[Any, str] = {}


def operation(func: Any) -> str:
    """What an operation is called: `add`, `softmax`, `T`."""
    name = _names.get(func)
    if name is None:
        name = str(getattr(func, "__name__", type(func).__name__))
        if name == "__get__":  # of an attribute such as .T
            name = str(getattr(func.__self__, "__name__", name))
        _names[func] = name = name.strip("_") if name.startswith("__") else name.lstrip("_")
    return name


def writes(func: Any) -> bool:
    """Whether an operation writes into a tensor, as far as its name says so."""
    name = operation(func)
    return name[-1:] == "_" or name == "setitem"


_SPACES = (Tensor, torch, F, *(vars(torch._C).get(f"_{name}") for name in ("linalg", "special", "fft", "nn", "sparse")))


def is_operation(name: str) -> bool:
    """Whether something of torch's is called so."""
    return any(hasattr(space, name) for space in _SPACES) or hasattr(Tensor, f"__{name}__")


def is_functional(name: str, func: Any = None) -> bool:
    """Whether it is a function of torch.nn.functional that is written in Python: that very one, if it is given."""
    found = getattr(F, name, None)
    return isinstance(found, types.FunctionType) and found.__closure__ is None and func in (None, found)


@functools.cache
def opened(func: Any) -> Any:
    """The same function of torch.nn.functional, which does not ask whether a mode wants to do its work."""
    never = dict.fromkeys((n for n in func.__globals__ if n.startswith("has_torch_function")), lambda *args: False)
    twin = types.FunctionType(func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


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
