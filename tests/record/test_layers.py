"""The order of layers, from the graph of the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook.record.sources.layers import LayerOrder
from tests.record.test_loss_rules import record
from tests.record.trainings import mlp, step

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")


class Agent(nn.Module):
    """Policy and values, with a trunk of their own or with one for both; registered in another order than called."""

    def __init__(self, shares=False, gain=1.0, depth=5):
        super().__init__()
        self.values = nn.Linear(32, 1) if shares else mlp(4, *[32] * depth, 1)
        self.head = nn.Linear(32, 2)
        self.trunk = mlp(4, *[32] * depth)
        self.shares = shares
        with torch.no_grad():
            self.head.weight.mul_(gain)
            self.head.bias.zero_()

    def forward(self, x):
        hidden = self.trunk(x).relu()
        return self.head(hidden), self.values(hidden if self.shares else x)


def chains_of(model, *inputs):
    order = LayerOrder()
    for site, module in model.named_modules():
        module.register_forward_hook(lambda m, _, out, site=site: order.note(("model", site), m, out))
    out = model(*inputs)
    loss = sum(one.sum() for one in (out if isinstance(out, tuple) else (out,)))
    return {tuple(site for _, site in chain) for chain in order.chains(loss)}


def test_branches_are_apart():
    found = chains_of(Agent(depth=2), torch.randn(3, 4))
    assert found == {("trunk.0", "trunk.2", "head"), ("values.0", "values.2", "values.4")}


def test_a_trunk_belongs_to_each_output():
    found = chains_of(Agent(shares=True, depth=2), torch.randn(3, 4))
    assert found == {("trunk.0", "trunk.2", "head"), ("trunk.0", "trunk.2", "values")}


def test_what_leads_to_an_output_side_by_side():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.short, self.long, self.first = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            x = self.first(x)
            return self.last(self.long(x).relu() + self.short(x))

    (found,) = chains_of(Residual(), torch.randn(3, 4))
    assert (found[0], {*found[1:3]}, found[3]) == ("first", {"long", "short"}, "last")


def test_a_layer_that_is_called_again_has_its_first_place():
    (found,) = chains_of(nn.Sequential(shared := nn.Linear(4, 4), nn.Linear(4, 4), shared), torch.randn(3, 4))
    assert found == ("0", "1")


def training(agent, scale=1.0):
    optimizer = torch.optim.SGD(agent.parameters(), lr=1e-3)

    def train():
        for _ in range(12):
            policy, values = agent(torch.randn(16, 4))
            loss = -policy.log_softmax(1)[:, 0].mean()
            step(optimizer, loss + scale * F.mse_loss(values, torch.randn(16, 1)))

    return agent, train


DEPTH = {"activation variance drifts with depth", "vanishing gradients", "exploding gradients"}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("gain", "scale"), [(1e-3, 1.0), (1.0, 1e4)])
def test_neither_a_small_output_nor_another_branch_is_a_hidden_layer(shares, gain, scale):
    findings = record(lambda: training(Agent(shares, gain), scale)).findings
    assert not [one for one in findings if one.rule in DEPTH and one.step < 5]


def test_a_branch_in_which_gradients_vanish_is_found():
    agent = Agent()
    agent.values = mlp(4, *[32] * 8, 1, act=nn.Sigmoid)
    with torch.no_grad():
        for one in agent.values:
            if isinstance(one, nn.Linear):
                one.weight.mul_(0.3)
    found = [one for one in record(lambda: training(agent)).findings if one.rule == "vanishing gradients"]
    assert [one.place.site.partition(".")[0] for one in found] == ["values"]


def test_where_the_order_is_not_known_that_is_said():
    layers = [nn.Parameter(torch.randn(8, 8) * 0.1) for _ in range(5)]

    class ByFunctions(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in layers)

        def forward(self, x):
            for part in self.parts:
                x = F.linear(x, part.weight).relu()
            return x

    model = ByFunctions()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = record(lambda: (model, lambda: [step(optimizer, model(torch.randn(4, 8)).mean()) for _ in range(12)]))
    states = {state.rule: state for state in run._recording.judge.states()}
    assert states["vanishing gradients"].state == "not checked"
    assert "order of the layers is not known" in states["vanishing gradients"].why
