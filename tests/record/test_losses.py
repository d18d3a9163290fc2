"""The losses of trainings in many styles."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tests.record.small import batches, net, train


def test_the_loss_is_not_what_autograd_grad_was_called_on(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with watch(model, to=tmp_path / "run", every=2) as run:
        for x, _ in batches(30):
            x.requires_grad_()
            (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = force.square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.open().steps().column("loss").to_pylist() == pytest.approx(losses)


class Heads(nn.Module):
    """A head for each task, of which one is used at a time."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.heads[self.calls % 3](self.body(x))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_losses_of_heads_in_turn(tmp_path, set_to_none, accumulate):
    model, losses = Heads(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=50) as run:
        for x, y in batches(70):
            optimizer.zero_grad(set_to_none)
            losses.append(0.0)
            for _ in range(accumulate):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
    assert run.open().steps()["loss"].to_pylist() == losses


@pytest.mark.parametrize("turn", [2, 5])
def test_losses_of_a_head_that_has_its_turn_from_a_later_step_on(tmp_path, turn):
    model, losses = Decoders(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=1000) as run:
        for k, (x, y) in enumerate(batches(60)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, 0 if k > 30 and k % turn == 1 else 1), y)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    assert run.open().steps()["loss"].to_pylist() == losses


class Decoders(nn.Module):
    """A trunk, and a decoder for each task; each has more parameters than there are steps at the start."""

    def __init__(self, many, depth):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.tasks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)), nn.Linear(8, 3)) for _ in range(many)
        )

    def forward(self, x, task):
        return self.tasks[task](self.trunk(x))


def test_losses_of_two_backward_passes_with_a_decoder_each(tmp_path):
    model, losses = Decoders(2, 20), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=50) as run:
        for x, y in batches(70):
            optimizer.zero_grad()
            both = [F.cross_entropy(model(x, task), y) for task in range(2)]
            for loss in both:
                loss.backward()
            losses.append(sum(loss.item() for loss in both))
            optimizer.step()
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(losses)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_losses_of_many_heads_at_random(tmp_path, set_to_none):
    model, losses = Decoders(40, 0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=50) as run:
        for k, (x, y) in enumerate(batches(120)):
            optimizer.zero_grad(set_to_none)
            loss = F.cross_entropy(model(x, k * 17 % 40), y)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    assert run.open().steps()["loss"].to_pylist() == losses


@pytest.mark.parametrize("both_first", [False, True])
def test_losses_of_an_actor_and_a_critic(tmp_path, both_first):
    model, losses = nn.ModuleDict({"actor": nn.Linear(6, 3), "critic": nn.Linear(9, 1)}), []
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (model["critic"], model["actor"])]

    def critic(x, y):
        return (model["critic"](torch.cat([x, F.one_hot(y, 3)], 1)) - 1).square().mean()

    def actor(x, y):
        return 5 - model["critic"](torch.cat([x, model["actor"](x)], 1)).mean()

    with watch(model, to=tmp_path / "run", every=50) as run:
        for x, y in batches(70):
            losses.append(0.0)
            for optimizer, loss_of in zip(optimizers, (critic, actor), strict=True):
                optimizer.zero_grad()
                model["critic"].requires_grad_(loss_of is critic)
                loss = loss_of(x, y)
                loss.backward()
                losses[-1] += loss.item()
                if not both_first:
                    optimizer.step()
            for optimizer in optimizers if both_first else ():
                optimizer.step()
            model["critic"].requires_grad_(True)
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(losses)


class Tempered(nn.Module):
    """With a parameter that is trained by a loss and an optimizer of its own, and no module in between."""

    def __init__(self):
        super().__init__()
        self.alpha, self.body = nn.Parameter(torch.zeros(1)), nn.Linear(6, 3)


@pytest.mark.parametrize("what", [("parameter_grad", "update"), ("output", "output_grad")])
def test_losses_of_a_second_optimizer_whose_backward_no_module_sees(tmp_path, what):
    model, both = Tempered(), []
    optimizers = [torch.optim.SGD(some, lr=0.01) for some in (model.body.parameters(), [model.alpha])]
    with watch(model, to=tmp_path / "run", every=50, what=what) as run:
        for x, y in batches(70):
            losses = F.cross_entropy(model.body(x), y), model.alpha.exp().sum()
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            both.append([loss.item() for loss in losses])
    steps = run.open().steps()
    assert steps["losses"].to_pylist()[1:] == both[1:] and set(steps["backwards"].to_pylist()[1:]) == {2}


def test_losses_of_two_optimizers_that_share_a_backward_pass(tmp_path):
    model, losses = net(), []
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[:3], model[3:])]
    with watch(model, to=tmp_path / "run", every=50) as run:
        for x, y in batches(30):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
    assert run.open().steps()["loss"].to_pylist() == losses


def test_losses_once_the_head_is_frozen(tmp_path):
    model, data = net(), batches(70)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=50) as run:
        losses = train(model, data[:30], optimizer=optimizer)
        model[4].requires_grad_(False)
        losses += train(model, data[30:], optimizer=optimizer)
    assert run.open().steps()["loss"].to_pylist() == losses


def test_several_losses_at_once_are_added_up(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with watch(model, to=tmp_path / "run", every=50) as run:
        for x, y in batches(25):
            output = model(x)
            both = [F.cross_entropy(output, y), output.square().mean().reshape(1)]
            torch.autograd.backward(both)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(one.item() for one in both))
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(losses)


def test_a_complex_loss_is_unknown(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(3):
            torch.fft.fft(model(torch.randn(2, 4))).sum().backward(torch.tensor(1 + 0j))
            optimizer.step()
    assert run.open().rank_info()["failed"] is None
    assert run.open().steps()["loss"].to_pylist() == [None] * 3
