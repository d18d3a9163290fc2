"""Under watch, where a loss or gradient that is not finite was made; and that training goes on as it would."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import watch
from tenterhook.record.births import Births
from tenterhook.record.guard import Guard
from tenterhook.record.models import Models


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def nll(p, y):
    return -p.gather(1, y[:, None]).log().mean()


def with_a_bad_loss(model, bad=12, steps=20):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        scale = 1e5 if step == bad else 1.0
        loss = nll((model(x) * scale).softmax(-1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.rand(1)


def with_a_bad_gradient(model, bad=12, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        distance = (model(torch.randn(16, 8)) * (step != bad)).pow(2).sum(-1)
        loss = distance.sqrt().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.rand(1)


def found(tmp_path, train, model=None, **options):
    """The finding about what is not finite, and what was trained with and without us."""
    bare = build() if model is None else model()
    truth = train(bare)
    watched = build() if model is None else model()
    with watch(watched, to=tmp_path / "run", **options) as run:
        assert torch.equal(train(watched), truth)  # the random numbers
    for (name, a), (_, b) in zip(bare.state_dict().items(), watched.state_dict().items(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()), name
    findings = [one for one in run.open().findings().to_pylist() if one["rule"] == "non-finite values"]
    return findings[0] if findings else None


def test_a_loss_in_a_step_that_is_not_sampled(tmp_path):
    one = found(tmp_path, with_a_bad_loss, every=10, dense=3)
    assert one["step"] == 12
    assert "-inf was made by log" in one["text"] and "in nll: log of 0" in one["text"]
    assert ".log().mean()" in one["why"]


def test_a_gradient_in_a_step_that_is_not_sampled(tmp_path):
    one = found(tmp_path, with_a_bad_gradient, every=10, dense=3)
    assert one["step"] == 12
    assert "the gradient of sqrt" in one["text"] and "division by zero" in one["text"]
    assert "distance.sqrt()" in one["why"]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x):
        hidden = self.inner(x) * self.scale
        total = torch.exp(hidden)
        return total


def in_the_model(model, bad=12, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        model.scale = 1e4 if step == bad else 1.0
        loss = checkpoint(model, torch.randn(16, 8), use_reentrant=False).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.rand(1)


def deep():
    torch.manual_seed(0)
    return Deep()


def test_inside_a_checkpointed_model(tmp_path):
    one = found(tmp_path, in_the_model, deep, every=10, dense=3)
    assert one["step"] == 12
    assert "exp in ./total" in one["text"] and "more than float32 can hold" in one["text"]


def with_a_bad_batch(model, bad=12, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        x[3, 2] = torch.nan if step == bad else 0.0
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.rand(1)


def test_a_bad_batch(tmp_path):
    one = found(tmp_path, with_a_bad_batch, every=10, dense=3)
    assert one["step"] == 12 and "NaN came in with input 0" in one["text"]


def with_next(model, bad=12, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches = iter([torch.randn(16, 8) * (1 if k != bad else 1e30) for k in range(steps)])
    for _ in range(steps):
        loss = model(next(batches)).pow(2).mean().log().exp()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.rand(1)


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def test_a_batch_that_is_taken_in_the_same_line_is_not_taken_twice(tmp_path):
    one = found(tmp_path, with_next, linear, every=10, dense=3)
    assert one["step"] == 12 and "next" in one["text"]


def under_a_scaler(model, steps=40):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=100)
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.rand(1)


def test_steps_that_a_scaler_leaves_out_are_no_findings(tmp_path):
    one = found(tmp_path, lambda model: under_a_scaler(model, 10), every=10, dense=3)
    assert one is None


def accumulated(model, bad=5, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(3):
            out = model(torch.randn(16, 8))
            loss = (out * (step != bad or part != 2)).pow(2).sum(-1).sqrt().mean() / 3
            loss.backward()
        optimizer.step()
    return torch.rand(1)


def test_the_last_of_several_micro_batches(tmp_path):
    one = found(tmp_path, accumulated, every=10, dense=3)
    assert one["step"] == 5 and "the gradient of sqrt" in one["text"]


def test_all_is_well(tmp_path):
    assert found(tmp_path, lambda model: with_a_bad_loss(model, bad=-1), every=10, dense=3) is None


def test_nothing_is_kept_of_what_is_on_a_device_that_is_not_looked_at():
    births, model = Births(Guard(print), Models(), None), build()
    births.called(model, (torch.randn(2, 8),), {})
    assert len(births._calls) == 1
    births.step_ended()
    births.pass_begins(torch.zeros((), device="meta"), False)
    births.called(model, (torch.randn(2, 8),), {})
    assert births._calls == [] and births.step_ended() is None
