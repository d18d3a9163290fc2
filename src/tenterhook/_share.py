"""The gradient of a module's input: the share that one call of the module contributes.

A tensor often has several users, and a hook on it sees the sum over all of them. Handing the module a view of the
tensor would tell them apart, but it changes the order in which autograd adds the contributions up, and with it the
last bits of the gradients before. So nothing is exchanged: the nodes that the call added to the graph are searched
for those that use the tensor, a hook on each reads what it contributes, and the sum is delivered when that
backward pass is over.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tenterhook._sites import own_attributes

_NO_TENSORS = (str, bytes, int, float, complex, type(None), type, nn.Module, ModuleType, FunctionType, torch.dtype)
_MOST_OBJECTS = 2000
Arrive = Callable[[Tensor | None], object]
_Edge = tuple[Node, int, Node, int]  # the user, which of its inputs, the node it uses, which output of that


class _Origin(NamedTuple):
    """Where the gradient of an input goes: a node, which of its outputs, and, for a view, which part of its base."""

    node: Node
    output: int
    cut: Callable[[Tensor], Tensor] | None = None


class Input(NamedTuple):
    """A tensor whose own share is wanted; `hook` asks for its whole gradient instead."""

    tensor: Tensor
    arrive: Arrive
    hook: Callable[[], None]


class OwnShares:
    """From before a module's forward until after it: which of the nodes made in between use its inputs."""

    def __init__(self, inputs: Sequence[Input], given: Any) -> None:
        self._inputs = [(one, list(_origins(one.tensor))) for one in inputs]
        self._before = {t.grad_fn for t in tensors_within(given) if t.grad_fn is not None}
        # After reading every grad_fn, which may make a node. The count is one per thread, hence _before.
        self._since = torch._C._autograd._get_sequence_nr()

    def hook(self, module: nn.Module, given: Any, output: Any) -> Iterator[RemovableHandle]:
        """After the forward: hook the users, found from every value that the call can have made."""
        out = list(tensors_within(output))
        made = [*out, *tensors_within(given), *_held_by(module)]  # it may have written into what it was given
        edges = list(self._edges({t.grad_fn for t in made if t.grad_fn is not None}))
        out_edges = {(t.grad_fn, t.output_nr) for t in out if t.grad_fn is not None}
        for one, origins in self._inputs:
            own = origins[0]
            if (own.node, own.output) in out_edges or any(one.tensor is t for t in out if t.is_leaf):
                one.hook()  # it hands its input on: one value, in and out, and one gradient, of all its users
            else:
                yield from _hook_users(origins, edges, one.arrive)

    def _edges(self, starts: set[Node]) -> Iterator[_Edge]:
        """Every edge from a node that this call made, as far as the starts lead."""
        visited = starts - self._before
        nodes = list(visited)
        while nodes:
            user = nodes.pop()
            if user._sequence_nr() < self._since:
                continue
            for i, (node, output) in enumerate(user.next_functions):
                if node is not None:
                    yield user, i, node, output
                    if node not in visited and node not in self._before:
                        visited.add(node)
                        nodes.append(node)


class _Sum:
    """What the users of one input contribute in one backward pass."""

    def __init__(self, arrive: Arrive) -> None:
        self.arrive = arrive
        self.task = -1
        self.total: Tensor | None = None

    def add(self, i: int, cut: Any, grad_inputs: tuple[Tensor | None, ...], grad_outputs: object) -> None:
        grad = grad_inputs[i]
        if grad is None:
            return
        task = torch._C._current_graph_task_id()
        if task != self.task:  # a pass that ended in an exception may have left something
            self.task, self.total = task, None
            Variable._execution_engine.queue_callback(self.deliver)
        grad = grad if cut is None else cut(grad)
        self.total = grad if self.total is None else self.total + grad

    def deliver(self) -> None:
        total, self.total, self.task = self.total, None, -1
        self.arrive(total)


def _hook_users(origins: list[_Origin], edges: list[_Edge], arrive: Arrive) -> Iterator[RemovableHandle]:
    share = _Sum(arrive)
    for origin in origins:
        for user, i, node, output in edges:
            if node is origin.node and output == origin.output and (origin.cut is None or "CopySlices" in user.name()):
                yield user.register_hook(functools.partial(share.add, i, origin.cut))


def _origins(tensor: Tensor) -> Iterator[_Origin]:
    edge = get_gradient_edge(tensor)
    yield _Origin(edge.node, edge.output_nr)
    base = tensor._base
    if base is not None and base.requires_grad:
        # Writing into a view re-routes the graph: the base gets a CopySlices node, which goes around the view.
        edge = get_gradient_edge(base)
        yield _Origin(edge.node, edge.output_nr, cut=_Cut(tensor, base))


class _Cut:
    """The part of one view out of the gradient of its base."""

    def __init__(self, view: Tensor, base: Tensor) -> None:
        self.view = (view.size(), view.stride(), view.storage_offset() - base.storage_offset())
        self.base = (base.size(), base.stride())

    def __call__(self, grad: Tensor) -> Tensor:
        dense = torch.empty_strided(*self.base, dtype=grad.dtype, device=grad.device)
        return dense.copy_(grad.detach()).as_strided(*self.view)


def tensors_within(value: Any, depth: int = 5, visited: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in a value, also in objects that are no known structure, like a key-value cache."""
    visited = set() if visited is None else visited
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, _NO_TENSORS) and id(value) not in visited and len(visited) < _MOST_OBJECTS:
        visited.add(id(value))
        children: Any = ()
        if isinstance(value, Mapping):
            children = value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            children = value
        elif (fields := getattr(value, "__dict__", None)) is not None:
            children = fields.values()
        for child in list(children)[:_MOST_OBJECTS]:
            yield from tensors_within(child, depth - 1, visited)


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    """What hangs on a module besides its parameters: self.aux_loss = …, a state, a buffer that was replaced."""
    for one in module.modules():
        yield from tensors_within([value for _, value in own_attributes(one)])
        yield from tensors_within(list(one._buffers.values()))
