"""Trainings without an optimizer of torch."""

import gc

import pytest
import torch
import torch.nn.functional as F

from tenterhook import watch
from tests.record.small import agrees, batches, net, rows, sgd, train

KINDS = {"input", "output", "output_grad", "parameter", "parameter_grad", "update"}


def subtracted(model, loss):
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def through_data(model, loss):
    loss.backward()
    for p in model.parameters():
        p.data.sub_(p.grad, alpha=0.1)


def asked(model, loss):
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    with torch.no_grad():
        for p, grad in zip(model.parameters(), gradients, strict=True):
            p.sub_(0.1 * grad)


class Own:
    """An optimizer as fastai has it."""

    def __init__(self, parameters):
        self.parameters, self.state = [*parameters], {}

    def step(self):
        for p in self.parameters:
            mean = self.state.setdefault(p, torch.zeros_like(p))
            mean.mul_(0.9).add_(p.grad.data)
            p.data.add_(mean, alpha=-0.1)


@pytest.fixture
def alone():
    """Without the optimizers of other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def by_hand(model, data, update):
    losses, values = [], []
    for x, y in data:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        before = [p.detach().clone() for p in model.parameters()]
        update(model, loss)
        losses.append(loss.item())
        gradients = [p.grad if p.grad is not None else None for p in model.parameters()]
        values.append((before, gradients, [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]))
        with torch.no_grad():
            model(x)  # an evaluation
    return losses, values


@pytest.mark.parametrize(
    ("update", "unused"),  # autograd.grad() counts only where there is no optimizer
    [(subtracted, False), (through_data, False), (asked, False), (subtracted, True), (through_data, True)],
)
def test_gradients_and_updates_are_recorded(tmp_path, update, unused, alone):
    model, data = net(), batches(30)
    optimizer = sgd(model) if unused else None  # made, and never used
    first = 8 if unused else 3
    assert (optimizer is None) is not unused
    with watch(model, to=tmp_path / "run", every=1) as run:
        losses, values = by_hand(model, data, update)
    found = run.open()
    steps = found.steps().to_pydict()
    assert len(steps["step"]) == (30 if not unused else 29) and steps["loss"][2:] == losses[-len(steps["loss"]) + 2 :]
    assert set(found.stats()["what"].to_pylist()) == KINDS
    late = 30 - len(steps["step"])
    for step in range(first, len(steps["step"])):
        before, gradients, updates = values[step + late]
        (row,) = rows(found, step=step, site="0.weight", what="parameter")
        agrees(row, before[0])
        (row,) = rows(found, step=step, site="0.weight", what="update")
        assert row["rms"] == pytest.approx(updates[0].square().mean().sqrt().item(), rel=1e-4)
        if update is not asked:
            agrees(rows(found, step=step, site="4.bias", what="parameter_grad")[0], gradients[-1])
        else:
            (row,) = rows(found, step=step, site="4.bias", what="parameter_grad")
            assert row["rms"] == pytest.approx(updates[-1].square().mean().sqrt().item() * 10, rel=1e-3)
    assert not [f for f in run.findings if f.severity != "note"]
    assert "no optimizer of torch.optim has stepped" in run.verdict() and "updates were recorded" in run.verdict()


def test_an_optimizer_that_never_steps(tmp_path, alone):
    model = net()
    optimizer = sgd(model)
    with watch(model, to=tmp_path / "run") as run:
        for x, y in batches(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
    text = " ".join(str(run.verdict()).replace("│", "").split())
    assert "1 step, 1 sampled" in text and "nothing is trained" in text
    assert "it has not stepped: the backward passes (30) are all in one step" in text
    assert "a step is a call of a model" not in text


def test_an_optimizer_of_another_library(tmp_path, alone):
    model = net()
    own = Own(model.parameters())
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(40):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            own.step()
    assert len(run.open().steps()) == 40
    assert len(rows(run.open(), site="0.weight", what="update")) >= 37


def test_torch_func(tmp_path, alone):
    model = net()
    params = dict(model.named_parameters())

    def loss_of(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, x), y)

    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(30):
            gradients = torch.func.grad(loss_of)(params, x, y)
            params = {name: (p - 0.1 * gradients[name]).detach() for name, p in params.items()}
    assert run._recording.recorder.failed is None
    assert len(run.open().steps()) == 30
    assert "no optimizer of torch.optim has stepped" in run.verdict()
    assert "nothing was trained" not in run.verdict()


def test_by_hand_after_an_optimizer(tmp_path, alone):
    model = net()
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(20))
        by_hand(model, batches(60), subtracted)
    assert len(run.open().steps()) >= 20 + 50
    assert not [f for f in run.findings if f.severity == "error"]
    assert len(rows(run.open(), site="0.weight", what="update")) > 70


def test_gradients_that_nothing_uses(tmp_path, alone):
    model = net()
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(30):
            F.cross_entropy(model(x.requires_grad_()), y).backward()
            torch.autograd.grad(model(x).sum(), x)
    assert len(run.open().steps()) >= 30 and not rows(run.open(), what="update")
    assert "no parameter of a model was seen to change" in run.verdict() and not run.findings


def test_gradients_that_are_asked_for_beside_an_optimizer_are_no_step(tmp_path):
    model = net()
    optimizer = sgd(model)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(12):
            loss = F.cross_entropy(model(x), y)
            penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, [*model.parameters()], create_graph=True))
            (loss + 0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.open().steps()["backwards"].to_pylist() == [1] * 12


def test_nothing_was_trained(tmp_path, alone):
    model = net()
    with watch(model, to=tmp_path / "run", every=1, rules=[]) as run, torch.no_grad():
        model(torch.zeros(1, 6))
    assert "nothing to check: nothing was trained" in run.verdict()


def test_weights_are_the_same_as_without_us(tmp_path, alone):
    one, other = net(), net()
    other.load_state_dict(one.state_dict())
    by_hand(one, batches(30), asked)
    with watch(other, to=tmp_path / "run", every=2):
        by_hand(other, batches(30), asked)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
