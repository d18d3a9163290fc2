"""A value that is not finite in trainings of all kinds: it is found, and nothing is otherwise than without us."""

import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import open_run, watch
from tenterhook.birth.capsule import Capsule
from tenterhook.record.watch import Options, Recording

BAD = 6


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def scale(step):
    """What makes the gradient of a square root infinite, once."""
    return float(step != BAD)


def numbers():
    return torch.rand(1).item(), random.random(), np.random.rand()


def found(tmp_path, train, build=net):
    """What is found; the training is bit by bit what it is without us, and so are the random numbers after it."""
    random.seed(0), np.random.seed(0)
    bare = build()
    truth = train(bare), numbers()
    random.seed(0), np.random.seed(0)
    watched = build()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in watched.modules()]
    recording = Recording(tmp_path / "run", Options(every=100, dense=2), None, [])
    recording.recorder.install(discover=True)  # as `tenterhook run` does
    try:
        result = train(watched), numbers()
    finally:
        recording.close("finished")
    assert result == truth
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in watched.modules()]
    for (name, a), (_, b) in zip(bare.state_dict().items(), watched.state_dict().items(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()), name
    for a, b in zip(bare.parameters(), watched.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad.nan_to_num(), b.grad.nan_to_num())
    assert recording.recorder.failed is None
    findings = [one for one in open_run(tmp_path / "run").findings().to_pylist() if one["rule"] == "non-finite values"]
    return findings[0] if findings else None


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.G, self.D = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def gan(two):
    """Both are models, called by themselves, each with an optimizer; D's loss is bad once."""
    of_g, of_d = torch.optim.Adam(two.G.parameters(), 1e-3), torch.optim.Adam(two.D.parameters(), 1e-3)
    for step in range(10):
        fake = two.G(torch.randn(8, 4))
        of_d.zero_grad()
        shown = torch.sigmoid(two.D(fake.detach()) - (1e4 if step == BAD else 0))
        loss_d = -(torch.log(shown) + torch.log(torch.sigmoid(two.D(torch.randn(8, 8))))).mean()
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = -torch.log(torch.sigmoid(two.D(fake))).mean()
        loss_g.backward()
        of_g.step()


def test_two_models_with_an_optimizer_each(tmp_path):
    one = found(tmp_path, gan, Two)
    assert one["step"] == BAD and "was made by log" in one["text"] and "torch.log(shown)" in one["why"]


def test_each_of_several_models_has_its_own_name(tmp_path):
    """In the finding, and in the capsule, from which a factory is to know them."""
    pytest.importorskip("safetensors")
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 1e-3)
    recording = Recording(tmp_path / "run", Options(every=100, dense=2, capsule=True), None, [])
    recording.recorder.install(discover=True)
    for step in range(10):
        if step == BAD:
            nn.init.constant_(generator.weight, 3e38)
        loss = critic(generator(torch.ones(8, 4))).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    recording.close("finished")
    rows = open_run(tmp_path / "run").findings().to_pylist()
    one = next(row for row in rows if row["rule"] == "non-finite values")
    assert one["step"] == BAD and "was made by addmm in generator:." in one["text"]
    capsule = Capsule.read(tmp_path / "run" / "rank-0" / "capsule.safetensors")
    assert capsule.models == ["generator", "critic"]
    made = {"generator": nn.Linear(4, 8), "critic": nn.Sequential(nn.Linear(8, 8), nn.Tanh())}
    assert "addmm in generator:." in capsule.replay(made).sentence


def test_the_second_of_two_models(tmp_path):
    def train(two):
        of_g, of_d = torch.optim.SGD(two.G.parameters(), 1e-3), torch.optim.SGD(two.D.parameters(), 1e-3)
        for step in range(10):
            value = two.D(two.G(torch.randn(8, 4)))
            loss = (value * scale(step)).pow(2).sum(-1).sqrt().mean()
            two.zero_grad()
            loss.backward()
            of_g.step()
            of_d.step()

    one = found(tmp_path, train, Two)
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"] and "value * scale(step)" in one["why"]


def step_of(model, optimizer, step):
    loss = (model(torch.randn(8, 8)) * scale(step)).pow(2).sum(-1).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_in_a_thread(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        thread = threading.Thread(target=lambda: [step_of(model, optimizer, step) for step in range(10)])
        thread.start()
        thread.join()

    one = found(tmp_path, train)
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(tmp_path, dtype):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            x = torch.randn(8, 8)
            with torch.autocast("cpu", dtype):
                out = model(x)
                loss = (out * (1e30 if step == BAD else 1.0) * (1e30 if step == BAD else 1.0)).float().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    one = found(tmp_path, train)
    name = str(dtype).removeprefix("torch.")
    assert one["step"] == BAD and f"more than {name} can hold" in one["text"] and "1e30" in one["why"]


def test_autocast_around_the_step_but_not_the_optimizer(tmp_path):
    def one_step(model, x, big):
        with torch.autocast("cpu", torch.float16):
            return compute(model, x, big)

    def compute(model, x, big):
        loss = (model(x) * 0 + big) @ torch.ones(4, 1)
        loss.float().mean().backward()
        return loss

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            optimizer.zero_grad()
            one_step(model, torch.randn(8, 8), 6e4 if step == BAD else 1.0)
            optimizer.step()

    one = found(tmp_path, train)
    assert one["step"] == BAD and "more than float16 can hold" in one["text"]


class Spectral(nn.Module):
    """As in a Fourier neural operator: complex weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.layer(x)) * self.weight, n=4)


class Mixed(nn.Module):
    """Weights in float64 beside some in float32, and all of it in float64."""

    def __init__(self, *dtypes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


MIXED = {"float64": lambda: Mixed(torch.float64), "mixed": lambda: Mixed(torch.float32, torch.float64)}


@pytest.mark.parametrize("build", [Spectral, *MIXED.values()], ids=["complex", *MIXED])
def test_weights_that_are_not_float32(tmp_path, build):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            step_of(model, optimizer, step)

    one = found(tmp_path, train, build)
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"]


class Stateful(nn.Module):
    """Keeps a hidden state from one call to the next, and a mean in a buffer that is a new tensor each time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.hidden, self.calls = nn.Linear(8, 4), torch.zeros(4), 0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("row", torch.zeros(1).expand(4))

    def forward(self, x):
        value = self.layer(x) + self.hidden
        self.calls += 1
        self.hidden = 0.5 * self.hidden + value.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
        return value


def test_a_model_that_keeps_a_state(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(10):
            step_of(model, optimizer, step)
        return model.calls, model.hidden.nan_to_num().tolist()

    one = found(tmp_path, train, Stateful)
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"]


@pytest.mark.parametrize("trained", [lambda model: model.used.parameters(), nn.Module.parameters])
def test_layers_that_have_no_shape_yet(tmp_path, trained):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.norm, self.linear = nn.Linear(8, 4), nn.LazyBatchNorm1d(), nn.LazyLinear(4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            value = self.used(x)
            return self.linear(value) + value if self.calls > 8 else value

    model = Late()
    optimizer = torch.optim.SGD(trained(model), 1e-3)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for step in range(10):
            step_of(model, optimizer, step)
    assert len(run.open().steps()) == 10
    one = next(row for row in run.open().findings().to_pylist() if row["rule"] == "non-finite values")
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"]
    if trained is nn.Module.parameters:
        rows = [row for row in run.open().stats().to_pylist() if row["site"] == "linear.weight"]
        assert {row["step"] for row in rows} == {8, 9}


@pytest.mark.parametrize("bad", [1e300, 1e30])
def test_gradients_whose_norm_alone_overflows_are_well(tmp_path, bad):
    dtype = torch.float64 if bad > 1e38 else torch.float32

    def train(model):
        model = model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(8):
            (model(torch.randn(8, 8, dtype=dtype)).sum() * (bad if step == BAD else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert found(tmp_path, train) is None


def test_a_frozen_model_with_a_head_of_its_own(tmp_path):
    def train(model):
        model.requires_grad_(False)
        head = nn.Parameter(torch.ones(4, 1))
        optimizer = torch.optim.SGD([head], 1e-3)
        for step in range(10):
            loss = ((model(torch.randn(8, 8)) * scale(step)) @ head).pow(2).sum(-1).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return head.isnan().any().item()

    one = found(tmp_path, train)
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"]


class Once(nn.Module):
    """Cannot be called twice with the same: its own count goes on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls, self.allowed = nn.Linear(8, 4), 0, None

    def forward(self, x):
        self.calls += 1
        if self.allowed is not None and self.calls > self.allowed:
            raise ValueError("no more")
        return self.layer(x)


def test_a_forward_that_raises_the_second_time(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(8):
            model.calls, model.allowed = 0, 1 if step == BAD else None
            step_of(model, optimizer, step)

    one = found(tmp_path, train, Once)
    assert one["step"] == BAD and "could not be run again: ValueError: no more" in one["text"]


def test_steps_that_raise_half_way(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            try:
                out = model(torch.randn(8, 8))
                if step % 2:
                    raise KeyError(step)
                loss = (out * scale(step)).pow(2).sum(-1).sqrt().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            except KeyError:
                pass

    one = found(tmp_path, train)
    assert one["step"] == BAD // 2 and "the gradient of sqrt" in one["text"]


def test_inputs_that_are_written_into(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        x = torch.empty(8, 8)
        for step in range(10):
            x.normal_()
            out = model(x)
            x.zero_()
            loss = (out * scale(step)).pow(2).sum(-1).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    one = found(tmp_path, train, Copies)
    assert one["step"] == BAD and "written into" in one["text"]


class Copies(nn.Module):
    """Works on a copy: what autograd keeps is not what the loop writes into."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x.clone())


def test_lbfgs_with_a_closure(tmp_path):
    def train(model):
        optimizer = torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=2)
        for step in range(8):
            x = torch.randn(8, 8)

            def closure(x=x, step=step):
                optimizer.zero_grad()
                loss = (model(x) * scale(step)).pow(2).sum(-1).log().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    one = found(tmp_path, train, Copies)
    assert one["step"] == BAD and "was made by log" in one["text"]


def test_a_loop_that_is_a_generator(tmp_path):
    def losses(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            loss = torch.exp(model(torch.randn(8, 8)).mean() + (1e3 if step == BAD else 0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss

    one = found(tmp_path, lambda model: [None for _ in losses(model)])
    assert one["step"] == BAD and "not known" in one["text"] and "generator" in one["text"]


def test_gradients_by_hand(tmp_path):
    def train(model):
        for step in range(10):
            loss = (model(torch.randn(8, 8)) * (1e30 if step == BAD else 1.0)).pow(2).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p -= 1e-3 * grad

    one = found(tmp_path, train)
    assert one["step"] == BAD and "was made by pow" in one["text"]


def test_no_optimizer_at_all(tmp_path):
    def train(model):
        for step in range(10):
            loss = (model(torch.randn(8, 8)) * (1e30 if step == BAD else 1.0)).pow(2).mean()
            loss.backward()
        return loss.isfinite().item()

    one = found(tmp_path, train)
    assert one["step"] == BAD and "was made by pow" in one["text"]


def test_a_loss_that_the_program_leaves_out_is_no_finding(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            loss = model(torch.randn(8, 8)).pow(2).mean() / (0.0 if step == BAD else 1.0)
            if not loss.isfinite():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert found(tmp_path, train) is None


def test_clipping_makes_all_of_it_nan_and_is_not_what_is_told(tmp_path):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            loss = (model(torch.randn(8, 8)) * scale(step)).pow(2).sum(-1).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    one = found(tmp_path, train)
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"]


def test_a_grad_scaler_leaves_out_the_step_and_a_bad_loss_is_told(tmp_path):
    def train(model, bad):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(10):
            with torch.autocast("cpu", torch.float16):
                out = model(torch.randn(8, 8))
                loss = F.cross_entropy(out.float(), torch.randint(4, (8,)))
            if step == BAD:
                loss = loss * bad
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert found(tmp_path / "a", lambda model: train(model, 1e36)) is None  # the scaled gradient overflows
    one = found(tmp_path / "b", lambda model: train(model, float("nan")))
    assert one is not None and "NaN" in one["text"]


def test_an_earlier_micro_batch(tmp_path):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 4)

        def forward(self, x, factor):
            distance = (self.layer(x) * factor).pow(2).sum(-1)
            return distance.sqrt()

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(10):
            optimizer.zero_grad()
            for part in range(3):
                model(torch.randn(8, 8), float(step != BAD or part != 0)).mean().backward()
            optimizer.step()

    one = found(tmp_path, train, Inside)
    assert one["step"] == BAD and "the gradient of sqrt in ." in one["text"]


class Tracked:
    """Weak references to what a step has made."""

    def __init__(self):
        self.refs = []

    def note(self, *tensors):
        self.refs += map(weakref.ref, tensors)

    @property
    def alive(self):
        gc.collect()
        return sum(ref() is not None for ref in self.refs)


def tracked_step(model, optimizer, tracked, step):
    x = torch.randn(8, 8)
    out = model(x)
    loss = (out * scale(step)).pow(2).sum(-1).sqrt().mean()
    tracked.note(x, out, loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_nothing_is_kept_after_a_step(tmp_path):
    model, tracked = net(), Tracked()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watch(model, to=tmp_path / "run", every=100, dense=1):
        for step in range(10):
            tracked_step(model, optimizer, tracked, step)
            if step > 1:
                assert tracked.alive == 0, step


def test_forwards_without_a_backward_pass_are_not_all_kept(tmp_path):
    model, tracked = net(), Tracked()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watch(model, to=tmp_path / "run", every=100, dense=1):
        tracked_step(model, optimizer, Tracked(), 0)
        for _ in range(50):
            x = torch.randn(8, 8)
            model(x)
            tracked.note(x)
            del x
        assert tracked.alive <= 16
