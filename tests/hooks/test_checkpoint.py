"""Activation checkpointing, both kinds: values and gradients once, under the right call."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tenterhook import NotSeenError, capture, edit, observe
from tenterhook.changes import add
from tests.hooks.models import ADDRESSES, BOTH, Segments


def run(model, x, backwards=1, watch=True):
    torch.manual_seed(3)
    model.zero_grad()
    x = x.clone().requires_grad_()
    with capture(model, *ADDRESSES, grad=True) if watch else contextlib.nullcontext() as seen:
        loss = model(x).pow(2).sum()
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)
    return seen, x.grad, [p.grad.clone() for p in model.parameters()]


@BOTH
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_values_and_gradients_equal_those_without_a_checkpoint(reentrant, p):
    plain, x = Segments(p=p), torch.randn(3, 4)
    wrapped = Segments(reentrant, p)
    wrapped.load_state_dict(plain.state_dict())
    truth, *_ = run(plain, x)
    _, x_grad, grads = run(wrapped, x, watch=False)
    seen, same_x_grad, same_grads = run(wrapped, x)
    assert torch.equal(x_grad, same_x_grad)
    assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
    for address in ADDRESSES:
        for kind in (address, f"grad({address})"):
            mine, theirs = seen.calls(kind), truth.calls(kind)
            assert len(mine) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), kind
    assert len(seen.calls("shared")) == len(seen.calls("grad(shared)")) == 6
    assert "a checkpoint recomputing" in str(seen.report())
    assert "recomputing" not in str(truth.report())


@BOTH
def test_several_backwards_of_one_forward(reentrant):
    plain, x = Segments(), torch.randn(3, 4)
    wrapped = Segments(reentrant)
    wrapped.load_state_dict(plain.state_dict())
    truth, *_ = run(plain, x, backwards=2)
    seen, *_ = run(wrapped, x, backwards=2)
    for address in ADDRESSES:
        mine, theirs = seen.calls(f"grad({address})"), truth.calls(f"grad({address})")
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), address


@BOTH
def test_several_forwards_before_their_backwards_in_another_order(reentrant):
    plain, x = Segments(), torch.randn(3, 4)
    wrapped = Segments(reentrant)
    wrapped.load_state_dict(plain.state_dict())

    def run(model):
        leaf = x.clone().requires_grad_()
        with capture(model, "grad(shared)", "grad(layers.0)") as seen:
            first, second = model(leaf).sum(), model(leaf * 2).sum()
            second.backward()
            first.backward()
        return seen

    truth, seen = run(plain), run(wrapped)
    for address in ("grad(shared)", "grad(layers.0)"):
        assert len(seen.calls(address)) == len(truth.calls(address)) in (2, 12)
        pairs = zip(seen.calls(address), truth.calls(address), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@BOTH
def test_a_session_opened_only_around_the_backward_says_so(reentrant):
    model = Segments(reentrant)
    loss = model(torch.randn(3, 4, requires_grad=True)).sum()
    with capture(model, "shared") as seen:
        loss.backward()
    with pytest.raises(NotSeenError, match="only inside a backward pass"):
        seen["shared"]


def test_a_reentrant_checkpoint_whose_backward_never_came():
    model = Segments(reentrant=True)
    with capture(model, "grad(shared)") as seen:
        model(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(NotSeenError, match="checkpoint that did not run again since"):
        seen["grad(shared)"]


def test_early_stop_of_the_recomputation_leaves_nothing_out_of_step():
    """A non-reentrant checkpoint stops recomputing once it has what it needs: the last hook runs once only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with capture(model, "0", "1", "2", "2:in", grad=True) as seen:
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False).sum().backward()
    for address in ("0", "2", "grad(2)", "grad(2:in)"):
        assert len(seen.calls(address)) == 2
    torch.testing.assert_close(seen.calls("grad(2:in)")[0], torch.ones(3, 4) @ model[2].weight)


@BOTH
def test_frozen_inside_a_checkpoint(reentrant):
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    block[0].requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=reentrant)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    bare = block[2].weight.grad.clone()
    block.zero_grad()
    with capture(block, "grad(0)", frozen=True) as seen:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(block[2].weight.grad, bare)
    h = block[0](x).detach().requires_grad_()
    torch.testing.assert_close(seen["grad(0)"], torch.autograd.grad(block[2](block[1](h)).sum(), h)[0])


def test_what_an_observer_computes_is_no_business_of_the_checkpoint():
    block, probe = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), nn.Linear(4, 1)
    x = torch.randn(3, 4)
    with observe(block, {"1": lambda value, site: probe(value).pow(2).mean()}):
        checkpoint(block, x, use_reentrant=False).sum().backward()
    with capture(block, "1", detach=False, reduce=lambda t: t.pow(2).mean()) as seen:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert seen["1"].requires_grad


def test_other_modes_than_a_selective_checkpoints_see_what_is_kept_and_moved():
    model, x, z = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3), torch.randn(2, 3)
    wide = torch.ones(3, dtype=torch.float64)

    def captured(x, vector):
        with capture(model, "0") as seen:
            return model(x) + seen["0"]

    def steered(x, vector):
        with edit(model, {"0": add(vector)}):
            return model(x)

    for function in (captured, steered):
        traced = make_fx(function)(x, wide)
        assert torch.equal(traced(z, 2 * wide), function(z, 2 * wide))
    with FakeTensorMode():
        fake, shapes = nn.Sequential(nn.Linear(3, 3)), []
        with observe(fake, {"0": lambda value, site: shapes.append((value * torch.ones(3)).shape)}):
            fake(torch.ones(2, 3))
    assert shapes == [(2, 3)]
