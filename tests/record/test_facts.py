"""Parameters that nothing trains, wherever they are, and findings that later steps refute."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import Finding, open_run, watch
from tenterhook.record.judge import Judge
from tenterhook.record.step import Step
from tenterhook.record.watch import Options, Recording
from tenterhook.report.verdict import Verdict
from tests.record.small import batches, sgd, train

RULE = "parameter never trained"


@pytest.fixture
def seen(tmp_path):
    """Record a function as `tenterhook run` would: the run, and what is found of parameters."""

    def record(function, every=1):
        recording = Recording(tmp_path / "run", Options(every=every), None, ["x"])
        recording.recorder.install(discover=True)
        try:
            function()
        finally:
            recording.close("exit 0")
        run = open_run(tmp_path / "run")
        assert run.rank_info()["failed"] is None
        return run, [row for row in run.findings().to_pylist() if row["rule"] == RULE]

    return record


def encoder_apart():
    encoder, head = nn.Linear(6, 8), nn.Linear(8, 3)
    optimizer = sgd(head)
    for x, y in batches(60):
        optimizer.zero_grad()
        F.cross_entropy(head(encoder(x).relu()), y).backward()
        optimizer.step()


def step_forgotten():
    body, head = nn.Linear(6, 8), nn.Linear(8, 3)
    optimizers = [sgd(body), sgd(head)]
    for x, y in batches(60):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(head(body(x).relu()), y).backward()
        optimizers[1].step()


def optimizer_of_an_older_model():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = sgd(net)
    net = copy.deepcopy(net)
    for x, y in batches(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


FAULTS = [
    (encoder_apart, "encoder", "weight", "not in any optimizer: weight, bias (56 values)"),
    (step_forgotten, "body", "weight", "its optimizer never steps: weight, bias (56 values)"),
    (optimizer_of_an_older_model, "net", "0.weight", "not in any optimizer"),
]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("function", "model", "site", "text"), FAULTS)
def test_what_no_optimizer_trains_is_found(function, model, site, text, every, seen):
    gc.freeze()  # the optimizers of other tests
    _, (found,) = seen(function, every)
    gc.unfreeze()
    assert (found["severity"], found["model"], found["site"]) == ("warn", model, site)
    assert found["text"].startswith(text) and found["until"] is None


def test_features_of_another_model_in_a_loss_are_noted(seen):
    def function():
        net, features = nn.Linear(6, 6), nn.Linear(6, 8).eval()
        optimizer = sgd(net)
        for x, _ in batches(30):
            optimizer.zero_grad()
            F.mse_loss(features(net(x)), features(x).detach()).backward()
            optimizer.step()

    _, (found,) = seen(function)
    assert (found["severity"], found["model"]) == ("note", "features")


def test_a_head_that_was_exchanged_after_the_optimizer_was_made(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(20))
        optimizer = sgd(model)
        model[2] = nn.Linear(8, 3)
        train(model, batches(20), optimizer=optimizer)
    (found,) = [f for f in run.findings if f.rule == RULE]
    assert found.text == "not in any optimizer: 2.weight, 2.bias (27 values)" and found.severity == "warn"


def test_everything_is_frozen(tmp_path):
    model = nn.Linear(6, 3).requires_grad_(False)
    optimizer = sgd(model)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(20):
            F.cross_entropy(model(x), y).requires_grad_().backward()
            optimizer.step()
    (found,) = [f for f in run.findings if f.rule == "nothing is trained"]
    assert (found.severity, found.text) == ("error", "no parameter of the optimizer requires a gradient")


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.online(x), self.target(x).detach()


@pytest.mark.parametrize("copied", ["load_state_dict", "data", "lerp_"])
@pytest.mark.parametrize(("after", "until"), [(4, None), (25, 24)])
def test_a_target_network_is_copied_into(tmp_path, copied, after, until):
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    with watch(agent, to=tmp_path / "run", every=1) as run:
        for k, (x, _) in enumerate(batches(40)):
            online, target = agent(x)
            optimizer.zero_grad()
            F.mse_loss(online, target + 1).backward()
            optimizer.step()
            if k < after or k % 4:
                continue
            if copied == "load_state_dict":
                agent.target.load_state_dict(agent.online.state_dict())
            for slow, fast in zip(agent.target.parameters(), agent.online.parameters(), strict=True):
                if copied == "data":
                    slow.data.copy_(fast.data)
                elif copied == "lerp_":
                    with torch.no_grad():
                        slow.lerp_(fast, 0.005)
    found = [f for f in run.findings if f.rule == RULE]
    if after == 4:
        assert not found
    else:
        (one,) = found
        assert (one.severity, one.step, one.until) == ("note", 11, 28) and "initial values" not in one.why


def test_layers_that_are_trained_one_after_the_other(tmp_path):
    model = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k, layer in enumerate(model):
            optimizer = sgd(layer)
            for x, _ in batches(30):
                for before in model[:k]:
                    x = before(x).detach()
                optimizer.zero_grad()
                layer(x).square().mean().backward()
                optimizer.step()
    found = [f for f in run.findings if f.rule == RULE]
    assert [(f.severity, f.step, f.until) for f in found] == [("note", 11, 29), ("note", 30, 59)]
    assert [f.text.split(" (")[0] for f in found] == [
        "never got a gradient: 1.weight, 1.bias, 2.weight, 2.bias",
        "never got a gradient: 2.weight, 2.bias",
    ]
    rows = run.open().findings().to_pylist()
    assert [(row["step"], row["until"]) for row in rows if row["rule"] == RULE] == [(11, 29), (30, 59)]
    assert "steps 11–29" in run.verdict() and "keeps its initial values" not in run.verdict()


class Cold:
    name = "cold"

    def look(self, step):
        if step.number == 3:
            yield Finding(self.name, "warn", 3, "cold")
        if step.number == 7:
            yield Finding(self.name, "note", 3, "cold", until=6)


def test_a_finding_that_is_refuted_takes_the_place_of_the_first_one():
    judge = Judge([Cold()])
    for number in range(9):
        judge.look(Step(number))
    assert [(one.severity, one.until) for one in judge.findings] == [("note", 6)]
    assert judge.states()[0].state == "found"


@pytest.mark.parametrize(("until", "said"), [(None, "since step 3"), (3, "step 3 "), (29, "steps 3–29")])
def test_the_box_says_when_it_ended(until, said):
    row = {"rule": "r", "severity": "note", "step": 3, "until": until, "text": "t", "why": "", "then": ""}
    box = Verdict("x", findings=[{**row, "model": "m", "site": "s", "what": None}]).box()
    assert said in box
