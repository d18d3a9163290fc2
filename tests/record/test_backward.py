"""Which backward passes are seen, and that the functions of torch that are wrapped for it are put back."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable, graph
from torch.utils.checkpoint import checkpoint

from tenterhook import watch
from tenterhook.record.sources.wrapped import all_wrapped

pytestmark = pytest.mark.filterwarnings("ignore:watch recorded nothing")


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(many):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(many)
    ]


def recorded(tmp_path, model, losses_of, every=50, many=26):
    """The losses and the numbers of backward passes of a training; `losses_of` runs the passes of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = []
    with watch(model, to=tmp_path / "run", every=every) as run:
        for x, y in batches(many):
            optimizer.zero_grad()
            expected.append(losses_of(x, y))
            optimizer.step()
    assert run.open().rank_info()["failed"] is None
    steps = run.open().steps()
    assert steps["loss"].to_pylist() == pytest.approx(expected)
    return set(steps["backwards"].to_pylist())


def every_function():
    """The functions of torch's modules and of its scalers that may be wrapped, by who has them."""
    owners = {*(owner for owner, _, _ in all_wrapped()), torch, torch.autograd, graph, torch.jit, torch.optim.Optimizer}
    owners |= {torch.Tensor, nn.Module, torch.utils.checkpoint}
    return {(owner, name): value for owner in owners for name, value in list(vars(owner).items()) if callable(value)}


def test_exactly_the_functions_that_are_listed_are_wrapped_and_all_are_put_back(tmp_path):
    before = every_function()
    with watch(net(), to=tmp_path / "a"), watch(net(), to=tmp_path / "b"):
        during = every_function()
    exchanged = {(owner, name) for (owner, name), value in during.items() if before[owner, name] is not value}
    assert exchanged == {(owner, name) for owner, name, _ in all_wrapped() if (owner, name) in before}
    assert {(owner, name) for owner in (torch.autograd, graph) for name in ("_engine_run_backward",)} <= exchanged
    assert every_function() == before


def test_somebody_else_may_wrap_the_same(tmp_path):
    model, before = net(), torch.autograd._engine_run_backward
    seen = []

    def losses_of(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    with watch(model, to=tmp_path / "a"):
        ours = torch.autograd._engine_run_backward

        def theirs(*args, **kwargs):
            seen.append(1)
            return ours(*args, **kwargs)

        torch.autograd._engine_run_backward = theirs
        losses_of(*batches(1)[0])
    assert torch.autograd._engine_run_backward is theirs  # it is theirs to put back
    try:
        losses_of(*batches(1)[0])
        recorded(tmp_path, model, losses_of)  # also while what is left of ours is below
    finally:
        torch.autograd._engine_run_backward = before
    assert len(seen) == 28


def test_two_recordings_each_see_their_own(tmp_path):
    one, other = net(), net()

    def losses_of(x, y):
        loss = F.cross_entropy(one(x), y)
        loss.backward()
        return loss.item()

    with watch(other, to=tmp_path / "other") as beside:
        assert recorded(tmp_path, one, losses_of) == {1}
    assert len(beside.open().steps()) == 0


def test_the_passes_of_others_do_not_count(tmp_path):
    model, other = net(), net()

    def losses_of(x, y):
        other(x).sum().backward()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    for every in (1, 50):
        assert recorded(tmp_path / str(every), model, losses_of, every) == {1}


def test_only_the_leaves_that_are_asked_for_count(tmp_path):
    model = net()

    def losses_of(x, y):
        loss = F.cross_entropy(model(x.requires_grad_()), y)
        loss.backward(inputs=[x], retain_graph=True)
        loss.backward(inputs=[*model.parameters()])
        return loss.item()

    assert recorded(tmp_path, model, losses_of) == {1}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("every", [1, 50])
def test_double_backward(tmp_path, every):
    model = net()

    def losses_of(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        penalty.backward()
        for p in model.parameters():
            p.grad = p.grad.detach()  # else the graph and the gradient would keep one another
        return loss.item() + penalty.item()

    assert recorded(tmp_path, model, losses_of, every) == {2}


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_whose_backward_pass_is_within_another(tmp_path, every, whole):
    model = net()

    def losses_of(x, y):
        x.requires_grad_()
        inner = checkpoint(model if whole else model[:2], x, use_reentrant=True)
        loss = F.cross_entropy(inner if whole else model[2](inner), y)
        loss.backward()
        return loss.item()

    assert recorded(tmp_path, model, losses_of, every) == {1}


def test_a_pass_in_another_thread(tmp_path):
    model, losses = net(), []

    def losses_of(x, y):
        def work():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return losses[-1]

    assert recorded(tmp_path, model, losses_of) == {1}


def test_a_pass_that_python_does_not_start(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(4):
            loss = F.cross_entropy(model(x), y)
            Variable._execution_engine.run_backward((loss,), (torch.ones(()),), False, False, (), True, True)
            optimizer.step()
    found = run.open()
    assert found.rank_info()["failed"] is None and found.steps()["loss"].to_pylist() == [None] * 4
    assert [row["what"] for row in found.stats().to_pylist() if row["site"] == "2"] == ["output", "output_grad"] * 4


def test_a_pass_that_raises(tmp_path):
    model = net()

    def losses_of(x, y):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    assert recorded(tmp_path, model, losses_of) == {1}


def test_the_loss_of_a_pass_that_raises_halfway_does_not_count(tmp_path):
    model, true = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, to=tmp_path / "run", every=2) as run:
        for step in range(6):
            loss = F.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4, dtype=torch.long))
            handle = model[0].weight.register_hook(lambda grad: 1 / 0) if step == 3 else None
            optimizer.zero_grad()
            try:
                loss.backward()
            except ZeroDivisionError:  # as many scripts go on after running out of memory
                handle.remove()
                continue
            optimizer.step()
            true.append(loss.item())
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(true)
