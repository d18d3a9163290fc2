"""GradScalers: their scale, and the steps that they leave out."""

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tenterhook.platform.scalers import has_overflowed, note_scale, noted_scale, scale_of, scaler_classes


def test_subclasses_are_among_the_classes():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    assert {GradScaler, ShardedGradScaler} <= set(scaler_classes())


def test_the_scale_is_a_tensor_that_the_scaler_keeps():
    scaler = GradScaler("cpu", init_scale=8.0)
    loss = torch.ones((), requires_grad=True) * 2
    scaled = scaler.scale(loss)
    assert scale_of(scaler) == 8 and scaled == 16, "GradScaler no longer keeps its scale as `_scale`"
    assert scale_of(GradScaler("cpu", enabled=False)) is None
    note_scale(scaled, scale_of(scaler))
    assert noted_scale([scaled / 4]) is scale_of(scaler)
    assert noted_scale([loss]) is None


@pytest.mark.parametrize(("gradient", "left_out"), [(1.0, False), (float("inf"), True)])
def test_a_step_that_is_left_out_is_known_from_the_state(monkeypatch, gradient, left_out):
    found = []
    inner = GradScaler._maybe_opt_step

    def outer(self, optimizer, state, *args, **kwargs):
        found.append(has_overflowed(state))
        return inner(self, optimizer, state, *args, **kwargs)

    monkeypatch.setattr(GradScaler, "_maybe_opt_step", outer)
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 1)).sum() * gradient).backward()
    scaler.step(optimizer)
    assert found == [left_out], "GradScaler.step no longer passes (optimizer, state) to _maybe_opt_step"
    assert torch.equal(model.weight, before) == left_out
