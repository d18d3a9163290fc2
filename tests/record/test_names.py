"""Which modules are models, and what they are called: by what the user calls them."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tenterhook import open_run
from tenterhook.record.watch import Options, Recording
from tests.record.small import batches, net, sgd


@pytest.fixture
def models(tmp_path):
    """The models that are found in a function, by name, each with its class."""

    def record(train):
        gc.collect()
        recording = Recording(tmp_path / "run", Options(every=1), None, ["x"])
        recording.recorder.install(discover=True)
        try:
            train()
        finally:
            recording.close("exit 0")
        run = open_run(tmp_path / "run")
        assert run.rank_info()["failed"] is None
        return {model["name"]: model["class"] for model in run.models}

    return record


def train(call, *modules, steps=3):
    optimizer = sgd(nn.ModuleList(modules))
    for x, _ in batches(steps):
        call(x).square().mean().backward()
        optimizer.step()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 3)

    def act(self, x):
        return self.body(x)

    forward = act


def test_the_outermost_variable_wins(models):
    def run():
        agent, target = Agent(), Agent()
        train(lambda x: agent.act(x) - target.act(x), agent)

    assert models(run) == {"agent": "Agent", "target": "Agent"}


class Trainer:
    def __init__(self):
        self.actor, self.critic = net(), net()

    def fit(self):
        train(lambda x: self.actor(x) + self.critic(x), self.actor, self.critic)


def test_attributes_of_an_object(models):
    assert models(lambda: Trainer().fit()) == {"actor": "Sequential", "critic": "Sequential"}


def test_a_model_that_nobody_named(models):
    assert models(lambda: Agent()(torch.zeros(1, 6)).sum().backward()) == {"Agent": "Agent"}


def test_a_model_by_the_name_of_its_wrapper(models):
    def run():
        wrapped = torch.optim.swa_utils.AveragedModel(net())
        train(wrapped, wrapped)

    assert models(run) == {"wrapped": "Sequential"}


class Hinge(nn.Module):
    def forward(self, x):
        return (1 - x).relu().mean()


class Miner(nn.Module):
    def forward(self, x):
        return x[x.norm(dim=1).argsort()]


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.fill_(x.detach().abs().max())
        return x


@pytest.mark.parametrize("made", [Hinge, Miner, Observer, nn.ReLU, lambda: nn.Sequential(Miner(), nn.ReLU())])
def test_what_has_no_parameters_is_no_model(models, made):
    def run():
        model, other = net(), made()
        train(lambda x: other(model(x)), model)

    assert models(run) == {"model": "Sequential"}


def test_a_parametrization_is_no_model(models):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 1))

        def forward(self, weight):
            return self.scale * weight

    def run():
        model = nn.Linear(6, 3)
        nn.utils.parametrize.register_parametrization(model, "weight", Scaled())
        other = parametrizations.orthogonal(nn.Linear(3, 3))
        train(lambda x: other(model(x)), model, other)

    assert [*models(run)] == ["model", "other"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min")
def test_an_observer_of_torch_is_no_model(models):
    quantization = pytest.importorskip("torch.ao.quantization")

    def run():
        model = nn.Sequential(nn.Linear(6, 3))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
        train(model, model)
        observer = quantization.MinMaxObserver()
        observer(torch.zeros(3))

    assert [*models(run)] == ["model"]


def test_a_metric_with_a_network_is_no_model(models):
    Metric = pytest.importorskip("torchmetrics").Metric

    class Distance(Metric):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)
            self.add_state("total", torch.zeros(()))

        def update(self, x):
            self.total += self.net(x).detach().sum()

        def compute(self):
            return self.total

    def run():
        model, metric = net(), Distance()
        train(lambda x: (metric.update(out := model(x)), out)[1], model)

    assert [*models(run)] == ["model"]


def test_layers_in_a_plain_list_are_parameters(models):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(6, 3)]

        def forward(self, x):
            return self.layers[0](x)

    def run():
        model = Listed()
        train(model, model.layers[0])

    assert [*models(run)] == ["model"]


def test_a_model_that_makes_its_layers_late(models):
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(6, 3)
            return self.layer(x)

    def run():
        model = Late()
        for x, _ in batches(3):
            model(x).sum().backward()

    assert "model" in models(run)


class Empty(nn.Module):
    """Its layer has a parameter, or it has a layer, from its first call on."""

    def __init__(self, inner, grows):
        super().__init__()
        self.inner, self.grows = inner, grows

    def forward(self, x):
        if not list(self.parameters()):
            self.grows(self.inner)
        return x * self.inner.weight


@pytest.mark.parametrize(
    "grows",
    [
        lambda inner: setattr(inner, "weight", nn.Parameter(torch.ones(6))),
        lambda inner: inner.register_parameter("weight", nn.Parameter(torch.ones(6))),
        lambda inner: (setattr(inner, "norm", nn.LayerNorm(6)), setattr(type(inner), "weight", inner.norm.weight)),
    ],
)
def test_what_gets_its_first_parameters_when_it_is_called_is_a_model(models, grows):
    class Inner(nn.Module):
        pass

    def run():
        guide = Empty(Inner(), grows)
        for x, _ in batches(3):
            guide(x).square().mean().backward()
            sgd(guide).step()

    assert models(run) == {"guide": "Empty"}
