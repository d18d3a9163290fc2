"""Optimizers that there are, and frames in which one steps."""

import gc
import sys

import torch
from torch import nn

from tenterhook.platform.optimizers import (
    all_optimizers,
    closure_in,
    found_inf,
    is_stepping,
    look_for_optimizers,
    note_optimizer,
    unscales,
)


def test_an_optimizer_is_found_among_all_objects():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert all(one is not optimizer for one in all_optimizers())
    look_for_optimizers()
    assert any(one is optimizer for one in all_optimizers()), "Optimizer.step has no `hooked` any more"
    key = id(optimizer)
    del optimizer
    gc.collect()
    assert all(id(one) != key for one in all_optimizers())


def test_an_optimizer_tells_of_its_first_group_when_it_is_made(monkeypatch):
    inner = torch.optim.Optimizer.add_param_group
    monkeypatch.setattr(
        torch.optim.Optimizer, "add_param_group", lambda self, group: (note_optimizer(self), inner(self, group))[1]
    )
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters())
    assert any(one is optimizer for one in all_optimizers()), "Optimizer.__init__ does not call add_param_group"


def test_a_step_is_seen_from_inside():
    model = nn.Linear(1, 1)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    found = []

    def closure():
        frame = sys._getframe()
        found.append((is_stepping(frame), is_stepping(frame, optimizer), is_stepping(frame, other)))
        return model(torch.ones(1, 1)).sum()

    optimizer.step(closure)
    assert found == [(True, True, False)], "an optimizer's step no longer runs in a wrapper with `self`"
    assert not is_stepping(sys._getframe())


def test_closures_and_what_a_fused_optimizer_is_given():
    def closure():
        return None

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert closure_in((optimizer, closure), {}) == (1, closure)
    assert closure_in((optimizer,), {"closure": closure}) == ("closure", closure)
    assert closure_in((optimizer,), {}) == (0, None)
    assert found_inf(optimizer) is None and not unscales(optimizer)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.ones(1)
    assert found_inf(optimizer) is optimizer.found_inf and unscales(optimizer)
