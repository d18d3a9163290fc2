"""What is recorded of activations, gradients and parameters, against what a twin training computes by itself."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import watch
from tenterhook.stats import native
from tests.conftest import ours
from tests.record.small import agrees, batches, net, rows, train


def test_every_number_is_that_of_a_twin(tmp_path):
    model, data = net(), batches(4)
    twin, seen = copy.deepcopy(model), []
    with watch(model, to=tmp_path / "run", every=1) as run:
        losses = train(model, data)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for x, y in data:
        values, gradients = [], []
        h = x
        for i, layer in enumerate(twin):
            h = F.relu(h) if i == 1 else layer(h)  # not in place, so that each value stays
            h.retain_grad()
            values.append(h)
        F.cross_entropy(h, y).backward()
        gradients = [value.grad for value in values]
        before = [p.detach().clone() for p in twin.parameters()]
        grads = [p.grad.clone() for p in twin.parameters()]
        optimizer.step()
        after = [p.detach().clone() for p in twin.parameters()]
        optimizer.zero_grad()
        seen.append((x, values, gradients, before, grads, after))
    found = run.open()
    assert found.steps().column("loss").to_pylist() == losses
    names = [name for name, _ in twin.named_parameters()]
    for step, (x, values, gradients, before, grads, after) in enumerate(seen):
        (given,) = rows(found, step=step, what="input")
        agrees(given, x)
        for i in range(5):
            (row,) = rows(found, step=step, site=str(i), what="output")
            agrees(row, values[i])
            (row,) = rows(found, step=step, site=str(i), what="output_grad")
            agrees(row, gradients[i])
        for name, old, grad, new in zip(names, before, grads, after, strict=True):
            agrees(rows(found, step=step, site=name, what="parameter")[0], old)
            agrees(rows(found, step=step, site=name, what="parameter_grad")[0], grad)
            agrees(rows(found, step=step, site=name, what="update")[0], new - old)
    assert ours(model) == []


@pytest.mark.parametrize("every", [1, 3])
def test_training_is_bit_identical(tmp_path, every):
    model, data = net(), batches(30)
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    plain = train(twin, data)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with watch(model, to=tmp_path / "run", every=every):
        watched = train(model, data)
    assert watched == plain
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_counts_once(tmp_path, reentrant):
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 3)

        def forward(self, x):
            return self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))

    model = Model()
    twin = copy.deepcopy(model)
    data = batches(3)
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, data)
    found = run.open()
    for site in ("inner.0", "inner.1", "last"):
        for what in ("output", "output_grad"):
            got = rows(found, step=0, site=site, what=what)
            assert len(got) == 1 and got[0]["calls"] == 1, (site, what)
    value = twin.inner(twin.first(data[0][0]))
    value.retain_grad()
    F.cross_entropy(twin.last(value), data[0][1]).backward()
    agrees(rows(found, step=0, site="inner.1", what="output")[0], value)
    agrees(rows(found, step=0, site="inner.1", what="output_grad")[0], value.grad)


@pytest.mark.parametrize("idle", [False, True])
def test_what_was_not_measured_is_counted_and_said(idle, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "idle_core", lambda: idle)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, ids):
            h = self.embed(ids)
            h += 1
            return self.linear(h.mean(1))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(3):
            model(torch.randint(0, 10, (4, 5))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.open().rank_info()["unmeasured"] == 3  # each sparse gradient
    assert "3 values were not measured" in run.verdict()


def test_only_what_was_asked_for(tmp_path):
    model = net()
    with watch(model, to=tmp_path / "run", every=1, sites=["0", "4.weight"], what=["output", "update"]) as run:
        train(model, batches(2))
    found = {(row["site"], row["what"]) for row in run.open().stats().to_pylist()}
    assert found == {("0", "output"), ("0.weight", "update"), ("0.bias", "update"), ("4.weight", "update")}


def test_a_value_seen_at_two_places_is_measured_once_and_recorded_twice(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 3), nn.Identity()))
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(1))
    found = run.open()
    for what in ("output", "output_grad"):
        values = [rows(found, site=site, what=what)[0] for site in ("1.0", "1.1", "1", ".")]
        for value in values[1:]:
            assert {**value, "site": ""} == {**values[0], "site": ""}


def test_a_selective_checkpoint_does_not_see_what_we_do(tmp_path):
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    linear, tanh = nn.Linear(6, 6), nn.Tanh()
    model = nn.Sequential(linear, tanh)
    twin = copy.deepcopy(model)
    saved = [torch.ops.aten.sub.Tensor, torch.ops.aten.abs.default, torch.ops.aten.mean.default]

    def step(net, x):
        def body(x):
            return (net(x) - 0.5).abs() ** 2

        contexts = partial(create_selective_checkpoint_contexts, saved)
        checkpoint(body, x, use_reentrant=False, context_fn=contexts).mean().backward()

    x = torch.randn(5, 6)
    with watch(model, to=tmp_path / "run", every=1) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step(model, x)
        optimizer.step()
    step(twin, x)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert run.open().rank_info()["failed"] is None


def test_a_structure_that_refers_to_itself(tmp_path):
    from dataclasses import dataclass, field

    @dataclass
    class Node:
        value: torch.Tensor
        children: list = field(default_factory=list)
        parent: object = None

    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, node):
            return self.linear(node.value) + sum(self.linear(child.value) for child in node.children)

    root = Node(torch.randn(2, 4))
    root.children = [Node(torch.randn(2, 4), parent=root) for _ in range(4)]
    model = Tree()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(3):
            model(root).sum().backward()
            optimizer.step()
    assert len(rows(run.open(), step=0, what="input")) == 5


def test_an_output_can_be_saved(tmp_path):
    model = net()
    with watch(model, to=tmp_path / "run", every=1):
        output = model(torch.randn(2, 6))
        torch.save(output, tmp_path / "output.pt")  # a warning would be an error here
        output.sum().backward()
    assert torch.equal(torch.load(tmp_path / "output.pt"), output)


def test_parameters_can_be_swapped(tmp_path):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = net()
        with watch(model, to=tmp_path / "run", every=1):
            train(model, batches(2))
            model.double()
            train(model, [(x.double(), y) for x, y in batches(2)])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.dtype == torch.float64


def test_calls_without_a_backward_do_not_pile_up_graphs(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    with watch(model, to=tmp_path / "run", every=1):
        for _ in range(5):
            big = torch.randn(1000, 4, requires_grad=True)
            made.append(weakref_to_graph(model(big * 2)))
        assert all(reference() is None for reference in made[:-1])
        optimizer.step()


def weakref_to_graph(value):
    import weakref

    class Mark:
        pass

    mark = Mark()
    value.grad_fn.metadata["mark"] = mark  # lives as long as the graph does
    return weakref.ref(mark)


@pytest.mark.parametrize("size", [16, 1_000_000])
def test_a_step_that_exchanges_a_parameter_has_no_update_of_it(size, tmp_path):
    class Growing(torch.optim.Optimizer):
        steps = 0

        def step(self, closure=None):
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.1 * parameter.grad
            self.steps += 1
            if self.steps == 3:
                model.extra.data, model.extra.grad = torch.zeros(size), None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.extra, self.linear = nn.Parameter(torch.randn(8)), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).sum() + self.extra.sum()

    model = Model()
    optimizer = Growing(model.parameters(), {"lr": 0.1})
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).backward()
            optimizer.step()
    updates = {row["step"]: row for row in rows(run.open(), site="extra", what="update")}
    assert sorted(updates) == [0, 1, 3, 4, 5]
    assert updates[3]["count"] == size and updates[3]["max"] == updates[3]["min"] == pytest.approx(-0.1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_into_is_measured_again(mode, tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
    with watch(model, to=tmp_path / "run", every=1) as run, mode():
        for _ in range(5):
            model(torch.randn(8, 4))
    outputs = rows(run.open(), what="output", step=2)
    lowest = {row["site"]: row["min"] for row in outputs}
    assert lowest["0"] < 0 == lowest["1"] == lowest["."]
