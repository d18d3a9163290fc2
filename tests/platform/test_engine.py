"""Where backward passes begin, and what is near the end of a graph."""

import torch
from torch import nn
from torch.autograd import graph

from tenterhook.platform.engine import (
    ENGINE,
    ENGINE_IN,
    leaves_of,
    node_of,
    permuted_axes,
    shape_given,
    swapped_axes,
    what_is_asked,
)


def seen(monkeypatch, run):
    """What is asked of the engine while a function runs."""
    asked = []
    inner = graph._engine_run_backward

    def outer(*args, **kwargs):
        asked.append(what_is_asked(args, kwargs))
        return inner(*args, **kwargs)

    with monkeypatch.context() as patched:
        for owner in ENGINE_IN:
            patched.setattr(owner, ENGINE, outer)
        run()
    return asked


def test_every_way_to_start_a_backward_pass_goes_through_one_function(monkeypatch):
    x = torch.ones(3, requires_grad=True)
    ways = {
        "backward()": lambda: (x * 2).sum().backward(),
        "autograd.backward()": lambda: torch.autograd.backward([(x * 2).sum(), (x * 3).sum()]),
        "grad()": lambda: torch.autograd.grad((x * 2).sum(), x),
        "backward(inputs=)": lambda: (x * 2).sum().backward(inputs=[x]),
    }
    found = {name: seen(monkeypatch, run) for name, run in ways.items()}
    assert [len(asked) for asked in found.values()] == [1] * 4, "torch starts backward passes in another function"
    assert len(found["autograd.backward()"][0].outputs) == 2
    assert [one[0].accumulates for one in found.values()] == [True, True, False, True]
    assert found["backward(inputs=)"][0].inputs[0] is x
    assert next(leaves_of(found["backward()"][0])) is x


def test_leaves_are_found_from_the_loss_on():
    first, last = nn.Linear(2, 2), nn.Linear(2, 1)
    loss = last(first(torch.ones(1, 2))).sum()
    leaves = list(leaves_of(what_is_asked(([loss],), {})))
    assert {id(leaf) for leaf in leaves} == {id(p) for p in (*first.parameters(), *last.parameters())}
    assert any(leaves[0] is p for p in last.parameters()), "the nearest come first"
    assert node_of(loss) is loss.grad_fn and node_of(first.weight) is not None and node_of(None) is None


def test_what_nodes_remember_of_axes_and_shapes():
    x = torch.ones(2, 3, 4, requires_grad=True)
    assert list(shape_given((x * 2).grad_fn, 0)) == [2, 3, 4]
    assert swapped_axes(x.transpose(0, -1).grad_fn) == (0, -1)
    assert swapped_axes(x[0].t().grad_fn) == (0, 1)
    assert permuted_axes(x.permute(2, 0, 1).grad_fn) in ([2, 0, 1], [-1, 0, 1])
    assert swapped_axes((x * 2).grad_fn) is None and permuted_axes((x * 2).grad_fn) is None
