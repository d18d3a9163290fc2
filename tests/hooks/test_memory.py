"""What a session keeps in memory is what was captured, and it goes with the captured."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tenterhook import NotSeenError, capture
from tests.hooks.models import mlp, x


class Marked(torch.autograd.Function):
    """A node that, unlike PyTorch's own, can be referred to weakly."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_no_leak_without_the_garbage_collector():
    model = mlp()
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"detach": False}, {"copy": False}, {"detach": False, "copy": False}):
            dead = []

            def run(options=options, dead=dead):
                batch = torch.randn(3, 4, requires_grad=True)
                with capture(model, "**", "**:in", "**.weight", grad=True, **options) as seen:
                    out = model(node := Marked.apply(batch))
                    out.pow(2).sum().backward(create_graph=False)
                dead += [weakref.ref(out), weakref.ref(node.grad_fn), weakref.ref(seen), weakref.ref(seen["2"])]
                dead += [weakref.ref(batch), weakref.ref(seen._taps[0])]

            run()
            assert [ref() for ref in dead] == [None] * len(dead), options
    finally:
        gc.enable()


def test_the_graph_is_not_held_by_what_is_kept():
    model = mlp()
    with capture(model, grad=True) as seen:
        ref = weakref.ref((node := Marked.apply(x.clone().requires_grad_())).grad_fn)
        model(node).sum().backward()
        del node
    assert ref() is None
    assert seen["2"].grad_fn is None


def test_a_captured_does_not_keep_the_model_alive():
    model = mlp()
    with capture(model, "0") as seen:
        model(x)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    assert seen["0"].shape == (3, 8)
    with pytest.raises(NotSeenError, match="was not captured"):
        seen["1"]


def test_long_sessions_do_not_pile_up_handles():
    model = mlp()
    leaf = nn.Parameter(x.clone())
    model.insert(0, nn.Identity())
    with capture(model, "grad(0)", "grad(1)", keep="last", reduce=torch.sum) as seen:
        for _ in range(1500):
            model(leaf).sum().backward()
        assert len(seen._session.scope.handles) <= 1025  # of 3,000: not those that were removed or whose graph is gone
    assert seen.report().rows[1][1] == "1500×"
    assert seen.report().rows[0][1] == "1500×"


def is_plain(thing):
    return type(thing) is torch.Tensor and thing.layout is torch.strided


def test_memory_held_is_what_was_captured():
    model = mlp()

    def alive():
        gc.collect()
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if is_plain(t))

    before = alive()
    with capture(model, "0", "grad(2)") as seen:
        model(x).sum().backward()
    model.zero_grad()
    assert alive() - before == (3 * 8 + 3 * 2) * 4
    assert len(seen) == 2
