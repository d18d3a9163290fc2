"""The order of layers, from the graph of the loss: what leads to each output of a model, and how far before it.

Layers that are called one after the other need not follow upon one another, as those of a policy and of its values.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from tenterhook.platform.engine import node_of

_NODES = 100_000  # of all graphs together, that are looked at
_OUTPUTS = 16
_keys = itertools.count()
Layer = tuple[str, str]  # model and site


class LayerOrder:
    """Notes which node of a graph is what a layer gives, and goes through the graphs of the first losses."""

    def __init__(self) -> None:
        self._key = f"tenterhook.layer.{next(_keys)}"  # in graphs
        self._left = _NODES

    def note(self, layer: Layer, module: nn.Module, output: Any) -> None:
        """A module gives this: it is a layer if it has a matrix of weights."""
        if self._left <= 0 or all(p is None or p.dim() < 2 for p in module._parameters.values()):
            return
        for one in output if isinstance(output, tuple) else (output,):
            node: Any = one.grad_fn if isinstance(one, Tensor) else None
            if node is not None:
                node.metadata.setdefault(self._key, layer)

    def chains(self, loss: Tensor) -> list[tuple[Layer, ...]]:
        """For each output of a model that the loss is made of, the layers that lead to it, from the first to it."""
        root: Any = node_of(loss)
        if root is None or self._left <= 0:
            return []
        order = _in_order([root])
        self._left -= len(order)
        above = self._layers_above(order)
        outputs = [node for node in order if self._key in node.metadata and above[node] == 0]
        return [self._chain(node) for node in outputs[:_OUTPUTS]]

    def _layers_above(self, order: list[Any]) -> dict[Any, int]:
        """Of each node, how many layers are between it and the first of all, by the longest way."""
        above = dict.fromkeys(order, 0)
        for node in order:
            there = above[node] + (self._key in node.metadata)
            for one in _before(node):
                above[one] = max(above[one], there)
        return above

    def _chain(self, output: Any) -> tuple[Layer, ...]:
        order = _in_order([output])
        self._left -= len(order)
        above = self._layers_above(order)
        found: dict[Layer, int] = {}
        for node in order:
            if self._key in node.metadata:
                found[node.metadata[self._key]] = above[node]  # of several calls, that which is first in the forward
        return tuple(sorted(found, key=lambda layer: -found[layer]))


def _before(node: Any) -> Iterator[Any]:
    return (one for one, _ in node.next_functions if one is not None)


def _in_order(roots: Iterable[Any]) -> list[Any]:
    """All nodes that these lead to, each before those that it leads to."""
    finished: list[Any] = []
    seen = set(roots)
    stack = [(root, _before(root)) for root in seen]
    while stack:
        node, following = stack[-1]
        new = next((one for one in following if one not in seen), None)
        if new is None:
            finished.append(node)
            stack.pop()
        else:
            seen.add(new)
            stack.append((new, _before(new)))
    return finished[::-1]
