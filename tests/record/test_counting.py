"""What counts as a step: optimizers that share parameters, and calls before the training."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.assemble import MOST_BEFORE
from tests.record.small import batches, net, rows, sgd, train


def test_optimizers_that_share_parameters_take_turns(tmp_path):
    model = nn.ModuleDict({"g": nn.Linear(2, 4), "d": nn.Linear(4, 1)})  # as InfoGAN's
    both = itertools.chain(model["g"].parameters(), model["d"].parameters())
    optimizers = [sgd(model["g"]), sgd(model["d"]), torch.optim.SGD(both, lr=0.01)]
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(50):
            for optimizer in optimizers:
                model.zero_grad()
                model["d"](model["g"](torch.randn(3, 2))).mean().backward()
                optimizer.step()
    table = run.open().steps().to_pydict()
    assert len(table["step"]) == 50
    assert {len(rates) for rates in table["rates"]} == {3}


@pytest.mark.parametrize("every", [1, 10])
def test_evaluation_before_the_optimizer_exists_is_no_step(tmp_path, every):
    model, data = net(), batches(30)
    nn.init.normal_(model[4].weight, std=30.0)
    with watch(model, to=tmp_path / "run", every=every) as run:
        with torch.no_grad():
            for x, _ in batches(61):
                model(x)
        losses = train(model, data)
    table = run.open().steps().to_pydict()
    assert table["step"] == list(range(30)) and table["loss"] == losses
    assert len(rows(run.open(), step=0, site="0", what="output")) == 1
    assert [(f.rule, f.step) for f in run.findings if f.rule == "wrong initial loss"] == [("wrong initial loss", 0)]


def test_evaluation_in_a_training_without_an_optimizer_is_no_step(tmp_path):
    model = net()
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(12):
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                model(x)
                model(x)
    assert len(run.open().steps()) == 12


def test_accumulation_after_an_evaluation_adds_up(tmp_path):
    model = net()
    with watch(model, to=tmp_path / "run", every=1) as run:
        with torch.no_grad():
            model(batches(1)[0][0])
        losses = train(model, batches(8), accumulate=4)
    assert run.open().steps()["loss"].to_pylist() == pytest.approx([sum(losses[:4]), sum(losses[4:])])


@pytest.mark.parametrize("many", [40, MOST_BEFORE + 40])
def test_a_program_that_trains_nothing_has_a_step_for_each_call(tmp_path, many):
    model = nn.Linear(2, 2)
    with watch(model, to=tmp_path / "run") as run, torch.no_grad():
        for _ in range(many):
            model(torch.zeros(1, 2))
    assert run.open().steps()["step"].to_pylist() == list(range(many))
