"""capture(model, {selector: reduce}): for each selector what is kept of its values."""

import pytest
import torch

from tenterhook import capture
from tests.verbs.models import X


def first(t):
    return t.flatten()[:1]


def mean(t):
    return t.mean()


def test_each_selector_has_its_own(net):
    with capture(net, "a", "b", "c", "./h") as whole:
        net(X)
    with capture(net, {"a": mean, "b": None}, "c", {"./h": first}, reduce=first) as seen:
        net(X)
    assert torch.equal(seen["a"], whole["a"].mean()) and torch.equal(seen["b"], whole["b"])
    assert torch.equal(seen["c"], first(whole["c"])) and torch.equal(seen["./h"], first(whole["./h"]))
    with capture(net, "*", {"a": mean}) as seen:
        net(X)
    assert torch.equal(seen["a"], whole["a"].mean()) and torch.equal(seen["b"], whole["b"])
    assert torch.equal(capture.once(net, X, {"a": mean})["a"], whole["a"].mean())


def test_gradients_too():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    with capture(net, "0", "1", grad=True) as whole:
        net(X).sum().backward()
    with capture(net, {"0": mean, "1": mean, "grad(1)": first}, grad=True) as seen:
        net(X).sum().backward()
    assert torch.equal(seen["grad(0)"], whole["grad(0)"].mean())
    assert torch.equal(seen["grad(1)"], first(whole["grad(1)"])) and torch.equal(seen["1"], whole["1"].mean())


def test_what_makes_no_sense(net):
    with pytest.raises(ValueError, match="an empty dict selects nothing"):
        capture(net, {})
    with pytest.raises(ValueError, match="a is meant by several selectors of a dict"):
        capture(net, {"a": mean, "*": first})
    with pytest.raises(TypeError, match="reduce is a function of a tensor"):
        capture(net, {"a": 3})
