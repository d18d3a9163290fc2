"""A bad step is run again: the birth is found, and everything is as it was."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import find_first
from tenterhook.birth.loss_code import loss_code
from tenterhook.birth.replay import Backward, RootCall, replay
from tenterhook.birth.trace import CannotRunAgain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x):
        return self.body(x)


class Watched:
    """Notes the calls of a model, and where backward() is called, as a recording does."""

    def __init__(self, model):
        self.model, self.calls, self.told = model, [], None
        model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, model, args, kwargs):
        if self.told is None:
            self.calls.append(RootCall.now(model, args, kwargs, sys._getframe(1)))

    def bad(self, line):
        self.told = replay(self.calls, Backward([(sys._getframe(1), line)], ()), [("", self.model)])
        return self.told


def here():
    return sys._getframe(1).f_lineno


def own_loss(scores, y):
    p = (scores * 1e4).softmax(-1)
    return -p.gather(1, y[:, None]).log().mean()


def test_a_loss_behind_the_model():
    model, x, y = Net(), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    watched = Watched(model)
    printed = []
    out = model(x)
    scores = out * 1.0
    printed.append(scores.sum().item())
    loss = own_loss(scores, y)
    line = here() + 1
    loss.backward()
    birth = watched.bad(line).birth
    assert birth.operation == "log" and "log()" in birth.line.text and len(printed) == 1


def test_a_gradient_behind_the_model():
    model, x = Net(), torch.randn(6, 4)
    watched = Watched(model)
    distance = (model(x) * 0).pow(2).sum(-1).sqrt()
    line = here() + 1
    distance.mean().backward()
    birth = watched.bad(line).birth
    assert birth.operation == "sqrt" and birth.backward and birth.line.text.startswith("distance =")


def test_everything_is_as_it_was():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 4)
    watched = Watched(model)
    loss = model(x).sum().mul(0).log()
    line = here() + 1
    loss.backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    assert watched.bad(line).birth.operation == "log"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert not any(m._forward_hooks for m in model.modules()) and len(model._forward_pre_hooks) == 1


def test_dropout_draws_the_same_numbers():
    torch.manual_seed(0)
    model, x = nn.Dropout(0.5), torch.ones(64, requires_grad=True)
    watched = Watched(model)
    out = model(x)
    line = here() + 2
    loss = out.log().sum()
    loss.backward()
    seen = watched.bad(line).birth
    assert f"{int((out == 0).sum())} of 64 values" in seen.why


def in_another_function(model, x):
    return model(x)


def test_the_model_is_called_in_another_function():
    model, x = Net(), torch.randn(6, 4)
    watched = Watched(model)
    for _ in range(1):
        out = in_another_function(model, x)
        line = here() + 1
        torch.log(out - out).sum().backward()
    assert watched.bad(line).birth.operation == "log"


class Batches:
    def __init__(self):
        self.taken = 0

    def next(self):
        self.taken += 1
        return torch.randn(6, 4)


def test_code_that_does_more_is_not_run_again():
    model, batches = Net(), Batches()
    watched = Watched(model)
    out = model(batches.next())
    loss = (out * 0).log().sum()
    line = here() + 1
    loss.backward()
    told = watched.bad(line)
    assert batches.taken == 1
    assert told.birth is None and "batches.next" in told.note


@pytest.mark.parametrize(
    "code",
    [
        "out = model(x)\nloss = out.log() + x.mul_(2).sum()",
        "out = model(x)\nif out.sum() > 0:\n    x[0] = 1\n    loss = out.sum()",
        "out = model(x)\ntotal += out.sum()\nloss = total",
        "out = model(x)\nloss = out.sum() + next(numbers)",
        "out = model(x)\nloss = out.sum() + open('f').read()",
        "out = model(x)\nloss = out.sum() + keep(out)",
    ],
)
def test_what_writes_or_calls_strangers_is_refused(code, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(f"{code}\nloss.sum().backward()\n")
    lines = len(code.splitlines()) + 1
    kept = []
    frame = _frame_of(
        file, {"model": nn.Linear(4, 4), "x": torch.ones(4), "total": 0.0, "numbers": iter([1.0]), "keep": kept.append}
    )
    with pytest.raises(CannotRunAgain):
        loss_code(frame, 1, lines)


def _frame_of(file, variables):
    found = []
    space = {**variables, "_found": found, "_sys": sys}
    exec(compile("_found.append(_sys._getframe())", str(file), "exec"), space)
    return found[0]


def test_a_loss_in_a_with_and_an_if(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        "with torch.autocast('cpu', torch.bfloat16):\n    out = model(x)\n"
        "    if out.dim() > 1:\n        loss = F.mse_loss(out, x)\n"
        "    else:\n        loss = out.sum()\nloss.backward()\n"
    )
    x = torch.randn(3, 4)
    frame = _frame_of(file, {"model": nn.Linear(4, 4), "x": x, "torch": torch, "F": F})
    with torch.autocast("cpu", torch.bfloat16):
        truth = F.mse_loss(frame.f_locals["model"](x), x)
    assert torch.equal(loss_code(frame, 2, 7)(), truth)


def test_a_replay_that_raises_is_told():
    model, x = Net(), torch.randn(6, 4)
    watched = Watched(model)
    out = model(x)
    line = here() + 1
    out.sum().backward()
    model.body[0].weight = nn.Parameter(torch.zeros(1, 1, 1))
    told = watched.bad(line)
    assert told.birth is None and "could not be run again" in told.note


def test_inputs_that_were_written_into_are_told():
    model, x = Net(), torch.randn(6, 4)
    watched = Watched(model)
    model(x).sum().backward()
    x.zero_()
    told = replay(watched.calls, None, [("", model)])
    assert told.birth is None and "written into" in told.note


def test_a_layer_in_a_sequential_goes_by_its_own_name():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3)))
    birth = find_first(model, torch.rand(2, 4), lambda v: v.shape == (2, 3))
    assert birth.operation == "addmm" and birth.address == "1.1" and "why" not in str(birth)


@pytest.mark.parametrize(
    "code",
    [
        "out = model(x)\nloss = out.sum() * 2\nseen.append(1); loss.backward(); seen.append(2)\n",
        "out = model(x); loss = out.sum() * 2; loss.backward()\n",
        "for _ in range(1):\n    out = model(x)\n    loss = out.sum() * 2\n    seen.append(1); loss.backward()\n",
    ],
)
def test_several_statements_on_a_line(code, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(code)
    model, x, seen = nn.Linear(4, 4), torch.randn(3, 4), []
    frame = _frame_of(file, {"model": model, "x": x, "seen": seen, "range": range})
    lines = code.splitlines()
    first = next(i for i, line in enumerate(lines, start=1) if "model(x)" in line)
    assert torch.equal(loss_code(frame, first, len(lines))(), model(x).sum() * 2)
    assert seen == []
