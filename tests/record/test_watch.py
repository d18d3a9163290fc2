"""watch: the recorded numbers against those that a twin training computes by itself, with hooks written by hand."""

import contextlib
import copy
import gc
import inspect
import math
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import open_run, watch
from tenterhook.record.sources import fused
from tenterhook.record.sources.units import axis_of_units
from tenterhook.record.watch import Options, Recording
from tenterhook.stats import native
from tests.conftest import ours


@pytest.fixture(autouse=True)
def nothing_is_left_of_others():
    """An optimizer of another test that waits for the garbage collector would be watched, too."""
    gc.collect()


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(many, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(many)
    ]


def train(model, data, *, accumulate=1, optimizer=None, each=lambda k: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for k, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        losses.append(loss.item())
        if (k + 1) % accumulate == 0:
            each(k)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def rows(run, **wanted):
    """The recorded rows with these values, as dicts."""
    return [row for row in run.stats().to_pylist() if all(row[key] == value for key, value in wanted.items())]


def agrees(row, tensor):
    values = torch.as_tensor(tensor).detach().double().numpy().ravel()
    assert row["count"] == values.size
    assert row["zeros"] == (values == 0).sum()
    assert row["min"] == pytest.approx(values.min(), rel=1e-6)
    assert row["max"] == pytest.approx(values.max(), rel=1e-6)
    assert row["mean"] == pytest.approx(values.mean(), rel=1e-5, abs=1e-6 * np.abs(values).max())
    assert row["rms"] == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)
    assert row["std"] == pytest.approx(values.std(), rel=1e-4, abs=1e-7)
    assert sum(row["counts"]) == row["sampled"]


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


def test_micro_batches_add_up_to_a_step(tmp_path):
    model, data = net(), batches(6)
    grads = []
    with watch(model, to=tmp_path / "run", every=1) as run:
        losses = train(model, data, accumulate=3, each=lambda k: grads.append(model[0].weight.grad.clone()))
    found = run.open()
    steps = found.steps().to_pylist()
    assert [row["backwards"] for row in steps] == [3, 3]
    assert [row["loss"] for row in steps] == pytest.approx([sum(losses[:3]), sum(losses[3:])])
    (row,) = rows(found, step=1, site="2", what="output")
    assert row["calls"] == 3 and row["count"] == 3 * 8 * 16
    agrees(rows(found, step=1, site="0.weight", what="parameter_grad")[0], grads[1])


def test_two_optimizers_in_turn_are_one_step(tmp_path):
    model = nn.ModuleDict({"g": nn.Linear(2, 4), "d": nn.Linear(4, 1)})
    first = torch.optim.SGD(model["g"].parameters(), lr=0.1)
    second = torch.optim.SGD(model["d"].parameters(), lr=0.2)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(5):
            fake = model["g"](torch.randn(3, 2))
            model["d"](fake.detach()).mean().backward()
            second.step()
            second.zero_grad()
            model["d"](fake).mean().neg().backward()
            first.step()
            first.zero_grad()
    found = run.open()
    steps = found.steps().to_pylist()
    assert len(steps) == 5
    assert [row["rates"] for row in steps] == [[0.2, 0.1]] * 5
    assert len(rows(found, site="g.weight", what="parameter_grad")) == 5
    assert len(rows(found, site="d.weight", what="update")) == 5


def test_an_optimizer_that_steps_late_is_known_to_have_its_parameters(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    late = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for step, (x, y) in enumerate(batches(30)):
            F.cross_entropy(model(x), y).backward()
            first.step()
            if step > 20:
                late.step()
            model.zero_grad()
    assert not [f for f in run.findings if f.rule == "parameter never trained"]


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


def test_gradients_under_a_scaler_are_the_true_ones(tmp_path):
    model, data = net(), batches(6)
    twin = copy.deepcopy(model)
    true = []
    train(twin, data, each=lambda k: true.append([p.grad.clone() for p in twin.parameters()]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = run.open()
    assert [row["scale"] for row in found.steps().to_pylist()] == [1024.0] * 6
    for step in range(6):
        agrees(rows(found, step=step, site="0.weight", what="parameter_grad")[0], true[step][0])
    x, y = data[0]
    value = net()
    value.load_state_dict({k: v for k, v in copy.deepcopy(model).state_dict().items()})
    first = rows(found, step=0, site="4", what="output_grad")[0]
    assert first["absmax"] < 1 / 8  # not times 1024: each entry of this gradient is at most 1 / 8
    assert found.steps().column("loss").to_pylist()[0] < 10


class OwnScaler(torch.amp.GradScaler):
    """As that for FSDP has it."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


def test_scalers_one_after_the_other(tmp_path):
    model, losses = net(), []
    before = torch.amp.GradScaler.scale, OwnScaler.scale, torch.jit._recursive.create_script_module
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0), OwnScaler("cpu", init_scale=16.0)]
    with watch(model, to=tmp_path / "run", every=1) as run:
        for scaler in (*scalers, None, scalers[0]):
            optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2:])]
            for x, y in batches(3):  # both step after one backward pass
                loss = F.cross_entropy(model(x), y)
                (scaler.scale(loss) if scaler else loss).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer) if scaler else optimizer.step()
                scaler and scaler.update()
                model.zero_grad()
                losses.append(loss.item())
    steps = run.open().steps().to_pylist()
    assert [row["loss"] for row in steps if row["loss"] is not None] == pytest.approx(losses)
    assert [row["scale"] for row in steps if row["loss"] is not None] == 3 * [64] + 3 * [16] + 3 * [None] + 3 * [64]
    assert before == (torch.amp.GradScaler.scale, OwnScaler.scale, torch.jit._recursive.create_script_module)


def two_nets():
    model = nn.ModuleList([net(), net()])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return model, optimizers, scaler


def test_two_losses_that_are_scaled_before_the_first_step(tmp_path):
    model, optimizers, scaler = two_nets()
    losses = []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(4):
            both = [F.cross_entropy(one(x), y) for one in model]
            for loss, optimizer in zip([scaler.scale(loss) for loss in both], optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                scaler.step(optimizer)
            scaler.update()
            losses.append(sum(both).item())
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(losses)


def nested(a, b):
    scaled = torch.amp.GradScaler("cpu", init_scale=32.0).scale([a, (b,)])  # the scaler itself is gone then
    return scaled[0] / 4 * 4 + scaled[1][0]


@pytest.mark.parametrize(
    "groups",
    [  # of the losses of two models and two scalers: what each optimizer steps by
        lambda a, b, s, t: [[s.scale(a)], [b]],
        lambda a, b, s, t: [[b], [s.scale(a)]],
        lambda a, b, s, t: [[s.scale(a)], [t.scale(b)]],
        lambda a, b, s, t: [[s.scale(a), b]],
        lambda a, b, s, t: [[b, s.scale(a), t.scale(a) * 0]],
        lambda a, b, s, t: [[t.scale(outputs=b), s.scale(a)]],
        lambda a, b, s, t: [[torch.stack([*s.scale({0: a, 1: b}.values())]).view(1, 2).sum()]],
        lambda a, b, s, t: [[nested(a, b)]],
    ],
)
def test_what_is_scaled_is_divided_and_nothing_else(tmp_path, groups):
    model, losses = nn.ModuleList([net(), net()]), []
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-4) for one in model]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (64.0, 8.0)]
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(4):
            a, b = (F.cross_entropy(one(x), y) for one in model)
            losses.append((a + b).item())
            for group, optimizer in zip(groups(a, b, *scalers), optimizers, strict=False):
                for loss in group:
                    loss.backward(retain_graph=True)
                optimizer.step()
                model.zero_grad()
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(losses)


def test_gradients_of_a_loss_that_is_not_scaled_after_one_that_is(tmp_path):
    model, optimizers, scaler = two_nets()
    true = []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(4):
            model.zero_grad()
            scaler.scale(F.cross_entropy(model[0](x), y)).backward()
            scaler.step(optimizers[0])
            scaler.update()
            loss = F.cross_entropy(logits := model[1](x), y)
            true.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
            loss.backward()
            optimizers[1].step()
    for step in range(4):
        agrees(rows(run.open(), step=step, site="1.4", what="output_grad")[0], true[step])


def test_what_we_wrap_may_be_called_by_keywords(tmp_path):
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(3):
            loss = F.cross_entropy(model(x), y)
            torch.amp.GradScaler.scale(self=scaler, outputs=loss).backward()
            optimizer.step()
            losses.append(loss.item())
        script = torch.jit._recursive.create_script_module(
            nn_module=model, stubs_fn=torch.jit._recursive.infer_methods_to_compile
        )
        assert torch.equal(script(x), model(x))
    assert run.open().steps()["loss"].to_pylist() == pytest.approx(losses)


def test_a_script_is_made_as_without_us_and_the_hooks_stay(tmp_path):
    model, twin, data = net(), net(), batches(6)
    twin.load_state_dict(model.state_dict())
    seen = []
    with watch(model, to=tmp_path / "run", every=1) as run:
        losses = train(model, data[:3])
        tables = [dict(table) for one in model.modules() for table in (one._forward_hooks, one._forward_pre_hooks)]
        for one in (model, copy.deepcopy(model)):
            assert torch.jit.script(one).code == torch.jit.script(twin).code
        hook = model.register_forward_pre_hook(lambda module, args: seen.append(1))
        with pytest.raises(Exception, match="top-level function"):  # that of the program is its own affair
            torch.jit.script(model)
        hook.remove()
        with torch.no_grad():
            assert torch.jit.trace(model, data[0][0]).code == torch.jit.trace(twin, data[0][0]).code
        assert tables == [
            dict(table) for one in model.modules() for table in (one._forward_hooks, one._forward_pre_hooks)
        ]
        losses += train(model, data[3:])
    found = run.open()
    assert found.steps().column("loss").to_pylist() == pytest.approx(losses)
    for site in ("0", "4"):
        assert [(row["step"], row["count"]) for row in rows(found, site=site, what="output_grad")] == [
            (step, 8 * (16 if site == "0" else 3)) for step in range(6)
        ]


def test_an_encoder_layer_is_traced_as_without_us(tmp_path):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, to=tmp_path / "run", every=1):
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.jit.trace(model.eval(), x).code == torch.jit.trace(twin.eval(), x).code


@pytest.mark.parametrize("discover", [False, True])
def test_what_is_traced_before_there_is_an_optimizer_is_no_step(tmp_path, discover):
    gc.collect()  # the optimizers of other tests
    model, data = net(), batches(4)
    recording = Recording(tmp_path / "run", Options(every=1), None, ["x"])
    recording.recorder.install(() if discover else [("model", model)], discover=discover)
    try:
        traced = torch.jit.trace(model, data[0][0])
        losses = train(traced if discover else model, data)
    finally:
        recording.close("exit 0")
    found = open_run(tmp_path / "run")
    assert found.steps()["loss"].to_pylist() == pytest.approx(losses)
    assert len(found.models) == 1
    assert [row["count"] for row in rows(found, what="input")] == [x.numel() for x, _ in data]


def test_a_script_can_be_trained(tmp_path):
    model, data = net(), batches(4)
    twin, scripted = copy.deepcopy(model), torch.jit.script(model)
    true = []
    train(twin, data, each=lambda k: true.append([p.grad.clone() for p in twin.parameters()]))
    with watch(scripted, to=tmp_path / "run", every=1) as run:
        losses = train(scripted, data)
    found = run.open()
    assert found.steps().column("loss").to_pylist() == pytest.approx(losses)
    for step, gradients in enumerate(true):
        agrees(rows(found, step=step, site=".:in[0]", what="input")[0], data[step][0])
        for (name, _), gradient in zip(twin.named_parameters(), gradients, strict=True):
            agrees(rows(found, step=step, site=name, what="parameter_grad")[0], gradient)


@pytest.mark.parametrize("micros", [1, 3])
def test_steps_that_a_scaler_leaves_out_are_counted_and_their_gradients_are_not(tmp_path, micros):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    skipped = 0
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k, (x, y) in enumerate(batches(8)):
            for _ in range(micros):
                loss = F.cross_entropy(model(x), y)
                scaler.scale(loss * (math.inf if k in (2, 3) else 1)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()
    found = run.open()
    steps = found.steps().to_pylist()
    assert skipped == 2 and sum(row["skipped"] for row in steps) == 2
    assert len(steps) == 6
    assert not [f for f in run.findings if f.rule == "non-finite values" and f.place.what == "output_grad"]
    for row in rows(found, what="output_grad"):
        assert row["nan"] == row["pos_inf"] == row["neg_inf"] == 0
    assert {row["count"] for row in rows(found, what="output_grad", site="4")} == {micros * 8 * 3}


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


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every=0"):
        watch(net(), to=tmp_path, every=0)
    with pytest.raises(ValueError, match=r"activations.*output_grad"):
        watch(net(), to=tmp_path, what=["activations"])
    with pytest.raises(TypeError):
        watch("model", to=tmp_path)


def test_a_value_seen_at_two_places_is_measured_once_and_recorded_twice(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 3), nn.Identity()))
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(1))
    found = run.open()
    for what in ("output", "output_grad"):
        values = [rows(found, site=site, what=what)[0] for site in ("1.0", "1.1", "1", ".")]
        for value in values[1:]:
            assert {**value, "site": ""} == {**values[0], "site": ""}


def test_an_error_of_ours_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, capsys):
    from tenterhook.record.gather import Gather

    model, data = net(), batches(5)
    plain = train(copy.deepcopy(model), data)

    def fail(self, places, tensor, has_version=True):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Gather, "add", fail)
    with watch(model, to=tmp_path / "run", every=1) as run:
        assert train(model, data) == plain
    said = capsys.readouterr().err
    assert said.count("planted") == 1 and "goes on unchanged" in said
    assert "planted" in run.open().rank_info()["failed"]
    assert ours(model) == []


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


def test_an_error_of_ours_while_torch_goes_through_its_hooks(tmp_path, monkeypatch):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tenterhook.record.weights import Weights

    monkeypatch.setattr(Weights, "look", lambda *_: 1 / 0)
    model, seen = net(), []
    with watch(model, to=tmp_path / "run", every=1):
        handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
        train(model, batches(3))
        handle.remove()
    assert len(seen) == 3


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


def test_optimizers_of_many_kinds(tmp_path):
    model = net()

    class Own(torch.optim.SGD):
        pass

    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(6):  # a new one each time, as some tutorials have it
            optimizer = Own(model.parameters(), lr=torch.tensor(0.1, requires_grad=True))
            F.cross_entropy(model(x), y).backward()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
            model.zero_grad()
    assert len(run.open().steps()) == 6 and run.open().rank_info()["failed"] is None


@pytest.mark.parametrize("again", [True, False])
def test_many_optimizers_over_the_same_parameters_are_not_always_new(tmp_path, again):
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2)]
    with watch(model, to=tmp_path / "run") as run:
        for k, (x, y) in enumerate(batches(120)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if again else optimizers[k % 2]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    sampled = [row["step"] for row in run.open().steps().to_pylist() if row["sampled"]]
    assert sampled[-7:] == [50, 60, 70, 80, 90, 100, 110]
    assert "fewer than 64 steps with a loss" in run.verdict() or not again


def test_an_optimizer_that_could_not_be_made_is_left_alone(tmp_path):
    model = net()
    with pytest.raises(ValueError, match="learning rate") as kept:
        torch.optim.SGD(model.parameters(), lr=-1)
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(12))
    assert kept and len(run.open().steps()) == 12 and run.open().rank_info()["failed"] is None


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


def backward(model, optimizer, x, y, found, fail=False):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    found.append(loss.item())
    if fail and len(found) == 2:
        raise ZeroDivisionError
    return loss


def test_a_step_that_raises_is_left_out(tmp_path):
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=50) as run:
        for k, (x, y) in enumerate(batches(30)):
            backward(model, optimizer, x, y, losses)
            if k == 5:
                handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                handle.remove()
                losses.pop()
            else:
                optimizer.step()
    assert run.open().steps()["loss"].to_pylist() == losses
    assert {row["calls"] for row in rows(run.open(), what="parameter_grad")} == {1}


def test_a_step_that_raises_in_its_closure_is_left_out(tmp_path):
    model, losses = net(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    with watch(model, to=tmp_path / "run", every=50) as run:
        for k, (x, y) in enumerate(batches(30)):
            found = []
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step(partial(backward, model, optimizer, x, y, found, fail=k == 5))
                losses.append(found[0])
    assert len(losses) == 29 and run.open().steps()["loss"].to_pylist() == losses


@pytest.mark.parametrize("every", [1, 10])
def test_a_layer_that_is_exchanged_is_recorded(tmp_path, every):
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=every) as run:
        losses = train(model, batches(25), optimizer=optimizer)
        model[1], model[2] = nn.ReLU(), nn.Linear(16, 3)
        nn.init.constant_(model[0].bias, -50.0)
        optimizer.add_param_group({"params": model[2].parameters()})
        losses += train(model, batches(300), optimizer=optimizer)
    found = run.open()
    assert found.steps()["loss"].to_pylist() == losses
    outputs = [row["step"] for row in rows(found, site="0", what="output")]
    for what in ("output", "output_grad", "parameter"):
        site = "2.weight" if what == "parameter" else "2"
        assert [row["step"] for row in rows(found, site=site, what=what)] == outputs
    assert ("dead ReLU", "1") in [(f.rule, f.place.site) for f in run.findings if f.place]


def test_models_are_let_go(tmp_path):
    import weakref

    def watched():
        model = net()
        with watch(model, to=tmp_path / "run", every=1):
            train(model, batches(2))
        return weakref.ref(model)

    gone = watched()
    gc.collect()
    assert gone() is None


def test_a_program_that_changes_its_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = net()
    with watch(model, to="run", every=1) as run:
        train(model, batches(2))
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(model, batches(2))
    assert len(run.open().steps()) == 4 and "└ tenterhook summary run " in run.verdict()


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


def test_threads_each_with_a_model(tmp_path):
    import threading

    model = net()
    others = [net() for _ in range(3)]

    def work(other):
        train(other, batches(20))

    with watch(model, to=tmp_path / "run", every=1) as run:
        threads = [threading.Thread(target=work, args=(other,)) for other in others]
        for thread in threads:
            thread.start()
        train(model, batches(20))
        for thread in threads:
            thread.join()
    assert run.open().rank_info()["failed"] is None


def test_no_step_of_an_optimizer_is_found(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
    assert [(f.rule, f.severity) for f in run.findings] == [("parameter never trained", "error")]


# Found by trying to break it


def test_threads_open_and_close_watches_of_their_own(tmp_path):
    failed = []

    def work(k):
        try:
            model = net()
            optimizer = torch.optim.Adam(model.parameters())
            for j in range(4):
                with watch(model, to=tmp_path / f"{k}-{j}", every=1):
                    for x, y in batches(15):
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks


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


def test_an_optimizer_that_wraps_another_does_not_count(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, parameters, **options):
            super().__init__(parameters, options)
            self.base = torch.optim.SGD(self.param_groups, **options)

        def step(self, closure=None):
            self.base.step()

    model = net()
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(9), optimizer=Wrapper(model.parameters(), lr=0.1))
    assert run._recording.recorder.failed is None
    found = run.open()
    assert found.steps()["step"].to_pylist() == list(range(9))
    assert {row["calls"] for row in rows(found, what="update")} == {1}


def test_sampling_that_begins_within_a_step(tmp_path):
    class Both(torch.optim.Optimizer):
        def step(self, closure=None):
            for _ in range(3):
                inner.step()

    model = net()
    inner, outer = torch.optim.SGD(model[0].parameters(), lr=0.1), Both(model[4].parameters(), {"lr": 0.1})
    with watch(model, to=tmp_path / "run") as run:
        train(model, batches(25), optimizer=inner)
        train(model, batches(25), optimizer=outer)
    assert run.open().rank_info()["failed"] is None


def test_optimizers_that_step_inside_the_backward_pass_leave_no_step_too_many(tmp_path):
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), optimizers[p].zero_grad())[0])
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(10):
            F.cross_entropy(model(x), y).backward()
    optimizers.clear()  # nobody else takes this circle apart
    assert len(run.open().steps()) == 10


class Twice(nn.Module):
    """One ReLU for two things, of which the first may be dead."""

    def __init__(self, widths, bias=0.0):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, widths[0]), nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], 4)
        self.relu = nn.ReLU()
        nn.init.constant_(self.a.bias, bias)

    def forward(self, x):
        return self.c(self.relu(self.b(self.relu(self.a(x)))))


def dead_in(model, tmp_path, *shape):
    with watch(model, to=tmp_path / "run", every=1) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(*shape)).pow(2).mean().backward()
            optimizer.step()
    return [row["dead"] for row in rows(run.open(), what="output") if row["dead"] is not None]


def test_one_relu_for_several_things(tmp_path):
    assert max(dead_in(Twice((64, 32)), tmp_path / "alive", 64, 8)) < 0.2
    assert set(dead_in(Twice((32, 32), bias=-50.0), tmp_path / "dead", 64, 8)) == {1.0}


def test_a_relu_in_a_loop_is_one_layer(tmp_path):
    class Recurrent(nn.Module):
        """At its first step no unit of the first half fires, at its second none of the other."""

        def __init__(self):
            super().__init__()
            self.linear, self.relu = nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            shift = torch.tensor([-50.0] * 4 + [0.0] * 4)
            for by in (shift, shift.flip(0)):
                x = self.relu(self.linear(x) + by)
            return x

    assert max(dead_in(Recurrent(), tmp_path, 64, 8)) < 0.2


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(20, affine=False)])
def test_the_units_of_a_convolution_are_its_channels(norm, tmp_path):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.tensor([-50.0] * 18 + [0.0] * 2).view(20, 1))

        def forward(self, x):
            return x + self.by

    model = nn.Sequential(nn.Conv1d(4, 20, 3), norm(), Shifted(), nn.ReLU(), nn.Flatten(), nn.Linear(600, 2))
    assert dead_in(model, tmp_path, 8, 4, 32) == [pytest.approx(0.9)] * 5
    tokens = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
    nn.init.constant_(tokens[0].bias[:15], -50.0)
    assert dead_in(tokens, tmp_path / "tokens", 8, 6, 4) == [pytest.approx(0.75)] * 5


class Moved(nn.Module):
    """Its channels are last."""

    def __init__(self, layer, move):
        super().__init__()
        self.layer, self.move, self.relu, self.last = layer, move, nn.ReLU(), nn.Linear(20, 2)
        nn.init.constant_(layer.bias[:15], -50.0)

    def forward(self, x):
        return self.last(self.relu(self.move(self.layer(x))))


@pytest.mark.parametrize(
    ("layer", "move", "shape"),
    [
        (nn.Linear(4, 20), lambda h: h, (8, 5, 6, 4)),
        (nn.Conv1d(4, 20, 3), lambda h: h.transpose(1, 2), (8, 4, 9)),
        (nn.Conv1d(4, 20, 3), lambda h: h.permute(2, 0, -2), (8, 4, 9)),
        (nn.Conv2d(4, 20, 3), lambda h: h.flatten(2).transpose(1, -1), (8, 4, 6, 6)),
        (nn.Conv2d(4, 20, 3), lambda h: h.permute(0, 2, 3, 1).contiguous(), (8, 4, 6, 6)),
        (nn.Conv2d(4, 20, 3), lambda h: h.permute(0, 2, 3, 1).flatten(1, 2), (8, 4, 6, 6)),
        (nn.Linear(4, 20), lambda h: h.view(4, 2, 5, 20), (8, 5, 4)),
    ],
)
def test_units_may_be_on_any_axis(layer, move, shape, tmp_path):
    assert dead_in(Moved(layer, move), tmp_path, *shape) == [pytest.approx(0.75)] * 5


@pytest.mark.parametrize(
    ("layer", "then", "shape", "axis"),
    [
        (nn.Linear(6, 256), nn.Sequential(nn.Unflatten(1, (16, 4, 4)), nn.BatchNorm2d(16)), (8, 6), 1),
        (nn.Linear(6, 256), nn.Unflatten(1, (16, 4, 4)), (8, 6), 1),
        (nn.Linear(6, 80), nn.Sequential(nn.Unflatten(1, (16, 5)), nn.BatchNorm1d(16)), (8, 6), 1),
        (nn.Linear(6, 16), lambda h: h[..., None, None], (8, 6), 1),
        (nn.Linear(6, 16, bias=False), lambda h: h, (8, 5, 4, 6), 3),
        (nn.Linear(6, 16), lambda h: h.t(), (8, 6), 0),
        (nn.Conv1d(6, 16, 3), nn.Upsample(scale_factor=2, mode="linear"), (8, 6, 9), 1),
        (nn.Conv1d(6, 16, 3), nn.InstanceNorm1d(16), (8, 6, 9), 1),
        (nn.Conv2d(6, 16, 3), lambda h: h, (6, 9, 9), 0),
        (nn.Conv2d(6, 16, 3), lambda h: h.view(4, 2, 16, 7, 7), (8, 6, 9, 9), 2),
    ],
)
def test_which_axis_has_the_units(layer, then, shape, axis):
    assert axis_of_units(F.relu(then(layer(torch.randn(shape))))) == axis


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_into_is_measured_again(mode, tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
    with watch(model, to=tmp_path / "run", every=1) as run, mode():
        for _ in range(5):
            model(torch.randn(8, 4))
    outputs = rows(run.open(), what="output", step=2)
    lowest = {row["site"]: row["min"] for row in outputs}
    assert lowest["0"] < 0 == lowest["1"] == lowest["."]


def test_a_value_that_is_no_number_does_not_silence_a_unit(tmp_path):
    class Broken(nn.Module):
        def forward(self, x):
            return torch.cat([x[1:], torch.full_like(x[:1], math.nan)])

    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(8, 16), Broken(), nn.ReLU(), nn.Linear(16, 2)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with watch(model, to=tmp_path / str(dtype), every=1) as run:
            for _ in range(16):
                optimizer.zero_grad()
                model(torch.randn(32, 8, dtype=dtype))[:-1].float().pow(2).mean().backward()
                for parameter in model.parameters():
                    parameter.grad.zero_()
                optimizer.step()
        dead = [row["dead"] for row in rows(run.open(), what="output") if row["dead"] is not None]
        assert dead and max(dead) < 0.2


def encoder(dtype=torch.float32, **options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dtype=dtype, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def padded(dtype):
    mask = torch.zeros(16, 10, dtype=torch.bool)
    mask[:, 7:] = True
    return torch.randn(16, 10, 32, dtype=dtype), mask


class Probe(nn.Module):
    """A head on an encoder, which may be a single layer."""

    def __init__(self, encoder, dtype):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(32, 3, dtype=dtype)

    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


def probed(model, dtype, frozen):
    """Train the head of a frozen encoder, or all, with a validation after each step: what comes out of both."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(6):
        model.train()
        model.encoder.train(not frozen)
        (x, mask), y = padded(dtype), torch.randint(0, 3, (16,))
        loss = F.cross_entropy(model(x, mask).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            yield loss.item(), model.encoder(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_that_torch_runs_as_one_operation_stays_so(tmp_path, dtype, frozen):
    model = Probe(encoder(dtype).requires_grad_(not frozen), dtype)
    plain = list(probed(copy.deepcopy(model), dtype, frozen))
    with watch(model, to=tmp_path / "run", every=1) as run:
        watched = list(probed(model, dtype, frozen))
    for (loss, values), (expected, others) in zip(watched, plain, strict=True):
        assert loss == expected and torch.equal(values, others)
    sites = {row["site"] for row in rows(run.open(), what="output")}
    assert {"head", "encoder"} <= sites
    assert ("encoder.layers.0.linear1" in sites) is not frozen
    assert ("inside of an nn.TransformerEncoderLayer" in run.verdict()) is frozen
    assert not ours(model)


@pytest.mark.parametrize("why", ["gradients", "switch", "layout"])
def test_an_encoder_in_eval_mode_that_torch_does_not_fuse_is_recorded(tmp_path, monkeypatch, why):
    body = nn.TransformerEncoderLayer(32, 4, 64) if why == "layout" else encoder()
    model = Probe(body.eval().requires_grad_(False), torch.float32)
    prompt = torch.zeros(32, requires_grad=why == "gradients")
    optimizer = torch.optim.SGD([prompt, *model.head.parameters()], lr=0.01)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", why != "switch")
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(2):
            model(prompt + padded(torch.float32)[0], None).sum().backward()
            optimizer.step()
    assert any(row["site"].endswith("linear1") for row in rows(run.open(), what="output"))
    assert "TransformerEncoderLayer was not" not in run.verdict()


@torch.no_grad()
def given(layer, inputs):
    return [layer(x, src_key_padding_mask=mask) for x, mask in inputs]


def test_a_layer_that_is_the_model_is_run_as_one_operation(tmp_path):
    layer = encoder().layers[0].eval()
    inputs = [padded(torch.float32) for _ in range(3)]
    plain = given(layer, inputs)
    with watch(layer, to=tmp_path / "run", every=1) as run:
        watched = given(layer, inputs)
    assert all(map(torch.equal, watched, plain))
    (one,) = rows(run.open(), what="input", step=1, site=".:in[0]")
    agrees(one, inputs[1][0])
    assert not torch.nn.modules.module._global_forward_pre_hooks


class Whole(nn.TransformerEncoderLayer):
    """A subclass that has torch's forward, in the end."""

    def forward(self, src, **options):
        return super().forward(src * 2, **options)


class Own(nn.TransformerEncoderLayer):
    """One that torch never runs as one operation."""

    def forward(self, src, src_key_padding_mask=None):
        src = self.norm1(src + self.self_attn(src, src, src, need_weights=False)[0])
        return self.norm2(src + self.linear2(self.linear1(src).relu()))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, Whole])
def test_a_layer_is_run_as_one_operation_in_the_call_that_begins_a_sampled_step_too(tmp_path, kind):
    layer = kind(32, 4, 64, batch_first=True).eval()
    inputs = [padded(torch.float32) for _ in range(45)]
    plain = given(layer, inputs)
    with watch(layer, to=tmp_path / "run", every=3) as run:
        watched = given(layer, inputs)
    assert all(map(torch.equal, watched, plain))
    assert len(run.open().steps()) == 45 and not ours(layer)


def test_a_subclass_of_an_encoder_layer_with_a_forward_of_its_own_is_recorded(tmp_path):
    model = Probe(Own(32, 4, 64, batch_first=True).requires_grad_(False), torch.float32)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in probed(model, torch.float32, frozen=True):
            pass
    assert {"encoder", "encoder.linear1", "encoder.norm2"} <= {row["site"] for row in rows(run.open(), what="output")}
    assert "TransformerEncoderLayer was not" not in run.verdict()


def test_an_encoder_layer_without_a_layout_is_trained(tmp_path):
    model = Probe(nn.TransformerEncoderLayer(32, 4, 64, batch_first=None), torch.float32)
    plain = list(probed_rows(copy.deepcopy(model)))
    with watch(model, to=tmp_path / "run", every=1) as run:
        assert list(probed_rows(model)) == plain
    assert len(run.open().steps()) == 6 and run.open().rank_info()["failed"] is None


def probed_rows(model):
    """The losses of a training without a mask, and the sums of what a validation gives."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        x = torch.randn(16, 10, 32)
        loss = model.train()(x, None).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            yield loss.item(), model.eval()(x, None).sum().item()


@pytest.mark.parametrize("prompted", [True, False])
def test_what_a_layer_is_given_by_its_name(tmp_path, prompted):
    layer = encoder().layers[0].eval().requires_grad_(not prompted)
    prompt = torch.zeros(32, requires_grad=prompted)
    inputs = [padded(torch.float32) for _ in range(3)]
    with watch(layer, to=tmp_path / "run", every=1) as run:
        for x, mask in inputs:
            layer(src=x + prompt, src_key_padding_mask=mask).sum().backward()
    (one,) = rows(run.open(), what="input", step=1, site=".:in[src]")
    agrees(one, inputs[1][0])
    assert {".", "linear1"} <= {row["site"] for row in rows(run.open(), what="output")}


def test_a_watch_that_another_thread_ends_while_a_layer_is_called_leaves_no_hook(tmp_path, monkeypatch):
    model = Probe(encoder(), torch.float32)
    recorder = watch(model, to=tmp_path / "run", every=1).__enter__()._recording.recorder
    ends = threading.Thread(target=recorder.remove)

    def is_fused(layer, args):
        if not ends.ident:
            ends.start()
            ends.join(0.3)
        return False

    monkeypatch.setattr(fused, "is_fused", is_fused)
    model(*padded(torch.float32))
    ends.join()
    assert not ours(model)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def made_here():
    class Doubled(nn.Linear):
        pass

    return Doubled(6, 6)


def test_the_tree_of_modules_says_where_their_classes_are_written(tmp_path):
    class Lone(nn.Linear):
        pass

    model = nn.Sequential(Lone(6, 6), Doubled(), made_here())
    with watch(model, to=tmp_path / "run") as run:
        train(model, batches(2))
    (described,) = run.open().models
    for one, module in zip(described["modules"][1:], model, strict=True):
        file, _, line = one["source"].rpartition(":")
        assert file == __file__
        assert int(line) == inspect.getsourcelines(type(module))[1]


def overflow(value):
    value.register_hook(lambda grad: grad * 1e38 * 1e38)


def scaled(scale=65536.0):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def errors(run):
    """The rules that found something serious."""
    return {one.rule for one in run.findings if one.severity == "error"}


def losses_and_skips(run):
    table = run.open().steps().to_pydict()
    return table["loss"], table["skipped"]


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_scaler_that_leaves_out_one_of_two_optimizers_leaves_out_no_loss(tmp_path, order):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizers = [sgd(part) for part in model]
    scaler, expected = scaled(), []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k, (x, y) in enumerate(batches(20)):
            model.zero_grad()
            h = model[0](x)
            if k in (6, 12):
                overflow(h)
            loss = F.cross_entropy(model[1](h), y)
            expected.append(loss.item())
            scaler.scale(loss).backward()
            for i in order:
                scaler.step(optimizers[i])
            scaler.update()
    losses, skips = losses_and_skips(run)
    assert losses == pytest.approx(expected)
    assert [k for k, many in enumerate(skips) if many] == [6, 12]
    assert not errors(run)


def test_two_scalers_with_both_passes_before_both_steps(tmp_path):
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizers, scalers, expected = [sgd(part) for part in model], [scaled(), scaled(1024.0)], []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(20):
            model.zero_grad()
            found = [F.cross_entropy(part(x), y) for part in model]
            expected.append(sum(found).item())
            for loss, scaler in zip(found, scalers, strict=True):
                scaler.scale(loss).backward()
            for optimizer, scaler in zip(optimizers, scalers, strict=True):
                scaler.step(optimizer)
                scaler.update()
    losses, skips = losses_and_skips(run)
    assert losses == pytest.approx(expected)
    assert not any(skips)
    assert not run.findings


@pytest.mark.parametrize("infinite", [False, True])
def test_a_training_that_ends_with_a_step_left_out(tmp_path, infinite):
    model = nn.Linear(6, 3)
    expected = []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(2):  # the second one begins with another scaler
            optimizer, scaler = sgd(model), scaled()
            for k, (x, y) in enumerate(batches(8)):
                optimizer.zero_grad()
                logits = model(x)
                if k == 7:
                    overflow(logits)
                loss = F.cross_entropy(logits, y) * (1e38 if infinite and k == 7 else 1)
                expected += [loss.item()] if k < 7 else []
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    losses, skips = losses_and_skips(run)
    assert losses[:-1] == pytest.approx(expected)
    assert math.isfinite(losses[-1]) is not infinite  # the last one is kept: nothing comes after it
    assert [k for k, many in enumerate(skips) if many] == [7, 14]
    assert not errors(run)


def test_an_optimizer_that_was_taken_for_a_wrapper_counts_again_once_it_steps_by_itself(tmp_path):
    class Warm(torch.optim.SGD):
        inner = None

        def step(self, closure=None):
            return self.inner.step(closure) if self.inner is not None else super().step(closure)

    model = nn.Linear(6, 3)
    optimizer = Warm(model.parameters(), lr=0.05)
    optimizer.inner = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run") as run:
        for k, (x, y) in enumerate(batches(40)):
            optimizer.inner = optimizer.inner if k < 15 else None
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert len(losses_and_skips(run)[0]) >= 39  # the first of its own is seen too late


def test_a_step_that_raised_does_not_make_its_optimizer_a_wrapper(tmp_path):
    class Flaky(torch.optim.SGD):
        many = 0

        def step(self, closure=None):
            self.many += 1
            if self.many == 10:
                raise RuntimeError
            return super().step(closure)

    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    both, head = Flaky(model.parameters(), lr=0.05), sgd(model[1])
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(30):
            for optimizer in (both, head):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                with contextlib.suppress(RuntimeError):
                    optimizer.step()
    table = run.open().steps().to_pydict()
    assert [len(rates) for rates in table["rates"][-5:-1]] == [2] * 4
    assert rows(run.open(), site="0.weight", what="update")[-1]["step"] >= len(table["step"]) - 2


def test_after_a_finding_the_next_steps_are_sampled_however_late_it_is_found(tmp_path):
    model = net()
    optimizer = sgd(model)
    with watch(model, to=tmp_path / "run", every=1000) as run:
        for k, (x, y) in enumerate(batches(200)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (50 if k == 100 else 1)
            loss.backward()
            optimizer.step()
    table = run.open().steps().to_pydict()
    assert any(one.step == 100 for one in run.findings)
    assert sum(table["sampled"][101:]) >= 10


def test_a_training_that_becomes_nan_under_a_scaler_is_said_to_be(tmp_path):
    model = net()
    optimizer, scaler = sgd(model), scaled()
    with watch(model, to=tmp_path / "run") as run:
        for k, (x, y) in enumerate(batches(80)):
            if k == 20:
                with torch.no_grad():
                    model[0].weight[0, 0] = math.nan
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert sum(losses_and_skips(run)[1]) == 60
    assert errors(run) == {"non-finite values", "loss is NaN"}


@pytest.mark.parametrize("many", [1, 2])
def test_a_script_may_leave_out_steps_by_itself(tmp_path, many):
    model = net()
    optimizer, scaler, expected = sgd(model), scaled(), []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k in range(20):
            optimizer.zero_grad()
            total = 0.0
            for x, y in batches(many):
                logits = model(x)
                if k in (6, 12):
                    overflow(logits)
                loss = F.cross_entropy(logits, y) / many
                total += loss.item()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                scaler.step(optimizer)
                expected.append(total)
            scaler.update()
    losses, skips = losses_and_skips(run)
    assert losses == pytest.approx(expected)
    assert sum(skips) == 2
    assert not errors(run)


class Ahead(torch.optim.Optimizer):
    """Wraps another, and has it step."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step()


class Duck:
    """Has another step at every n-th call; no Optimizer itself."""

    def __init__(self, inner, every):
        self.inner, self.every, self.calls, self.param_groups = inner, every, 0, inner.param_groups

    def step(self):
        self.calls += 1
        if self.calls % self.every == 0:
            self.inner.step()


def test_a_scaler_that_leaves_out_a_step_of_an_optimizer_around_another(tmp_path):
    model = net()
    optimizer, scaler, expected = Ahead(sgd(model)), scaled(), []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k, (x, y) in enumerate(batches(20)):
            model.zero_grad()
            logits = model(x)
            if k in (6, 12):
                overflow(logits)
            loss = F.cross_entropy(logits, y)
            expected += [] if k in (6, 12) else [loss.item()]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    losses, skips = losses_and_skips(run)
    assert losses == pytest.approx(expected)
    assert sum(skips) == 2
    assert not errors(run)


@pytest.mark.parametrize("enabled", [True, False])
def test_what_only_steps_at_every_fourth_call_of_a_scaler_leaves_nothing_out(tmp_path, enabled):
    model = net()
    optimizer, scaler, expected = Duck(sgd(model), 4), torch.amp.GradScaler("cpu", enabled=enabled), []
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(40):
            loss = F.cross_entropy(model(x), y)
            expected.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if optimizer.calls % 4 == 0:
                model.zero_grad()
    losses, skips = losses_and_skips(run)
    assert losses == pytest.approx([sum(expected[k : k + 4]) for k in range(0, 40, 4)])
    assert not any(skips)
    assert not errors(run)


def test_a_round_of_several_optimizers_is_left_out_once(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizers, scaler = [sgd(part) for part in model], scaled()
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k, (x, y) in enumerate(batches(20)):
            model.zero_grad()
            logits = model(x)
            if k < 9:  # as long as the scale is too large
                overflow(logits)
            scaler.scale(F.cross_entropy(logits, y)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert losses_and_skips(run)[1] == [9] + [0] * 10
    assert not errors(run)


def test_a_forgotten_step_is_found_whatever_a_scaler_does(tmp_path):
    model = net()
    optimizer, scaler = sgd(model), scaled()
    with watch(model, to=tmp_path / "run") as run:
        for k, (x, y) in enumerate(batches(60)):
            logits = model(x)
            if k == 3:
                overflow(logits)
            scaler.scale(F.cross_entropy(logits, y)).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert "parameter never trained" in errors(run)
