"""Where steps end, whatever optimizers do: the whole recorder, as test_assemble.py has it without torch."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tests.record.small import agrees, batches, losses_and_skips, net, rows, sgd, train


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
    assert "fewer than 64 steps with a loss" in run.verdict(everything=True) or not again


def test_an_optimizer_that_could_not_be_made_is_left_alone(tmp_path):
    model = net()
    with pytest.raises(ValueError, match="learning rate") as kept:
        torch.optim.SGD(model.parameters(), lr=-1)
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(12))
    assert kept and len(run.open().steps()) == 12 and run.open().rank_info()["failed"] is None


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


def test_no_step_of_an_optimizer_is_found(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with watch(model, to=tmp_path / "run", every=1) as run:
        for x, y in batches(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
    assert [(f.rule, f.severity) for f in run.findings] == [("nothing is trained", "error")]


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
