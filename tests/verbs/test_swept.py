"""The outputs of a sweep are a list that says what each edit did."""

import torch
from torch import nn

from tenterhook import sweep
from tenterhook.changes import at, zero
from tests.verbs.models import mlp

x = torch.randn(3, 4)


def test_a_sweep_shows_each_edit_and_how_far_it_moved_the_output():
    model = mlp()
    edits = [{}, {"0": at((..., 0), zero())}, {model[1]: lambda v: v * 2, "2:in": [zero(), torch.ones(8)]}]
    swept = sweep(model, x, edits)
    assert isinstance(swept, list) and len(swept) == 3 and torch.equal(swept[0], swept[:1][0])
    rows = [line.split() for line in repr(swept).splitlines()[3:]]
    clean = model(x)
    for row, output in zip(rows, swept, strict=True):
        apart = (output - clean).abs()
        assert abs(float(row[-2]) - apart.max().item()) < 0.01 * apart.max().item() + 1e-5
        assert abs(float(row[-1]) - apart.mean().item()) < 0.01 * apart.mean().item() + 1e-5
    assert rows[0][:2] == ["0", "none"] and "0: at((..., 0), zero())" in repr(swept)
    assert "ReLU: <lambda>, 2:in: [zero(), <8 float32>]" in repr(swept)


def test_outputs_that_are_structures_or_integers():
    class Both(nn.Module):
        def forward(self, x):
            y = x * 2
            return {"most": y.argmax(-1), "above": y > 0, "y": y}

    model = nn.Sequential(nn.Linear(4, 4), Both())
    swept = sweep(model, x, [{}, {"0": zero()}])
    assert "dict(most, above, y)" in repr(swept) and len(swept) == 2
    assert repr(sweep(mlp(), x, [])).splitlines()[0] == "the output under each of 0 edits"
