"""torch.jit: what is traced, and where scripts are made."""

import sys

import torch
from torch import nn

from tenterhook.platform.jit import SCRIPT, SCRIPTS_IN, is_compared, is_tracing, scripted, untraced


def test_a_trace_is_told_from_the_comparison_after_it():
    found = []

    class Net(nn.Module):
        def forward(self, x):
            found.append((bool(is_tracing()), is_compared(sys._getframe())))
            return x * 2

    Net()(torch.ones(2))
    torch.jit.trace(Net(), torch.ones(2))
    assert found[0] == (False, False)
    assert (True, False) in found, "torch.jit.trace does not show in _is_tracing"
    assert (False, True) in found, "torch.jit.trace no longer compares in _check_trace"


def test_what_is_computed_aside_is_no_part_of_a_trace():
    def function(x):
        with untraced():
            x * 100
        assert is_tracing()
        return x + 2

    kinds = [node.kind() for node in torch.jit.trace(function, torch.ones(2), check_trace=False).graph.nodes()]
    assert "aten::add" in kinds and "aten::mul" not in kinds


def test_scripts_are_made_in_one_function(monkeypatch):
    made = []
    inner = getattr(SCRIPTS_IN, SCRIPT)

    def outer(*args, **kwargs):
        made.append(scripted(args, kwargs))
        return inner(*args, **kwargs)

    monkeypatch.setattr(SCRIPTS_IN, SCRIPT, outer)
    model = nn.Sequential(nn.ReLU())
    torch.jit.script(model)
    assert made and made[0] is model, "torch.jit.script makes modules in another function"
