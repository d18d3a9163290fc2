"""What is said of numbers: only what was measured, and none that is absurd."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.overhead import Overhead
from tenterhook.record.step import Step
from tenterhook.say import counted
from tests.record.small import batches, net, train


@pytest.fixture
def said(tmp_path):
    """The verdict on a small run of which rank.json says something else."""

    def verdict(models=None, budget=None, **facts):
        with watch(net(), to=tmp_path / "run", every=1, rules=[], budget=budget) as run:
            pass
        file = tmp_path / "run" / "rank-0" / "rank.json"
        known = json.loads(file.read_text())
        known["models"][0].update(models or {})
        file.write_text(json.dumps(known | facts))
        return " ".join(run.verdict().replace("│", "").split())

    return verdict


pytestmark = pytest.mark.filterwarnings("ignore:watch recorded nothing")


def overhead_of(seconds, spent):
    overhead = Overhead(2)
    for number in range(6):
        overhead.add(Step(number, seconds=seconds, spent=spent))
    return overhead.shares()


def test_the_overhead_is_told_once_in_seconds_and_per_cent(said):
    shares = overhead_of(1.0, 0.2)
    assert shares["overhead"] == pytest.approx(0.25) and shares["overhead_seconds"] == pytest.approx(1.0)
    text = said(**shares)
    assert "watching took 1 s: 25% of the training's time, 25% after step 20" in text
    assert text.count("watching took") == 1 and "budget" not in text


@pytest.mark.parametrize(("spent", "told"), [(0.2, True), (0.02, False)])
def test_more_than_the_budget_is_explained(said, spent, told):
    text = said(budget=0.03, **overhead_of(1.0, spent))
    assert ("the 3% budget can only leave out samples, and each step costs something without one, too" in text) is told


@pytest.mark.parametrize("spent", [0.95, 1.0, 1.5])
def test_a_share_of_hardly_any_time_is_not_told(said, spent):
    shares = overhead_of(1.0, spent)
    assert shares["overhead"] is None and shares["overhead_seconds"] == pytest.approx(5 * spent)
    text = said(**shares)
    assert "most of the time of such short steps" in text and "%" not in text


def test_one_is_no_plural(said):
    assert (counted(1, "step"), counted(0, "step"), counted(1200, "step")) == ("1 step", "0 steps", "1,200 steps")
    text = said(passed_over=1, unmeasured=1, steps=1)
    assert "1 sample left out" in text and "1 value was not" in text and "1 step," in text


@pytest.mark.parametrize(("number", "text"), [(0, "(Sequential)"), (1, ", 1 parameter)"), (1234, ", 1.23 k par")])
def test_a_model_without_parameters(said, number, text):
    assert text in said(models={"parameters": number})


class NoOutputs(nn.Module):
    """The layers are not modules that are called, as under torch.compile."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = F.linear(x, layer.weight, layer.bias)
        return x


def test_gradients_that_were_sampled_without_outputs(tmp_path):
    model = NoOutputs()
    with watch(model, to=tmp_path / "run", every=1, what=("parameter", "parameter_grad", "update")) as run:
        train(model, [(x, y % 2) for x, y in batches(12)])
    states = {state.rule: state for state in run._recording.judge.states()}
    for rule in ("exploding gradients", "vanishing gradients"):
        assert "the order of the layers is not known" in states[rule].why
    assert "no gradients of weights were sampled" not in run.verdict()


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


KINDS = ("input", "output", "output_grad", "parameter", "parameter_grad", "update")


@pytest.mark.parametrize(("what", "claims"), [(KINDS, True), (KINDS[2:], False)])
def test_a_gradient_that_is_not_finite_says_what_was_measured(tmp_path, what, claims):
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), Root())
    with watch(model, to=tmp_path / "run", every=1, what=what) as run:
        model(batches(1)[0][0]).sum().backward()
    (found,) = [f for f in run.findings if f.rule == "non-finite values"]
    assert found.place.what == "output_grad"
    assert found.then.startswith("what the modules gave was finite") == claims


class Inside(nn.Module):
    """What the second layer is given is infinite, and no module gave it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x) / 0)


def test_nothing_is_said_of_the_inputs_of_a_module(tmp_path):
    model = Inside()
    with watch(model, to=tmp_path / "run", every=1) as run, torch.enable_grad():
        model(batches(1)[0][0]).sum().backward()
    (found,) = [f for f in run.findings if f.rule == "non-finite values"]
    assert found.place.site == "." and "inputs were finite" not in found.text + found.why + found.then
    assert "div" in found.text and "division by zero" in found.text
