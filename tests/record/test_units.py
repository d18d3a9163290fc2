"""Dead units of ReLUs: which axis has the units, and over which calls they are silent."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.sources.units import axis_of_units
from tests.record.small import rows


class Twice(nn.Module):
    """One ReLU for two things, of which the first may be dead."""

    def __init__(self, widths, bias=0.0):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, widths[0]), nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], 4)
        self.relu = nn.ReLU()
        nn.init.constant_(self.a.bias, bias)

    def forward(self, x):
        return self.c(self.relu(self.b(self.relu(self.a(x)))))


def dead_in(model, tmp_path, *shape):
    with watch(model, to=tmp_path / "run", every=1) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(*shape)).pow(2).mean().backward()
            optimizer.step()
    return [row["dead"] for row in rows(run.open(), what="output") if row["dead"] is not None]


def test_one_relu_for_several_things(tmp_path):
    assert max(dead_in(Twice((64, 32)), tmp_path / "alive", 64, 8)) < 0.2
    assert set(dead_in(Twice((32, 32), bias=-50.0), tmp_path / "dead", 64, 8)) == {1.0}


def test_a_relu_in_a_loop_is_one_layer(tmp_path):
    class Recurrent(nn.Module):
        """At its first step no unit of the first half fires, at its second none of the other."""

        def __init__(self):
            super().__init__()
            self.linear, self.relu = nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            shift = torch.tensor([-50.0] * 4 + [0.0] * 4)
            for by in (shift, shift.flip(0)):
                x = self.relu(self.linear(x) + by)
            return x

    assert max(dead_in(Recurrent(), tmp_path, 64, 8)) < 0.2


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(20, affine=False)])
def test_the_units_of_a_convolution_are_its_channels(norm, tmp_path):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.tensor([-50.0] * 18 + [0.0] * 2).view(20, 1))

        def forward(self, x):
            return x + self.by

    model = nn.Sequential(nn.Conv1d(4, 20, 3), norm(), Shifted(), nn.ReLU(), nn.Flatten(), nn.Linear(600, 2))
    assert dead_in(model, tmp_path, 8, 4, 32) == [pytest.approx(0.9)] * 5
    tokens = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
    nn.init.constant_(tokens[0].bias[:15], -50.0)
    assert dead_in(tokens, tmp_path / "tokens", 8, 6, 4) == [pytest.approx(0.75)] * 5


class Moved(nn.Module):
    """Its channels are last."""

    def __init__(self, layer, move):
        super().__init__()
        self.layer, self.move, self.relu, self.last = layer, move, nn.ReLU(), nn.Linear(20, 2)
        nn.init.constant_(layer.bias[:15], -50.0)

    def forward(self, x):
        return self.last(self.relu(self.move(self.layer(x))))


@pytest.mark.parametrize(
    ("layer", "move", "shape"),
    [
        (nn.Linear(4, 20), lambda h: h, (8, 5, 6, 4)),
        (nn.Conv1d(4, 20, 3), lambda h: h.transpose(1, 2), (8, 4, 9)),
        (nn.Conv1d(4, 20, 3), lambda h: h.permute(2, 0, -2), (8, 4, 9)),
        (nn.Conv2d(4, 20, 3), lambda h: h.flatten(2).transpose(1, -1), (8, 4, 6, 6)),
        (nn.Conv2d(4, 20, 3), lambda h: h.permute(0, 2, 3, 1).contiguous(), (8, 4, 6, 6)),
        (nn.Conv2d(4, 20, 3), lambda h: h.permute(0, 2, 3, 1).flatten(1, 2), (8, 4, 6, 6)),
        (nn.Linear(4, 20), lambda h: h.view(4, 2, 5, 20), (8, 5, 4)),
    ],
)
def test_units_may_be_on_any_axis(layer, move, shape, tmp_path):
    assert dead_in(Moved(layer, move), tmp_path, *shape) == [pytest.approx(0.75)] * 5


@pytest.mark.parametrize(
    ("layer", "then", "shape", "axis"),
    [
        (nn.Linear(6, 256), nn.Sequential(nn.Unflatten(1, (16, 4, 4)), nn.BatchNorm2d(16)), (8, 6), 1),
        (nn.Linear(6, 256), nn.Unflatten(1, (16, 4, 4)), (8, 6), 1),
        (nn.Linear(6, 80), nn.Sequential(nn.Unflatten(1, (16, 5)), nn.BatchNorm1d(16)), (8, 6), 1),
        (nn.Linear(6, 16), lambda h: h[..., None, None], (8, 6), 1),
        (nn.Linear(6, 16, bias=False), lambda h: h, (8, 5, 4, 6), 3),
        (nn.Linear(6, 16), lambda h: h.t(), (8, 6), 0),
        (nn.Conv1d(6, 16, 3), nn.Upsample(scale_factor=2, mode="linear"), (8, 6, 9), 1),
        (nn.Conv1d(6, 16, 3), nn.InstanceNorm1d(16), (8, 6, 9), 1),
        (nn.Conv2d(6, 16, 3), lambda h: h, (6, 9, 9), 0),
        (nn.Conv2d(6, 16, 3), lambda h: h.view(4, 2, 16, 7, 7), (8, 6, 9, 9), 2),
    ],
)
def test_which_axis_has_the_units(layer, then, shape, axis):
    assert axis_of_units(F.relu(then(layer(torch.randn(shape))))) == axis


def test_a_value_that_is_no_number_does_not_silence_a_unit(tmp_path):
    class Broken(nn.Module):
        def forward(self, x):
            return torch.cat([x[1:], torch.full_like(x[:1], math.nan)])

    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(8, 16), Broken(), nn.ReLU(), nn.Linear(16, 2)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with watch(model, to=tmp_path / str(dtype), every=1) as run:
            for _ in range(16):
                optimizer.zero_grad()
                model(torch.randn(32, 8, dtype=dtype))[:-1].float().pow(2).mean().backward()
                for parameter in model.parameters():
                    parameter.grad.zero_()
                optimizer.step()
        dead = [row["dead"] for row in rows(run.open(), what="output") if row["dead"] is not None]
        assert dead and max(dead) < 0.2
