"""Operations by which compiled code hands values and gradients to Python while it runs.

    value(leaves, tap, outline)                   a value comes
    token(tap, outline, graded) -> call           a value comes whose gradient is waited for; `call` says which one it is
    gradient(grad, call, tap, outline, leaf)      its gradient comes

Compiled code holds only numbers: which tap it is, how its value is made of tensors (the outline), which leaf of it comes.
Who receives them is looked up when it runs, so that the code can be used again by later sessions.

Relies on: `_register_effectful_op` and `_EffectType` of `torch._higher_order_ops.effects`, by which such an operation is
neither left out as dead code nor moved past another one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op


class Receiver(Protocol):
    """Who is told of what comes."""

    def value(self, leaves: Sequence[Tensor], tap: int, outline: int) -> None: ...

    def token(self, tap: int, outline: int, graded: Sequence[int]) -> int: ...

    def gradient(self, grad: Tensor, call: int, tap: int, outline: int, leaf: int) -> None: ...


receiver: Receiver


def _value(leaves: list[Tensor], tap: int, outline: int) -> None:
    receiver.value(leaves, tap, outline)


def _token(tap: int, outline: int, graded: list[int]) -> Tensor:
    return torch.tensor(receiver.token(tap, outline, graded), dtype=torch.int64, device="cpu")


def _gradient(grad: Tensor, call: Tensor, tap: int, outline: int, leaf: int) -> None:
    receiver.gradient(grad, int(call), tap, outline, leaf)


def _no_token(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _nothing(*_: Any) -> None:
    return None


_OPERATIONS = {
    "value(Tensor[] leaves, int tap, int outline) -> ()": (_value, _nothing),
    "token(int tap, int outline, int[] graded) -> Tensor": (_token, _no_token),
    "gradient(Tensor grad, Tensor call, int tap, int outline, int leaf) -> ()": (_gradient, _nothing),
}
# CUDA graphs would replay the kernels around such an operation, and not the Python in it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library = torch.library.Library("tenterhook", "FRAGMENT")


def _define(schema: str, real: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, real, "CompositeExplicitAutograd")
    _library._register_fake(name, fake)
    operation = getattr(torch.ops.tenterhook, name).default
    _register_effectful_op(operation, _EffectType.ORDERED)
    return operation


value, token, gradient = (_define(schema, *kernels) for schema, kernels in _OPERATIONS.items())
