"""Functions of torch while they are observed, beside losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_ as by_another_name

from tenterhook.platform.observed import CLIPS, DROPOUTS, Observed, observable

X = torch.randn(4, 3)


@pytest.fixture
def heard():
    calls = []

    def around(inner, /, *args, **kwargs):
        calls.append(inner.__name__)
        return inner(*args, **kwargs)

    observed = [Observed(observable(name), around, calls=None if name in CLIPS else 3) for name in (*DROPOUTS, *CLIPS)]
    yield calls
    for one in observed:
        one.remove()
    assert all(observable(name).__kwdefaults__ is None for name in (*DROPOUTS, *CLIPS))


def test_every_one_can_be_observed():
    assert all(map(observable, (*DROPOUTS, *CLIPS))), "torch's dropout or clipping is no plain function now"
    assert observable("no_function") is None


def test_whoever_calls_one_is_heard(heard):
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert by_another_name(iter([weight]), 1.0) == pytest.approx(12**0.5) and weight.grad.norm() <= 1.0
    nn.utils.clip_grad_value_(weight, clip_value=0.1)
    assert weight.grad.max() == pytest.approx(0.1)
    nn.Dropout(0.5)(weight)
    assert heard == ["clip_grad_norm_", "clip_grad_value_", "dropout"]


def test_only_some_calls_are_told_of(heard):
    own = F.dropout.__code__
    for _ in range(5):
        F.dropout(torch.ones(2), 0.5)
    assert heard == ["dropout"] * 3 and F.dropout.__code__ is not own


def test_torch_compile_does_not_notice(heard):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()

    def step(x):
        model(x).sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            for _ in range(3):
                assert torch.equal(compiled(X), model(X))
            clip = torch.compile(step, backend="eager")
            bare = [clip(X).item() for _ in range(3)]
    finally:
        torch._dynamo.reset()
    assert all(value > 0 for value in bare)
