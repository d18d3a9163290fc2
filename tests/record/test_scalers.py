"""Trainings under a GradScaler: scales, and steps that are left out."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tests.record.small import agrees, batches, losses_and_skips, net, rows, sgd, train


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


def overflow(value):
    value.register_hook(lambda grad: grad * 1e38 * 1e38)


def scaled(scale=65536.0):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def errors(run):
    """The rules that found something serious."""
    return {one.rule for one in run.findings if one.severity == "error"}


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
    assert "nothing is trained" in errors(run)
