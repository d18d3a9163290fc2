"""torch.jit.script and torch.jit.trace beside a recording, and scripts that are recorded."""

import copy
import gc

import pytest
import torch
from torch import nn

from tenterhook import open_run, watch
from tenterhook.record.watch import Options, Recording
from tests.record.small import agrees, batches, net, rows, train


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
