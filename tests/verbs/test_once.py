"""capture.once: one forward, which ends early where that loses nothing; with a loss, one backward as well."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import AmbiguousError, NotSeenError, capture, edit
from tenterhook.changes import zero
from tests.verbs.models import Net, mlp

x = torch.randn(3, 4)


def test_a_block_has_no_early_end():
    for make in (capture, lambda *given, **options: capture.once(mlp(), x, "0", **options)):
        with pytest.raises(TypeError, match=r"has no stop=.*capture\.once.*capture\.each"):
            make(mlp(), "0", stop=True)


def counted(model):
    ran = []
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    return ran


def test_the_forward_ends_where_all_named_calls_have_come():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    ran = counted(model)
    seen = capture.once(model, x, "1@0", "0:in@0")
    assert ran == ["0", "1"]
    assert torch.equal(seen["0:in"], x) and torch.equal(seen["1"], model[1](model[0](x)))
    ran.clear()
    capture.once(model, x, "1")
    assert ran == ["0", "1", "2"]


def test_an_early_end_passes_a_models_own_except_exception():
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
    ran = counted(model)
    assert torch.equal(capture.once(model, x, "a@0"), model.a(x))
    assert "b" not in ran


def test_what_runs_twice_is_ambiguous():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, layer)
    with pytest.raises(AmbiguousError, match="0 means 3 values"):
        capture.once(model, x, "0")
    assert torch.equal(capture.once(model, x, "0@1"), layer(layer(x)))
    assert torch.equal(capture.once(model, x, "0@-1"), model(x))
    assert len(capture.once(model, x, "0@1", "1").calls("1")) == 3


def test_a_call_that_never_comes_lets_the_forward_end():
    with pytest.raises(NotSeenError, match="called 1 times"):
        capture.once(mlp(), x, "0@4")
    model = mlp()
    model.unused = nn.Linear(1, 1)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    seen = capture.once(model, x, "unused@0", "2@0")
    assert torch.equal(seen["2"], model(x))
    with pytest.raises(NotSeenError, match="not reached"):
        seen["unused"]


def test_the_end_of_an_inner_session_is_not_that_of_the_outer():
    model = mlp()
    with capture(model, "2") as outer:
        capture.once(model, x, "0@0")
        model(x)
    assert len(outer.calls("2")) == 1
    with capture(model, "0") as outer:
        inner = capture.once(model, x, "0@0")
    assert torch.equal(outer["0"], inner)


@pytest.mark.parametrize("inputs", [x, (x,), {"input": x}])
def test_once(inputs):
    model = mlp()
    assert torch.equal(capture.once(model, inputs, "0"), model[0](x))
    seen = capture.once(model, inputs, "0", "1")
    assert torch.equal(seen["1"], seen["0"].relu())
    assert len(capture.once(model, inputs, "**<Linear>")) == 2


# With a loss.


def loss_of(out):
    return out.pow(2).sum()


class Tied(nn.Module):
    """A layer that is called twice, a weight that is used twice, writes in place, and a view."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.b.weight = self.a.weight
        self.reentrant = reentrant

    def forward(self, x):
        h = self.act(self.a(x))
        h = h if self.reentrant is None else checkpoint(self.b, h, use_reentrant=self.reentrant)
        y = self.b(h[:, :]) * h
        return self.a(y)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("no_grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_equal_those_of_autograd_and_nothing_stays(frozen, no_grad):
    model = Net().eval().requires_grad_(not frozen)
    before = torch.randn(4, 4)
    model.a.weight.grad = before.clone()
    fired = []
    model.b.weight.requires_grad_().register_post_accumulate_grad_hook(lambda p: fired.append(p))
    model.b.weight.requires_grad_(not frozen)
    with no_grad():
        seen = capture.once(model, x, "a", "b", "grad(a)", "grad(b)", "grad(c)", "grad(b:in)", loss=loss_of)

    a = model.a(x).detach().requires_grad_()
    into_b = a.clone()
    b = model.b(into_b)
    c = model.c(torch.relu(a + b.tanh()))
    truth = torch.autograd.grad(loss_of(c + a.sum(-1, keepdim=True)), (a, b, c, into_b))
    for address, grad in zip(("grad(a)", "grad(b)", "grad(c)", "grad(b:in)"), truth, strict=True):
        torch.testing.assert_close(seen[address], grad)
    assert torch.equal(seen["a"], a) and seen["grad(a)"].grad_fn is None
    assert torch.equal(model.a.weight.grad, before) and not fired
    assert all(p.grad is None for name, p in model.named_parameters() if name != "a.weight")
    assert [p.requires_grad for p in model.parameters()] == [not frozen] * 6


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weights_checkpoints_and_writes_in_place(reentrant, frozen):
    model = Tied(reentrant).requires_grad_(not frozen)
    addresses = ["grad(a@0)", "grad(a@1)", "grad(act)", "grad(act:in)", "grad(b)"]
    seen = capture.once(model, x, *addresses, loss=loss_of)
    given = x.clone().requires_grad_()  # a twin in which everything has a gradient by itself
    with capture(model, *addresses) as truth:
        loss_of(model(given)).backward()
    for address in addresses:
        for mine, theirs in zip(seen.calls(address), truth.calls(address), strict=True):
            assert torch.equal(mine, theirs)
    if not frozen:
        mine = capture.once(model, x, "grad(a.weight)", loss=loss_of)
        assert torch.equal(mine, model.a.weight.grad)
    model.zero_grad()
    capture.once(model, x, *addresses, loss=loss_of)
    assert all(p.grad is None for p in model.parameters())


def test_the_gradient_of_the_input_and_of_leaves_of_the_caller():
    model, given = mlp(), x.clone().requires_grad_()
    mine = capture.once(model, given, "grad(.:in)", loss=loss_of)
    assert given.grad is None
    torch.testing.assert_close(mine, torch.autograd.grad(loss_of(model(given)), given)[0])
    model.requires_grad_(False)
    torch.testing.assert_close(capture.once(model, x, "grad(.:in)", loss=loss_of), mine)
    torch.testing.assert_close(capture.once(model, x, "grad(0)", loss=loss_of) @ model[0].weight, mine)


def test_the_backward_goes_only_as_far_as_it_has_to():
    model, reached = mlp(), []
    model[0].weight.register_hook(lambda grad: reached.append("0"))
    model[2].weight.register_hook(lambda grad: reached.append("2"))
    capture.once(model, x, "grad(1)", loss=loss_of)
    assert reached == []


def test_with_a_loss_whatever_cannot_be_had_says_why():
    model = mlp()
    with pytest.raises(ValueError, match=r"a gradient needs a backward pass, and grad\(0\) was asked for; give"):
        capture.once(model, x, "0", grad=True)
    with pytest.raises(ValueError, match=r"ask for grad\(\.\.\.\)"):
        capture.once(model, x, "0", loss=loss_of)
    with pytest.raises(TypeError, match="loss makes one number of the model's output, and this is 3×2 float32"):
        capture.once(model, x, "grad(0)", loss=lambda out: out)
    with pytest.raises(NotSeenError, match="the loss does not need it"):
        capture.once(model, x, "grad(0)", loss=lambda out: out.detach().sum())
    with pytest.raises(ZeroDivisionError):
        capture.once(model, x, "grad(0)", loss=lambda out: 1 / 0)
    model[0].weight.requires_grad_(False)
    with pytest.raises(NotSeenError, match="frozen: its requires_grad is False"):
        capture.once(model, x, "grad(0.weight)", loss=loss_of)


def test_edits_around_it_act():
    model = mlp()
    with edit(model, {"1": zero()}):
        grad = capture.once(model, x, "grad(2)", loss=loss_of)
    torch.testing.assert_close(grad, (2 * model[2].bias).expand(3, 2))
