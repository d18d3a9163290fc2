"""The gradient of a module's input: the share that one call of the module contributes.

A tensor often has several users, and a hook on it sees the sum over all of them. Handing the module a view of the
tensor would tell them apart, but it changes the order in which autograd adds the contributions up, and with it the
last bits of the gradients before. So nothing is exchanged: the nodes that the call added to the graph are searched
for those that use the tensor, a hook on each reads what it contributes, and the sum is delivered when all have.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from tenterhook.addresses.modules import own_attributes
from tenterhook.hooks.tap import Tap
from tenterhook.platform.autograd import at_end_of_backward, graph_task, next_sequence_number, sequence_number
from tenterhook.platform.tensors import viewed_by
from tenterhook.values.containers import children
from tenterhook.values.tree import Path

_NO_TENSORS = (str, bytes, int, float, complex, type(None), type, nn.Module, ModuleType, FunctionType, torch.dtype)
_CREATE_GRAPH = "what flows into an input in a second backward (create_graph) is not kept"


class _Edge(NamedTuple):
    """In the graph: a node that uses the output of another."""

    user: Node
    input: int
    node: Node
    output: int


class _Origin(NamedTuple):
    """Where the gradient of an input goes: a node, which of its outputs, and, for a view, which part of its base."""

    node: Node
    output: int
    cut: Callable[[Tensor], Tensor] | None = None

    def is_used_by(self, edge: _Edge) -> bool:
        is_edge = edge.node is self.node and edge.output == self.output
        return is_edge and (self.cut is None or "CopySlices" in edge.user.name())


class WantedInput(NamedTuple):
    """An input tensor whose own share is wanted, and its path among the inputs."""

    tensor: Tensor
    path: Path


_Users = list[tuple[_Edge, _Origin]]


class InputShares:
    """From before a module's forward until after it: which of the nodes made in between use its inputs."""

    def __init__(self, inputs: Sequence[WantedInput], given: Any) -> None:
        self._inputs = [(one, list(_origins(one.tensor))) for one in inputs]
        self._before = _nodes_of(tensors_within(given))
        # After reading every grad_fn, which may make a node. The count is one per thread, hence _before.
        self._since = next_sequence_number()

    def users(self, module: nn.Module, given: Any, output: Any) -> Iterator[tuple[WantedInput, _Users | None]]:
        """After the forward: the users of each input, found from every value that the call can have made.

        None where the module hands its input on: one value, in and out, and one gradient, of all its users.
        """
        out = list(tensors_within(output))
        made = [*out, *tensors_within(given), *_held_by(module)]  # it may have written into what it was given
        edges = list(self._edges(_nodes_of(made)))
        handed_on = {id(t) if t.is_leaf else (t.grad_fn, t.output_nr) for t in out}
        for wanted, origins in self._inputs:
            if id(wanted.tensor) in handed_on or (origins[0].node, origins[0].output) in handed_on:
                yield wanted, None
            else:
                yield wanted, [(edge, origin) for origin in origins for edge in edges if origin.is_used_by(edge)]

    def _edges(self, starts: set[Node]) -> Iterator[_Edge]:
        """Every edge from a node that this call made, as far as the starts lead."""
        visited = starts - self._before
        nodes = list(visited)
        while nodes:
            user = nodes.pop()
            if sequence_number(user) < self._since:
                continue
            for i, (node, output) in enumerate(user.next_functions):
                if node is not None:
                    yield _Edge(user, i, node, output)
                    if node not in visited and node not in self._before:
                        visited.add(node)
                        nodes.append(node)


def _nodes_of(tensors: Iterable[Tensor]) -> set[Node]:
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def hook_users(users: _Users, tap: Tap, call: int, path: Path) -> None:
    """Have a tap get the sum of what these nodes contribute, in each backward pass."""
    share = _Sum(tap, call, path, len(users))
    for edge, origin in users:
        tap.scope.add(edge.user.register_hook(functools.partial(share.add, edge.input, origin.cut)))


class _Sum:
    """What the users of one input contribute, kept apart by backward pass."""

    def __init__(self, tap: Tap, call: int, path: Path, users: int) -> None:
        self._tap = tap
        self._call = call
        self._path = path
        self._users = users
        self._totals: dict[int, tuple[Tensor, int]] = {}  # by graph task: the sum so far, of how many users
        self._graph_builders: set[int] = set()  # the graph tasks that ran with create_graph

    def add(self, i: int, cut: Any, grad_inputs: tuple[Tensor | None, ...], grad_outputs: object) -> None:
        """The hook on one user."""
        grad = grad_inputs[i]
        if grad is None:
            return
        task = graph_task()
        if task not in self._totals:
            at_end_of_backward(functools.partial(self._deliver, task))
        before, count = self._totals.get(task, (None, 0))
        grad = grad if cut is None else cut(grad)
        # A copy: whoever comes next in this pass may write into the gradient.
        total = grad.clone() if before is None else grad + before if before.is_sparse else before + grad
        self._totals[task] = (total, count + 1)
        if torch.is_grad_enabled():
            self._graph_builders.add(task)
        if count + 1 == self._users:
            self._deliver(task)

    def _deliver(self, task: int) -> None:
        """When every user has contributed, or, where some are not needed, at the end of the pass."""
        total, _ = self._totals.pop(task, (None, 0))
        if total is None:
            return
        if self._graph_builders - {task}:  # nodes of the graph that the first pass built use the input, too
            self._tap.note = self._tap.missed = _CREATE_GRAPH
        else:
            self._tap.arrive(self._call, self._path, total)


def _origins(tensor: Tensor) -> Iterator[_Origin]:
    edge = get_gradient_edge(tensor)
    yield _Origin(edge.node, edge.output_nr)
    base = viewed_by(tensor)
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


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Every tensor in a value, also in objects that are no known structure, like a key-value cache."""
    visited: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, _NO_TENSORS) and id(value) not in visited:
            visited.add(id(value))
            todo += [child for _, child in children(value)] or _fields(value)


def _fields(value: Any) -> list[Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    """What hangs on a module besides its parameters: self.aux_loss = …, a state, a buffer that was replaced."""
    for one in module.modules():
        yield from tensors_within([value for _, value in own_attributes(one)])
        yield from tensors_within(list(one._buffers.values()))
