"""The function mode: where it is on, its mark on frames, and when variables and modules are looked at."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tenterhook import capture, edit, observe
from tenterhook.changes import zero
from tenterhook.inside.engine import Inside
from tests.inside.models import Residual, X, module_of


def test_no_mode_is_on_where_no_inner_address_is_asked_for():
    model = Residual()
    with capture(model, "fc", "grad(fc)"), observe(model, {"fc": print}):
        model(X)
        assert torch._C._len_torch_function_stack() == 0
    with capture(model, "./y"):
        assert torch._C._len_torch_function_stack() == 1
        assert not model.fc._forward_hooks  # nothing but operations gives y its value
    with capture(model, "./h"):
        assert model.fc._forward_hooks
    assert torch._C._len_torch_function_stack() == 0


def test_modes_may_end_in_another_order_than_they_began():
    class Mine(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, mine = Residual(), Mine()
    first, second = capture(model, "./y"), edit(model, {"./y": zero()})
    a = first.__enter__()
    second.__enter__()
    with mine:
        model(X)
        first.__exit__(None, None, None)
        model(X)
        assert torch._C._len_torch_function_stack() == 2
    second.__exit__(None)
    assert torch._C._len_torch_function_stack() == 0
    assert len(a.calls("./y")) == 1 and torch.equal(a["./y"], X + 2)  # the outer session sees it as the model made it


def test_frames_keep_no_mark_and_modules_no_hook():
    model = Residual()
    ref = []

    class Counting(nn.Module):
        def forward(self, x):
            y = x + 1
            ref.append(weakref.ref(sys._getframe().f_trace))
            return y

    with capture(Counting(), "./y") as seen:
        seen._session.model()(X)
    gc.collect()
    assert ref[0]() is None
    with pytest.raises(ZeroDivisionError), edit(model, {"./y": lambda v: v / (1 // 0)}):
        model(X)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def looks_at(monkeypatch, model, address, *inputs):
    """How often variables were looked at in the second forward, and what was seen."""
    looks = []
    look = Inside._look_at_variables
    with capture(model, address) as seen:
        model(*inputs)
        monkeypatch.setattr(Inside, "_look_at_variables", lambda *args, **how: looks.append(1) or look(*args, **how))
        model(*inputs)
        monkeypatch.undo()
    return len(looks), [float(value) for value in seen.calls(f"{address}#0" if f"{address}#0" in seen else address)]


def test_variables_are_looked_at_where_they_may_have_changed_and_not_at_every_operation(monkeypatch):
    def given_by_a_call(self, x):
        for _ in range(100):
            x = x + 1
        y = x.relu()
        for _ in range(100):
            x = x + 1
        return x + y

    def taken_over(self, x):
        for _ in range(100):
            x = x + 1
        y = x
        for _ in range(100):
            x = x + 1
        return x + y

    for forward in (given_by_a_call, taken_over):
        looks, values = looks_at(monkeypatch, module_of(forward), "./y", torch.zeros(1))
        assert looks < 12
        assert values == [100, 100]


def test_modules_that_cannot_give_a_variable_its_value_have_no_hooks():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            y = self.a(x)
            z = torch.relu(y) + F.gelu(y)
            w = z.relu()
            v = self.pick(w)
            return self.b(v)

        def pick(self, x):
            return self.b(x)

    model = Several()

    def hooked(address):
        with capture(model, address) as seen:
            found = {name for name, module in model.named_modules() if module._forward_hooks}
            model(torch.ones(1))
        assert address in seen
        return found

    assert hooked("./y") == {"", "a"}
    assert hooked("./w") == {"", "a", "b"}
    assert hooked("./w") == {""}  # now it is known that z was a tensor
    assert hooked("./v") == {"", "a", "b"}
