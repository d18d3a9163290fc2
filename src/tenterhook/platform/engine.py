"""Backward passes: where they begin, and what is near the end of a graph.

Relies on: every backward pass that Python starts goes through `torch.autograd.graph._engine_run_backward(outputs,
grad_outputs, retain_graph, create_graph, inputs, *, allow_unreachable, accumulate_grad)`, which `torch.autograd` has
imported by name; a node that accumulates into a leaf is an `AccumulateGrad` with the leaf as its `variable`; nodes keep
the shapes of what they gave in `_input_metadata`, and what they need in attributes that begin with `_saved_`.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import graph

ENGINE = "_engine_run_backward"
ENGINE_IN: tuple[Any, ...] = (torch.autograd, graph)  # who has it under that name


class Asked(NamedTuple):
    """What a backward pass is called with."""

    outputs: Sequence[Any]  # tensors, or edges of a graph
    inputs: Sequence[Any]  # where not all leaves are meant
    accumulates: bool  # False for autograd.grad()


def what_is_asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """From the arguments of torch's function."""
    outputs = args[0] if args else kwargs.get("t_outputs", ())
    return Asked(outputs, args[4] if len(args) > 4 else (), kwargs.get("accumulate_grad", True))


def leaves_of(asked: Asked) -> Iterator[Tensor]:
    """The leaves that a backward pass accumulates gradients in, the nearest to the loss first."""
    if asked.inputs:
        yield from (one for one in asked.inputs if isinstance(one, Tensor))
        return
    nodes = [node_of(one) for one in asked.outputs]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        following = () if node is None else node.next_functions
        for one, _ in following:
            if one not in seen:
                seen.add(one)
                nodes.append(one)
        if not following and (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


def node_of(output: Any) -> Any:
    """The node of a tensor, or of an edge."""
    if not isinstance(output, Tensor):
        return getattr(output, "node", None)
    if output.grad_fn is None and output.requires_grad:
        return graph.get_gradient_edge(output).node
    return output.grad_fn


def shape_given(node: Any, which: int) -> Sequence[int]:
    """The shape of what a node has given."""
    try:
        return tuple(node._input_metadata[which].shape)
    except (AttributeError, IndexError, RuntimeError):
        return ()


def swapped_axes(node: Any) -> tuple[int, int] | None:
    """The axes that a transposition has exchanged."""
    name = node.name()
    if name == "TBackward0":
        return 0, 1
    return (_signed(node._saved_dim0), _signed(node._saved_dim1)) if name == "TransposeBackward0" else None


def permuted_axes(node: Any) -> list[int] | None:
    """The order in which `permute` has put the axes."""
    return [_signed(dim) for dim in node._saved_dims] if node.name() == "PermuteBackward0" else None


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number  # as torch keeps -1 in its graph


# Who is told when a backward pass is over.

Listener = Callable[[Asked, str], None]  # what was asked, and the name of the exception that ended it, if one did
_listeners: list[Listener] = []
_ours: dict[int, tuple[Any, Any]] = {}  # by the id of who has torch's function: ours, and what was there before
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Have it called after each backward pass, in the thread that started it."""
    with _lock:
        _listeners.append(listener)
        for owner in ENGINE_IN:
            if id(owner) not in _ours:  # else somebody has wrapped ours
                before = vars(owner)[ENGINE]
                ours = functools.partial(_told, before)
                _ours[id(owner)] = ours, before
                setattr(owner, ENGINE, ours)


def unlisten(listener: Listener) -> None:
    """Undo its `listen`; may be done again."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        for owner in () if _listeners else ENGINE_IN:
            ours, before = _ours.get(id(owner), (None, None))
            if ours is not None and vars(owner)[ENGINE] is ours:
                setattr(owner, ENGINE, before)
                del _ours[id(owner)]


def _told(run: Any, *args: Any, **kwargs: Any) -> Any:
    failed = ""
    try:
        return run(*args, **kwargs)
    except Exception as error:
        failed = type(error).__name__
        raise
    finally:
        for listener in tuple(_listeners):
            listener(what_is_asked(args, kwargs), failed)


def nodes_behind(asked: Asked) -> Iterator[Any]:
    """Every node of the graph of a backward pass."""
    nodes = [node for node in map(node_of, asked.outputs) if node is not None]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        for one, _ in node.next_functions:
            if one is not None and one not in seen:
                seen.add(one)
                nodes.append(one)
    yield from nodes
