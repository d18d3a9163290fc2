import gc

import pytest
import torch
import torch._dynamo

from tenterhook.hooks import traced  # noqa: F401  # which receives what comes
from tenterhook.platform import tap_ops

X = torch.linspace(-1, 1, 4)


class Receiver:
    """Notes what comes, and edits by three."""

    def __init__(self):
        self.came = []

    def value(self, leaves, tap, outline):
        self.came.append(("value", tap, outline, leaves[0].clone()))

    def token(self, tap, outline, graded, grads):
        self.came.append(("token", tap, list(graded), grads))
        return 10 + len(self.came)

    def gradient(self, grad, call, tap, outline, leaf):
        self.came.append(("gradient", call, tap, leaf, grad.clone()))

    def new_gradient(self, grad, call, tap, outline, leaf):
        return grad * 5

    def edit(self, leaves, tap, outline):
        self.came.append(("edit", [leaf.requires_grad for leaf in leaves]))
        return [leaf * 3 for leaf in leaves]


@pytest.fixture
def came(monkeypatch):
    torch._dynamo.reset()
    receiver = Receiver()
    monkeypatch.setattr(tap_ops, "receiver", receiver)
    yield receiver.came
    torch._dynamo.reset()


def looked_at(x):
    y = x.sin()
    torch.ops.tenterhook.value([y], 1, 2)
    token = torch.ops.tenterhook.token(3, 2, [0], True)
    y.register_hook(lambda grad: torch.ops.tenterhook.gradient(grad, token, 3, 2, 0))
    return (y * y).sum()


def edited(x):
    y, _, _ = torch.ops.tenterhook.edit([x.sin(), x.cos()], 4, 0, [0, 1])
    y = y.clone()
    token = torch.ops.tenterhook.token(5, 0, [0], True)
    y.register_hook(lambda grad: torch.ops.tenterhook.new_gradient(grad, token, 5, 0, 0))
    return (y * y).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_comes_is_handed_over_once_each_time(backend, came):
    run = torch.compile(looked_at, backend=backend, fullgraph=True)
    for _ in range(2):
        came.clear()
        run(X.clone().requires_grad_()).backward()
        assert [one[0] for one in came] == ["value", "token", "gradient"], "torch leaves out operations with effects"
        assert torch.allclose(came[0][-1], X.sin()) and torch.allclose(came[2][-1], 2 * X.sin())
        assert came[1][1:] == (3, [0], True) and came[2][1:4] == (12, 3, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_returned_takes_the_place(backend, came):
    run = torch.compile(edited, backend=backend, fullgraph=True)
    x = X.clone().requires_grad_()
    out = run(x)
    out.backward()
    assert torch.allclose(out, (9 * X.sin().square()).sum())
    assert torch.allclose(x.grad, 5 * 2 * 3 * X.sin() * 3 * X.cos())
    assert ("edit", [True, True]) in came, "what an operation is given has no graph of its own"


def test_the_graph_of_an_edit_lives_as_long_as_somebody_can_ask_for_its_gradient(came):
    run = torch.compile(edited, fullgraph=True)
    kept = run(X.clone().requires_grad_())
    for _ in range(5):
        run(X.clone().requires_grad_())
        gc.collect()
    assert 1 < len(tap_ops._graphs) <= 3, "torch keeps another tensor for the backward pass than the operation gave"
    kept.backward()


def test_cuda_graphs_leave_them_out():
    for name in ("value", "token", "gradient", "new_gradient", "edit", "edit_gradient"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.tenterhook, name).default.tags
