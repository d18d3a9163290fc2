# ruff: noqa: F841
"""Values under many names are copied once at a moment; what is written in between is seen, whoever writes it."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tenterhook import capture, edit, observe
from tenterhook.changes import scale

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 12)

    def scores(self, q, k):
        product = q @ k.transpose(0, 1)
        return product

    def forward(self, x):
        qkv = self.lin(x)
        q, k, v = qkv.split(4, dim=-1)
        scores = self.scores(q, k)
        same = scores
        scores *= 2
        late = scores.view(3, 3)
        out = late @ v
        return out


def memory(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_tensor_with_several_names_at_one_moment_is_copied_once_and_so_is_its_gradient():
    model = Attention()
    with capture(model, "./**", grad=True) as seen:
        model(X).sum().backward()
    q, k, v = model.lin(X).split(4, dim=-1)
    assert torch.equal(seen["./scores/product"], q @ k.T) and torch.equal(seen["./scores#0"], q @ k.T)
    assert torch.equal(seen["./scores#1"], q @ k.T * 2) and torch.equal(seen["./late"], q @ k.T * 2)
    assert len(memory(seen[name] for name in ("./scores/product", "./scores#0"))) == 1
    assert len(memory(seen[name] for name in ("./scores#0", "./scores#1", "./late"))) == 3
    assert len(memory(seen[f"grad(./{name})"] for name in ("scores/product", "scores#0"))) == 1
    late = torch.ones(3, 4) @ v.T
    assert torch.equal(seen["grad(./late)"], late) and torch.equal(seen["grad(./scores#0)"], 2 * late)
    assert torch.equal(seen["grad(./scores/product)"], 2 * late)


def test_what_is_copied_belongs_to_nobody_else():
    model = Attention()
    with capture(model, "./**") as seen:
        out = model(X)
    weights = memory([*model.parameters(), X, out])
    assert not weights & memory(seen[name] for name in seen)


def test_a_hook_of_the_users_between_two_names_is_seen_by_the_second():
    class Model(nn.Module):
        def part(self, x):
            y = x * 2
            y.register_hook(lambda grad: write_unseen(grad))
            return y

        def forward(self, x):
            z = self.part(x)
            w = z
            return w * 1

    model = Model()
    with capture(model, "./**", grad=True) as seen:
        model(X.clone().requires_grad_()).sum().backward()
    assert torch.equal(seen["grad(./part/y)"], torch.ones(3, 4))
    assert torch.equal(seen["grad(./w)"], torch.full((3, 4), 8.0))


def data(self, x):
    y = x * 2
    a = y.view(-1)
    y.data.mul_(3)
    return y.view(-1)


def numpy(self, x):
    y = x * 2
    y.detach().numpy()[:] = 7
    return y.view(-1)


def array(self, x):
    y = x * 2
    np.asarray(y.detach())[:] = 7
    return y.view(-1)


def pointer(self, x):
    y = x * 2
    ctypes.memset(y.data_ptr(), 0, 8)
    return y.view(-1)


def storage(self, x):
    y = x * 2
    y.untyped_storage().fill_(0)
    return y.view(-1)


def collective(self, x):
    y = x * 2
    write_unseen(y)  # as dist.all_reduce does
    z = y
    return z.view(-1)


def dlpack(self, x):
    y = x * 2
    torch.from_dlpack(y.detach()).fill_(5)
    return y.view(-1)


def alias_from_before(self, x):
    y = self.weight.t()
    write_unseen(self.alias)
    return self.weight.view(-1)


def of_numpy(self, x):
    y = torch.frombuffer(self.array, dtype=torch.float32)
    self.array += 1
    return y.view(2, 2)


def to_be_filled(self, x):
    y = torch.empty(2, 2)
    write_unseen(y)
    return y.view(-1)


def filled_by_the_module(self, x):
    y = self.inner(x)
    y = self.inner(x)
    return y.view(-1)


def other_data(self, x):
    y = x * 2
    a = y.view(-1)
    y.data = y.data * 3
    return y.view(-1)


def script(self, x):
    y = x * 2
    a = y.view(-1)
    triple_(y)
    return y.view(-1)


def applied(self, x):
    y = (x * 2).detach()
    a = y.view(-1)
    y.apply_(lambda v: v + 1)
    return y.view(-1)


def given_to_out(self, x):
    y = (x * 2).detach()
    a = y.view(-1)
    torch.add(y, 1, out=y)
    return y.view(-1)


def conjugate(self, x):
    y = torch.complex(x, x + 1)
    return y.conj()


def negative(self, x):
    y = x * 2
    return torch._neg_view(y)


def of_another_dtype(self, x):
    y = (x * 2).detach()
    return y.view(torch.int32)


def larger(self, x):
    y = (x * 2).detach().clone()
    a = y.view(-1)
    return y.resize_(9).fill_(1.0)


@torch.jit.script
def triple_(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mul_(3)


def write_unseen(tensor):
    """As a C++ extension does, which PyTorch does not know of."""
    with torch._C.DisableTorchFunction():
        tensor.data.fill_(8.0)


class Filling(nn.Module):
    def __init__(self):
        super().__init__()
        self.room, self.calls = torch.zeros(2, 2), 0

    def forward(self, x):
        self.calls += 1
        with torch._C.DisableTorchFunction():
            self.room.data.fill_(self.calls)
        return self.room


CASES = [collective, data, numpy, array, pointer, storage, dlpack, alias_from_before, of_numpy, to_be_filled]
CASES += [
    filled_by_the_module,
    other_data,
    script,
    applied,
    given_to_out,
    conjugate,
    negative,
    of_another_dtype,
    larger,
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("forward", CASES, ids=lambda f: f.__name__)
def test_what_was_written_unseen_is_seen(forward, grad):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))
            self.alias = self.weight.data
            self.array = np.ones((2, 2), dtype=np.float32)
            self.inner = Filling()

    Model.forward = forward
    model, x = Model(), torch.full((2, 2), 1.5, requires_grad=grad)
    with torch.set_grad_enabled(grad), capture(model, "./**") as seen:
        out = model(x).detach()
    last = list(seen)[-1]
    assert torch.equal(seen[last], out), last


def test_writing_into_what_was_captured_does_not_reach_what_is_captured_later():
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            seen["./y"].zero_()
            z = y.view(-1)
            return z

    model = Model()
    with capture(model, "./**") as seen:
        out = model(X)
    assert torch.equal(seen["./z"], out)


def test_memory_is_not_held_on_to_and_addresses_that_come_again_are_not_taken_for_it():
    def part(x, i):
        y = x * i
        return y.sum()

    class Model(nn.Module):
        def forward(self, x):
            for i in range(50):
                part(x, i)
            return x

    model = Model()
    with capture(model, "./**") as seen:
        model(X)
    assert all(torch.equal(seen[f"./part/y#{i}"], X * i) for i in range(50))


@pytest.mark.parametrize("look", ["capture", "edit", "observe"])
def test_what_was_seen_inside_is_let_go_without_the_garbage_collector(look):
    model, verbs = Attention(), {"capture": lambda: capture(model, "./**", "./q", grad=True)}
    verbs["edit"] = lambda: edit(model, {"./q": lambda v: v * 2, "grad(./v)": scale(2.0)})
    verbs["observe"] = lambda: observe(model, {"./**": lambda value, site: None})
    gc.collect()
    gc.disable()
    try:
        with verbs[look]() as seen:
            model(X).sum().backward()
        held = [weakref.ref(tap) for tap in seen._session.taps]
        seen = None
        assert held and not any(tap() for tap in held)
    finally:
        gc.enable()
