"""edit: modules that write into their inputs or outputs, which the caller sees as without the edit."""

import pytest
import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import add, scale
from tests.verbs.models import X


def test_in_place_on_leaves_and_views():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 4))
            self.give, self.cut = nn.Identity(), nn.Identity()

        def forward(self, x):
            return (self.give(self.table) * x).sum() + self.cut(x.view(-1)[2:6]).sum()

    model, x = Model(), X.clone().requires_grad_()
    wipe = lambda v: (v.zero_(), None)[1]  # noqa: E731
    with edit(model, {"give": lambda v: v.mul_(3), "cut": wipe, "give:in": lambda v: v.add_(1)}):
        out = model(x)
    out.backward()
    assert torch.allclose(out, (6 * x).sum()) and torch.equal(model.table, torch.ones(3, 4))
    assert torch.allclose(model.table.grad, 3 * X) and torch.equal(x.grad, torch.full((3, 4), 6.0))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = x * 1
        out = self.relu(h)
        out += 1
        return h


def test_what_a_module_writes_into_its_edited_input_reaches_the_caller():
    model, x = InPlace(), torch.tensor([-1.0, 2.0], requires_grad=True)
    with edit(model, {"relu:in": scale(3.0)}):
        out = model(x)
    assert out.tolist() == [1.0, 7.0]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [0.0, 3.0]
    with edit(model, {"grad(relu:in)": scale(2.0)}):
        out = model(x)
        assert out.tolist() == [1.0, 3.0]
        assert torch.autograd.grad(out.sum(), x)[0].tolist() == [0.0, 2.0]
    with torch.no_grad(), edit(model, {"relu:in": lambda v: v * 3}):
        assert model(x).tolist() == [1.0, 7.0]


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = x * 1
        self.relu(h)
        return h


def test_several_sessions_at_the_input_of_a_module_that_writes_into_it():
    model, x = Writes(), torch.tensor([-1.0, 2.0], requires_grad=True)
    with edit(model, {"relu:in": scale(3.0), "grad(relu:in)": scale(1.0)}):
        out = model(x)
        out.sum().backward()
        assert out.tolist() == [0, 6] and x.grad.tolist() == [0, 3]
    with edit(model, {"relu:in": scale(3.0), "relu:in[0]": add(1.0)}):
        assert model(x).tolist() == [0, 7]
    with edit(model, {"relu:in": scale(3.0)}), edit(model, {"relu:in": add(1.0)}):
        assert model(x).tolist() == [0, 7]
    x = x.detach()
    with edit(model, {"relu:in": scale(2.0)}, frozen=True), capture(model, "grad(relu:in)", frozen=True):
        assert model(x).tolist() == [0, 4]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, edit(model, {"relu:in": scale(3.0)}):
            assert model(x).tolist() == [0, 6]
        with mode, edit(nn.Identity(), {".:in": scale(3.0)}) as edits:
            assert edits._model(x).tolist() == [-3, 6]
        assert x.tolist() == [-1, 2]


def test_a_call_that_failed_is_forgotten():
    class Fails(nn.Module):
        def forward(self, x, fail):
            x.mul_(3)
            if fail:
                raise ValueError
            return x + 1

    model, a, b = Fails(), torch.ones(2), torch.ones(2)

    def go(x, fail):
        return model(x, fail)

    with edit(model, {".:in[0]@0": scale(2.0)}):
        with pytest.raises(ValueError):
            go(a, True)
        go(b, False)
    assert a.tolist() == [1, 1] and b.tolist() == [3, 3]


def test_a_module_may_write_into_a_leaf_where_it_says_no_grad():
    class Clamps(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                x.clamp_(max=1)
            return x * 2

    model, x = Clamps(), torch.tensor([0.5, 3.0], requires_grad=True)
    with edit(model, {".:in": scale(1.0)}):
        model(x)
    assert x.tolist() == [0.5, 1.0]


def test_nan_in_inference_mode_is_no_write_into_an_input():
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3))
    with torch.inference_mode():
        x = torch.ones(3)
        with edit(model, {"1:in": lambda v: v * float("nan")}):
            assert model(x).isnan().all()
    assert torch.equal(x, torch.ones(3))


def test_what_a_module_writes_into_its_edited_input_reaches_the_caller_under_vmap():
    class Reads(Writes):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

    x = torch.tensor([[-1.0, float("nan"), 2.0], [3.0, -4.0, 5.0]])
    for model, truth in ((Writes(), x.relu() * 2), (Reads(), x)):
        with edit(model, {"relu:in": scale(2.0)}):
            for transformed in (
                torch.vmap(model),
                torch.vmap(torch.vmap(model)),
                torch.vmap(model, in_dims=1, out_dims=1),
            ):
                assert torch.equal(transformed(x).nan_to_num(7), truth.nan_to_num(7))
            total = torch.func.grad(lambda x, f: torch.vmap(f)(x).nan_to_num().sum())(x, model)
            assert torch.equal(total[1], torch.tensor([2.0, 0.0, 2.0]) if truth is not x else torch.ones(3))
