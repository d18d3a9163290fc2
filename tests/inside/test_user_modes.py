"""Function modes of the user's, inside a forward that is looked into."""

import contextlib

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tenterhook import capture, edit
from tenterhook.changes import add


class DoublesAll(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, torch.Tensor) else out


class DoublesSome(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        with contextlib.nullcontext():
            out = func(*args, **(kwargs or {}))
            if func is torch.add:
                out = out * 2
            return out


class Logs(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            return func(*args)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            out.abs() + 1
            norm = out.norm()
            self.bad = norm.isnan().any()
        return out


class Times(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.calls = getattr(self, "calls", 0) + 1


class Keeps(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.out, number = func(*args, **(kwargs or {})), 1
        result = self.out
        self.log = lambda: (result, number)
        return result


class Inherits(Logs):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        result = out
        return result


class UnderMode(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        with self.mode():
            y = torch.add(x, 1)
            y += 1
            y[0] = 5
        z = y - 1
        return z


@contextlib.contextmanager
def two_modes():
    with Times(), Logs():
        yield


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Logs, Times, Keeps, Inherits, two_modes])
@pytest.mark.parametrize("asked", [("./y", "./z"), ("./**",)])
def test_a_mode_of_the_users_that_changes_nothing_is_not_in_the_way(mode, asked):
    model, x = UnderMode(mode), torch.ones(2)
    with capture(model, *asked) as seen:
        model(x)
    values = {name: seen[name].tolist() for name in seen if name != "./x"}
    assert values == {"./y#0": [2, 2], "./y#1": [3, 3], "./y#2": [5, 3], "./z": [4, 2]}
    with edit(model, {"./y#0": add(10.0)}):
        assert model(x).tolist() == [4, 12]


@pytest.mark.parametrize("mode", [DoublesAll, DoublesSome])
def test_what_a_mode_of_the_users_makes_of_a_result_is_the_value_of_the_variable(mode):
    model, x = UnderMode(mode), torch.ones(2)
    with capture(model, "./y") as seen:
        model(x)
    with mode():
        truth = torch.add(x, 1)
    assert torch.equal(seen["./y#0"], truth)
