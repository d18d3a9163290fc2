"""capture's stop and once: the forward ends as soon as everything is there."""

import pytest
import torch
from torch import nn

from tenterhook import NotSeenError, capture
from tests.verbs.models import mlp

x = torch.randn(3, 4)


def test_stop_ends_the_forward_when_everything_is_there():
    ran = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    with capture(model, "1", "0:in", stop=True) as seen:
        model(x)
        raise AssertionError("not reached")
    assert ran == [0, 1]
    assert torch.equal(seen["0:in"], x)
    assert seen["1"].shape == (3, 4)


def test_stop_passes_a_models_own_except_exception():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.b(self.a(x))
            except Exception:
                return x

    model = Careful()
    with capture(model, "a", stop=True) as seen:
        model(x)
        raise AssertionError("not reached")
    assert torch.equal(seen["a"], model.a(x))


def test_stop_waits_for_the_call_that_was_asked_for():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, layer)
    with capture(model, "0@1", stop=True) as seen:
        model(x)
    assert torch.equal(seen["0"], layer(layer(x)))


def test_stop_that_never_comes_lets_the_forward_end():
    model = mlp()
    model.unused = nn.Linear(1, 1)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with capture(model, "unused", "0", stop=True) as seen:
        assert model(x).shape == (3, 2)
    with pytest.raises(NotSeenError, match="not reached"):
        seen["unused"]


def test_stop_of_an_inner_session_does_not_end_the_outer():
    model = mlp()
    with capture(model, "2") as outer:
        with capture(model, "0", stop=True) as inner:
            model(x)
        model(x)
    assert len(outer.calls("2")) == 1
    assert len(inner.calls("0")) == 1


@pytest.mark.parametrize("selector", ["grad(0)", "0@-1", "0@1:"])
def test_stop_that_could_not_know_when(selector):
    with pytest.raises(ValueError, match="stop=True"):
        capture(mlp(), selector, stop=True)


@pytest.mark.parametrize("inputs", [x, (x,), {"input": x}])
def test_once(inputs):
    model = mlp()
    assert torch.equal(capture.once(model, inputs, "0"), model[0](x))
    seen = capture.once(model, inputs, "0", "1")
    assert torch.equal(seen["1"], seen["0"].relu())
    assert len(capture.once(model, inputs, "**<Linear>")) == 2
