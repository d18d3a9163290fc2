"""Compiled models: what is not finite is seen under torch.compile, and localised eagerly, which is said."""

import pytest
import torch
from torch import nn

from tenterhook import open_run, watch
from tenterhook.record.watch import Options, Recording
from tests.record.test_births_by_kind import BAD, scale


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.layer(x)
        spread = torch.exp(hidden)
        return self.out(spread)


def train(model, compiled):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(10):
        x = torch.randn(8, 8) * (1e4 if step == BAD else 1.0)
        loss = compiled(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_with_a_bad_gradient(model, compiled):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(10):
        x = torch.randn(8, 8)
        loss = (compiled(x) * scale(step)).pow(2).sum(-1).sqrt().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def findings_of(folder):
    return [one for one in open_run(folder).findings().to_pylist() if one["rule"] == "non-finite values"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_compiled_model(tmp_path, backend, way):
    torch.compiler.reset()
    model = Deep()
    if way == "run":
        recording = Recording(tmp_path / "run", Options(every=100, dense=2), None, [])
        recording.recorder.install(discover=True)
        try:
            train(model, torch.compile(model, backend=backend))
        finally:
            recording.close("finished")
    else:
        compiled = torch.compile(model, backend=backend)
        with watch(compiled, to=tmp_path / "run", every=100, dense=2):
            train(model, compiled)
    (one,) = findings_of(tmp_path / "run")
    assert one["step"] == BAD and "was made by exp in" in one["text"] and "spread" in one["text"], one
    assert "what was compiled ran eagerly to show this" in one["why"]
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_gradient_behind_a_compiled_model(tmp_path):
    torch.compiler.reset()
    model = Deep()
    compiled = torch.compile(model, backend="aot_eager")
    with watch(compiled, to=tmp_path / "run", every=100, dense=2):
        train_with_a_bad_gradient(model, compiled)
    (one,) = findings_of(tmp_path / "run")
    assert one["step"] == BAD and "the gradient of sqrt" in one["text"] and "eagerly" in one["why"]


def test_compiled_code_is_not_compiled_again_after_a_replay(tmp_path):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = Deep()
    compiled = torch.compile(model, backend="aot_eager")
    train(model, compiled)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with watch(compiled, to=tmp_path / "run", every=100, dense=2):
        train(model, compiled)
    assert len(findings_of(tmp_path / "run")) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("in_place", [True, False])
def test_a_call_that_cannot_be_seen_is_told_of_once(tmp_path, in_place):
    torch.compiler.reset()
    model = Deep()
    if in_place:
        model.compile(backend="aot_eager")
    compiled = model if in_place else torch.compile(model, backend="aot_eager")
    with watch(model, to=tmp_path / "run", every=100, dense=2):
        train(model, compiled)
    (one,) = findings_of(tmp_path / "run")
    assert one["step"] == BAD and "watch what the training calls" in one["text"]
