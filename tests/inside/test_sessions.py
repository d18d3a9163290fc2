# ruff: noqa: F841
"""Sessions within each other: who sees which value inside a forward, and what counts as an assignment."""

import torch
from torch import nn

from tenterhook import capture, edit, observe
from tenterhook.changes import add, scale, zero
from tests.inside.models import Late, Residual, X, module_of


def test_edits_of_a_variable_that_no_operation_made():
    model = Late()
    plain = model(X)
    with capture(model, "./residual") as before, edit(model, {"./residual": scale(3.0)}):
        with capture(model, "./residual") as between, edit(model, {"./residual": add(1.0)}):
            with capture(model, "./residual") as after:
                out = model(X)
    torch.testing.assert_close(out, plain + 2 * X + 1)
    for seen, value in ((before, X), (between, X * 3), (after, X * 3 + 1)):
        assert torch.equal(seen["./residual"], value)


def test_sessions_nest_and_a_capture_inside_sees_what_the_model_used():
    model = Residual()
    with edit(model, {"./y": zero()}), capture(model, "./y", "./h#0") as seen:
        model(X)
    assert torch.equal(seen["./y"], torch.zeros(3, 4)) and torch.equal(seen["./h#0"], model.fc.bias.expand(3, 4))
    with (
        capture(model, "./**") as outer,
        edit(model, {"./y": lambda v: v.cos() + 1}),
        observe(model, {"./z#0": lambda v, site: v.abs().max()}),
    ):
        model(X)
    assert not any("lambda" in address or "abs" in address or "cos" in address for address in outer)


def test_what_another_session_changes_is_no_further_assignment():
    def forward(self, x):
        h = self.fc(x)
        h = h * 2
        return h + 1

    model = module_of(forward, fc=nn.Linear(4, 4))
    for inner, made in (({"fc": add(100.0)}, model.fc(X) + 100), ({"./h#0": add(100.0)}, model.fc(X))):
        with capture(model, "./h") as seen, edit(model, inner):
            model(X)
        assert torch.equal(seen["./h#0"], made) and torch.equal(seen["./h#1"], (model.fc(X) + 100) * 2)
        assert len(seen.calls("./h")) == 2
        with edit(model, {"./h#1": scale(3.0)}), edit(model, inner):
            out = model(X)
        torch.testing.assert_close(out, (model.fc(X) + 100) * 6 + 1)


def test_what_is_changed_after_us_in_a_loop_is_no_further_assignment():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(3))

        def forward(self, x):
            y = torch.add(x, 1)
            for layer in self.layers:
                y = layer(y)
            for _ in range(2):
                y = torch.mul(y, 2)
            return torch.mul(y, 1)

    one, up = torch.ones(1), add(10.0)
    for change, truth in (
        ({"./y#0": up}, [2, 12, 12, 12, 24, 48]),
        ({"layers.1": up}, [2, 2, 12, 12, 24, 48]),
        ({"./y#4": up}, [2, 2, 2, 2, 4, 28]),
    ):
        model = Looped()
        with capture(model, "./y") as seen, edit(model, change):
            model(one)
        assert [float(value) for value in seen.calls("./y")] == truth
        with edit(model, {"./y#5": scale(0.0)}), edit(model, change):
            assert model(one) == 0
    model = Looped()
    with capture(model, "./y") as seen:
        handle = model.layers[1].register_forward_hook(lambda module, args, output: output + 10)
        model(one)
        handle.remove()
    assert [float(value) for value in seen.calls("./y")] == [2, 2, 12, 12, 24, 48]


def test_a_hook_that_is_newer_than_the_session_comes_before_the_variable():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            y = self.inner(x * 2)
            return y + 1

    model = Takes()
    with capture(model, "./y") as seen, edit(model, {"./y": add(100.0)}), capture(model, "./y") as after:
        handle = model.inner.register_forward_hook(lambda module, args, output: output * 3)
        assert model(torch.ones(1)) == 107
        handle.remove()
    assert seen["./y"] == 6 and after["./y"] == 106


def test_an_edit_of_an_inner_session_is_no_further_assignment_whatever_branch_lies_between():
    def forward(self, x, k=None):
        if k is None:  # noqa: SIM108
            b = x + 1
        else:
            b = k
        h = x * 1
        return b * 1

    model, one = module_of(forward), torch.ones(1)
    with edit(model, {"./b": scale(3.0)}), edit(model, {"./b": scale(10.0)}):
        assert model(one) == 60
    with capture(model, "./b") as seen, edit(model, {"./b": scale(10.0)}):
        model(one)
    assert seen.calls("./b") == [2]
