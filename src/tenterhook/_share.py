"""The gradient of a module's input: the share that one call of the module contributes.

A tensor often has several users, and a hook on it sees the sum over all of them. Handing the module a view of the
tensor would tell them apart, but it changes the order in which autograd adds the contributions up, and with it the
last bits of the gradients before. So nothing is exchanged: the nodes that the call added to the graph are searched
for those that use the tensor, a hook on each reads what it contributes, and a hook on the tensor's own node, which
runs when all its users have, delivers the sum.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tenterhook._tree import leaves

Arrive = Callable[[Tensor | None], object]
_Edge = tuple[Node, int, Node, int]  # the user, which of its inputs, the node it uses, which output of that


class _Origin(NamedTuple):
    """Where the gradient of an input goes: a node, which of its outputs, and, for a view, which part of its base."""

    node: Node
    output: int
    cut: Callable[[Tensor], Tensor] | None = None
    leaf: Tensor | None = None


class OwnShares:
    """From before a module's forward until after it: which of the nodes made in between use its inputs."""

    def __init__(self, inputs: Sequence[tuple[Tensor, Arrive]]) -> None:
        self._since = torch._C._autograd._get_sequence_nr()
        self._inputs = [(list(_origins(tensor)), arrive) for tensor, arrive in inputs]

    def hook(self, module: nn.Module, given: Any, output: Any) -> Iterator[RemovableHandle]:
        """After the forward: hook the users, found from every value that the call can have made."""
        made = [tensor for _, tensor in leaves((given, output))]  # it may have written into what it was given
        made += [t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor)]  # self.aux_loss = …
        edges = list(_edges_made_since(self._since, {t.grad_fn for t in made if t.grad_fn is not None}))
        out = {(t.grad_fn, t.output_nr) for _, t in leaves(output)}
        for origins, arrive in self._inputs:
            own = origins[0]
            if (own.node, own.output) in out or any(own.leaf is t for _, t in leaves(output)):
                # It hands its input on: one value, in and out, and one gradient, of all its users.
                yield own.node.register_prehook(functools.partial(_deliver_whole, arrive, own.output))
            else:
                yield from _hook_users(origins, edges, arrive)


class _Sum:
    """What the users of one input have contributed so far, in one backward pass."""

    def __init__(self, arrive: Arrive) -> None:
        self.arrive = arrive
        self.total: Tensor | None = None

    def add(self, i: int, cut: Any, grad_inputs: tuple[Tensor | None, ...], grad_outputs: object) -> None:
        grad = grad_inputs[i]
        if grad is not None:
            grad = grad if cut is None else cut(grad)
            self.total = grad if self.total is None else self.total + grad

    def deliver(self, grad_outputs: object) -> None:
        if self.total is not None:
            total, self.total = self.total, None
            self.arrive(total)


def _deliver_whole(arrive: Arrive, output: int, grads: tuple[Tensor | None, ...]) -> None:
    arrive(grads[output])


def _hook_users(origins: list[_Origin], edges: list[_Edge], arrive: Arrive) -> Iterator[RemovableHandle]:
    share = _Sum(arrive)
    last = origins[0]
    for origin in origins:
        for user, i, node, output in edges:
            if node is origin.node and output == origin.output and (origin.cut is None or "CopySlices" in user.name()):
                last = origin
                yield user.register_hook(functools.partial(share.add, i, origin.cut))
    yield last.node.register_prehook(share.deliver)


def _origins(tensor: Tensor) -> Iterator[_Origin]:
    edge = get_gradient_edge(tensor)
    yield _Origin(edge.node, edge.output_nr, leaf=tensor if tensor.is_leaf else None)
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


def _edges_made_since(since: int, starts: set[Node]) -> Iterator[_Edge]:
    """Every edge from a node that was made since some sequence number, as far as the starts lead."""
    visited, nodes = set(starts), list(starts)
    while nodes:
        user = nodes.pop()
        if user._sequence_nr() < since:
            continue
        for i, (node, output) in enumerate(user.next_functions):
            if node is not None:
                yield user, i, node, output
                if node not in visited:
                    visited.add(node)
                    nodes.append(node)
