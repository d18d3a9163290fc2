"""torch's loss functions while they are observed, and what a loss is made of."""

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy as by_another_name

from tenterhook.platform.losses import FAMILIES, made_by, note_term, terms_of
from tenterhook.platform.observed import Observed, observable

X, Y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])


@pytest.fixture
def heard():
    calls = []

    def around(inner, /, *args, **kwargs):
        output = inner(*args, **kwargs)
        calls.append((inner.__name__, output))
        return output

    before = {name: (vars(getattr(F, name)).copy(), getattr(F, name).__code__) for name in FAMILIES}
    observed = [Observed(observable(name), around) for name in FAMILIES]
    yield calls
    for one in observed:
        one.remove()
    for name, was in before.items():
        assert (vars(getattr(F, name)), getattr(F, name).__code__) == was and getattr(F, name).__kwdefaults__ is None


def test_every_one_can_be_observed():
    assert all(map(observable, FAMILIES)) and not observable("no_loss")


def test_whoever_calls_one_is_heard_and_gets_the_same(heard):
    bare = torch.nn.CrossEntropyLoss()(X, Y)
    ways = (lambda: F.cross_entropy(X, Y), lambda: by_another_name(input=X, target=Y), lambda: bare)
    assert all(torch.equal(way(), bare) for way in ways)
    assert [name for name, _ in heard] == ["cross_entropy"] * 3
    with pytest.raises(TypeError):
        F.mse_loss(X)


def test_it_is_the_same_function_to_pickle_inspect_and_jit(heard):
    assert pickle.loads(pickle.dumps(F.cross_entropy)) is by_another_name is F.cross_entropy
    assert list(inspect.signature(F.cross_entropy).parameters)[:3] == ["input", "target", "weight"]
    assert "ignore_index" in inspect.getsource(F.cross_entropy)
    scripted = torch.jit.script(nn.CrossEntropyLoss())
    assert torch.equal(scripted(X, Y), F.cross_entropy(X, Y))
    assert [name for name, _ in heard] == ["cross_entropy"]  # the scripted one runs no Python


def test_torch_compile_does_not_notice(heard):
    torch._dynamo.reset()

    def loss(x, y):
        return F.cross_entropy(x * 2, y)

    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled = torch.compile(loss, backend="eager", fullgraph=True)
            values = [compiled(X, Y) for _ in range(3)]
    finally:
        torch._dynamo.reset()
    assert not heard and all(torch.equal(value, loss(X, Y)) for value in values)


def test_by_which_operation_a_tensor_was_made():
    assert made_by(X.sigmoid()[:, 0].reshape(2, 2).unsqueeze(0).squeeze().T.double()) == "SigmoidBackward0"
    assert made_by(X * 2) == "MulBackward0" and made_by(X) == made_by(torch.ones(1)) == ""


def test_what_a_loss_is_made_of():
    term = F.cross_entropy(X, Y)
    assert note_term(term, "key", "a") and not note_term(term, "key", "b")  # the first to be told is the innermost
    assert terms_of([term / 2], "key") == (["a"], False)
    assert terms_of([term.reshape(1).sum() + X.square().sum()], "key") == (["a"], True)
    assert terms_of([X.sum()], "key") == ([], True) and terms_of([term], "other")[0] == []
    assert not note_term(torch.ones(1), "key", "a")
