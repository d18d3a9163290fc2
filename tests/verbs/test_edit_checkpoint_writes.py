"""Parameters that are changed, and inputs that are written into, under a checkpoint."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenterhook import EditError, capture, edit
from tenterhook.changes import scale
from tests.verbs.checkpointed import BOTH, X, pair, run, same


@BOTH
def test_a_parameter_that_was_restored_before_the_backward_is_an_error(reentrant):
    _, model = pair(reentrant)
    with pytest.raises(
        EditError, match=r"shared.weight: it ran with a changed value under a checkpoint.*inside the block"
    ):
        run(model, {"shared.weight": scale(2.0)}, inside=False)
    run(model, {"layers.0": scale(2.0)}, inside=False)


@BOTH
def test_a_changed_parameter_in_a_checkpoint_in_which_no_module_is_called(reentrant):
    fc, x = nn.Linear(4, 2), X.clone().requires_grad_()

    def run():
        return checkpoint(lambda x: F.linear(x, fc.weight).tanh(), x, use_reentrant=reentrant).sum()

    with edit(fc, {"weight": scale(3.0)}):
        run().backward()
    inside, x.grad, fc.weight.grad = (x.grad, fc.weight.grad), None, None
    twin = (fc.weight.detach() * 3).requires_grad_()
    truth = torch.autograd.grad(F.linear(x, twin).tanh().sum(), (x, twin))
    for ours, theirs in zip(inside, truth, strict=True):
        torch.testing.assert_close(ours, theirs)
    with edit(fc, {"weight": scale(3.0)}):
        out = run()
    with pytest.raises(EditError, match="weight: it ran with a changed value under a checkpoint"):
        out.backward()


@BOTH
def test_a_changed_parameter_that_no_module_in_the_checkpoint_holds(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def part(self, x):
            return torch.tanh(self.layer(x) * self.gamma)

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant).sum()

    model, x = Model(), X.clone().requires_grad_()
    with edit(model, {"gamma": scale(3.0)}):
        loss = model(x)
    with pytest.raises(EditError, match="gamma: it ran with a changed value under a checkpoint"):
        loss.backward()


class WritesUnused(nn.Module):
    """Writes into a tensor in place and drops the result, under a checkpoint or not."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.reentrant = reentrant

    def inner(self, x):
        h = self.a(x)
        self.act(h)
        return self.b(h)

    def forward(self, x):
        return (
            self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        ).pow(2)


@BOTH
@pytest.mark.filterwarnings("ignore:.*was never edited")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("address", ["grad(act:in)", "act:in"])
def test_what_a_module_writes_into_its_input_is_carried_over_in_the_recomputation(reentrant, inside, address):
    plain, wrapped = WritesUnused(), WritesUnused(reentrant)
    wrapped.load_state_dict(plain.state_dict())
    same(run(wrapped, {address: scale(1.0)}, inside=inside), run(plain, {}))


def test_a_frozen_capture_of_what_is_written_into_under_a_checkpoint():
    plain, wrapped = WritesUnused(), WritesUnused(False)
    wrapped.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, wrapped):
        model.a.requires_grad_(False)
        with capture(model, "grad(act:in)", frozen=True) as seen:
            model(X).sum().backward()
        grads.append((model.b.weight.grad, seen["grad(act:in)"]))
    model.zero_grad()
    plain.zero_grad()
    plain(X).sum().backward()
    torch.testing.assert_close(grads[1], (plain.b.weight.grad, grads[0][1]))


def test_a_parameter_changed_inside_the_checkpointed_function_is_an_error():
    layer, x = nn.Linear(4, 4), X.clone().requires_grad_()
    before = layer.weight.clone()

    def function(x):
        with edit(layer, {"weight": scale(2.0)}):
            return layer(x)

    with pytest.raises(EditError, match=r"weight: .*; open the block around the checkpoint"):
        checkpoint(function, x, use_reentrant=False)
    assert torch.equal(layer.weight, before)
    with torch.no_grad():
        assert torch.equal(
            checkpoint(function, x, use_reentrant=False), nn.functional.linear(x, 2 * before, layer.bias)
        )
