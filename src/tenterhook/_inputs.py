"""What a module is called with, and the gradient of that: the module's own share.

A tensor often has several users, and a hook on it sees the sum of all their gradients. So the module is given a
stand-in, a view of the tensor, and the hook sits on that. Where the module writes into its input (as
ReLU(inplace=True) does), autograd re-routes the graph around the view; `InPlaceGuard` follows it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tenterhook._handles import Hook

Arrival = Callable[[Tensor | None], None]


class Inputs(Mapping[int | str, Any]):
    """The arguments of one call, by position or by name, however they were passed."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.names = names  # of the positional parameters, from the module's signature

    def __getitem__(self, key: int | str) -> Any:
        if key in self.kwargs:
            return self.kwargs[str(key)]
        if isinstance(key, str) and key in self.names:
            key = self.names.index(key)
        if isinstance(key, int):
            if -len(self.args) <= key < len(self.args):
                return self.args[key]
            if 0 <= key < len(self.names) and self.names[key] in self.kwargs:
                return self.kwargs[self.names[key]]
        raise KeyError(key)

    def __setitem__(self, key: int | str, value: Any) -> None:
        if isinstance(key, int):
            self.args = (*self.args[:key], value, *self.args[key + 1 :])
        else:
            self.kwargs[key] = value

    def __iter__(self) -> Iterator[int | str]:
        yield from range(len(self.args))
        yield from self.kwargs

    def __len__(self) -> int:
        return len(self.args) + len(self.kwargs)

    def __copy__(self) -> "Inputs":
        return Inputs(self.args, dict(self.kwargs), self.names)

    def plain(self) -> Any:
        """The only argument itself; else a tuple; else, where some have names, a dict."""
        if len(self) == 1:
            return next(iter(self.values()))
        return dict(self) if self.kwargs else self.args


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a module's forward takes by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in positional)


def exchangeable(value: Inputs) -> Iterator[Tensor]:
    """The tensors among the arguments that a stand-in can take the place of: not those in the caller's lists."""
    return _in_tuples((*value.args, *value.kwargs.values()))


def exchange(value: Inputs, swaps: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with stand-ins; a tensor that was passed twice is one tensor still."""
    args = tuple(_swap(arg, swaps) for arg in value.args)
    return args, {name: _swap(arg, swaps) for name, arg in value.kwargs.items()}


def stand_in(tensor: Tensor, thaw: Callable[[Tensor], Tensor]) -> Tensor:
    """Another tensor with the same value and memory, so that its gradient is this module's share alone."""
    if not torch.is_grad_enabled():
        return tensor
    other = tensor.view_as(tensor) if tensor.requires_grad else thaw(tensor)
    if other is not tensor:
        other._tenterhook = _Mark(other, tensor)  # type: ignore[attr-defined]
    return other


class _Mark:
    """On a stand-in: what to compare with after the module has run, in case it wrote into its input."""

    def __init__(self, other: Tensor, original: Tensor) -> None:
        base = other._base
        self.version = other._version
        self.before = None if base is None else base.grad_fn
        self.original = original if base is None else None
        self.arrivals: list[Arrival] = []


class InPlaceGuard(Hook):
    """A forward hook that looks whether the module wrote into its stand-ins.

    Writing into a view gives its base a CopySlices node, and what flows from there into the value before the
    write does not pass the view, so that the view's hook misses it. The first CopySlices node after the old value
    delivers exactly that share; a hook goes there, and the two shares add up.
    """

    def __init__(self, remember: Callable[[RemovableHandle], None]) -> None:
        self.remember = remember

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, *output: Any) -> None:
        given = (*args, *kwargs.values()) if output else args
        for tensor in _in_tuples(given):
            mark = getattr(tensor, "_tenterhook", None)
            if mark is not None and tensor._version != mark.version:
                self._follow(tensor, mark)

    def _follow(self, tensor: Tensor, mark: _Mark) -> None:
        base = tensor._base
        if base is None:  # a thawed copy, in memory of its own: the caller's tensor must see the write too
            with torch.no_grad():
                mark.original.copy_(tensor)  # type: ignore[union-attr]
            return
        node = base.grad_fn
        while node is not None and node.next_functions and node.next_functions[0][0] is not mark.before:
            node = node.next_functions[0][0]
        if node is None or not node.next_functions:
            raise RuntimeError("tenterhook lost the graph of an input that was written into; please report this")
        for arrive in mark.arrivals:
            self.remember(node.register_hook(_Share(tensor, base, arrive)))


class _Share:
    """A node hook: cuts the part of one view out of the gradient of its base."""

    def __init__(self, view: Tensor, base: Tensor, arrive: Arrival) -> None:
        self.view = (view.size(), view.stride(), view.storage_offset() - base.storage_offset())
        self.base = (base.size(), base.stride())
        self.arrive = arrive

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: object) -> None:
        grad = grad_inputs[0]
        if grad is not None:
            dense = torch.empty_strided(*self.base, dtype=grad.dtype, device=grad.device)
            grad = dense.copy_(grad.detach()).as_strided(*self.view)
        self.arrive(grad)


def _in_tuples(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) is tuple:
            yield from _in_tuples(value)


def _swap(value: Any, swaps: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return swaps.get(id(value), value)
    return tuple(_swap(v, swaps) for v in value) if type(value) is tuple else value
