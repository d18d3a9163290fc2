"""edit at grad(...) where one tensor is at several sites: leaves, arguments, calls, what is handed on."""

import contextlib

import pytest
import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import add, scale, zero
from tests.verbs.models import Gate, X


def test_one_of_several_inputs_that_are_one_tensor():
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    q = torch.randn(2, 3, 4, requires_grad=True)
    copies = [q.detach().clone().requires_grad_() for _ in range(3)]
    attention(*copies)[0].sum().backward()
    with edit(attention, {"grad(.:in[0])": zero()}):
        attention(q, q, q)[0].sum().backward()
    torch.testing.assert_close(q.grad, copies[1].grad + copies[2].grad)
    q.grad = None
    with edit(attention, {"grad(.:in)": scale(2.0)}):
        attention(q, q, q)[0].sum().backward()
    torch.testing.assert_close(q.grad, 2 * sum(c.grad for c in copies))


def test_the_same_tensor_in_two_leaves_is_edited_at_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x):
            y = self.f(x)
            return y, y

    model = Twice()
    with edit(model, {"grad(.:out[0])": zero()}):
        first, second = model(X)
        (first.sum() + 7 * second.sum()).backward()
    torch.testing.assert_close(model.f.bias.grad, torch.full((4,), 21.0))
    model.zero_grad()
    with edit(model, {"grad(.)": scale(2.0)}):  # both leaves at once: the tensor's gradient once
        first, second = model(X)
        (first.sum() + 7 * second.sum()).backward()
    torch.testing.assert_close(model.f.bias.grad, torch.full((4,), 48.0))


def test_one_tensor_that_passes_a_site_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            y = self.drop(x * 1)
            z = self.drop(y)
            return (y * 3 + z * 5).sum()

    class Again(nn.Module):
        def forward(self, x, n=2):
            return x * 1 if n == 0 else self(x, n - 1) + x * 10

    x = torch.ones(1, requires_grad=True)
    for address in ("grad(drop:in)", "grad(drop)"):
        model = Twice().eval()
        with edit(model, {address: scale(2.0)}):
            assert torch.autograd.grad(model(x), x)[0].item() == (5 * 2 + 3) * 2
    model = Again()
    with edit(model, {"grad(.:in[0])": scale(2.0)}):
        assert torch.autograd.grad(model(x).sum(), x)[0].item() == ((2 + 10) * 2 + 10) * 2


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_handed_on_with_edits_on_both_sides(order):
    model, x = nn.Sequential(nn.Identity()), torch.ones(1, requires_grad=True)
    outer = dict([("grad(0)", add(1.0)), ("grad(0:in)", scale(1.0))][::order])
    with edit(model, outer), edit(model, {"grad(0)": scale(10.0)}):
        model(x).sum().backward()
    assert x.grad.item() == 20


class Pair(nn.Module):
    """Returns one tensor twice, or a value and what it made of it."""

    def __init__(self, second):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.second = second

    def forward(self, x):
        h = self.fc(x)
        return h, self.second(h)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "edits",
    [
        {"grad(.[0])": scale(2.0), "grad(.[1])": scale(3.0)},
        {"grad(.[1])": scale(3.0), "grad(.[0])": scale(2.0)},
        {".[0]": scale(5.0), "grad(.[1])": scale(3.0)},
        {".[1]": scale(5.0), "grad(.[0])": scale(2.0)},
        {"grad(.[0])": scale(2.0)},
    ],
    ids=lambda edits: " ".join(edits),
)
def test_leaves_that_are_one_tensor_are_edited_apart(nested, edits):
    model = Pair(lambda h: h)

    def loss(first, second):
        return first.sum() + 10 * second.sin().sum()

    h = model.fc(X)
    first, last = h, h * 1
    if "grad(.[0])" in edits:
        first = Gate.apply(first * 1, lambda g: g * 2)
    if "grad(.[1])" in edits:
        last = Gate.apply(last * 1, lambda g: g * 3)
    truth = torch.autograd.grad(
        loss(first * 5 if ".[0]" in edits else first, last * 5 if ".[1]" in edits else last), model.fc.weight
    )[0]
    with contextlib.ExitStack() as stack:
        for one in [{key: change} for key, change in edits.items()] if nested else [edits]:
            stack.enter_context(edit(model, one))
        mine = torch.autograd.grad(loss(*model(X)), model.fc.weight)[0]
    torch.testing.assert_close(mine, truth)


def test_the_gradient_of_a_leaf_comes_from_all_users_also_by_way_of_another_leaf():
    model = Pair(nn.Linear(4, 2))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    h = Gate.apply(model.fc(y), lambda g: g * 3)
    (h.sum() + Gate.apply(model.second(h), lambda g: g * 3).sin().sum()).backward()
    with edit(model, {"grad(.)": scale(3.0)}), capture(model, "grad(.[0])") as seen:
        first, second = model(x)
        (first.sum() + second.sin().sum()).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert len(seen) == 1


def test_what_the_module_keeps_of_its_output_is_edited_too():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.gate = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            self.logits = self.gate(x)
            return self.fc(x), self.logits

    model, kept = Keeps(), []
    handle = model.register_forward_hook(lambda module, args, output: kept.append(output))
    with edit(model, {"grad(.)": zero()}):
        first, _ = model(X)
        (first.sum() + model.logits.pow(2).sum() + kept[0][1].sum()).backward()
    handle.remove()
    assert not model.gate.weight.grad.any() and not model.fc.weight.grad.any()


def test_one_argument_of_several_that_are_one_tensor_beside_an_edit_of_all():
    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            h = self.fc(x)
            return self.attention(h, h, h)[0].pow(2).sum()

    model, x = SelfAttention(), torch.randn(2, 3, 4)
    h = model.fc(x)
    truth = torch.autograd.grad(model.attention(h.detach(), h, h)[0].pow(2).sum(), model.fc.weight)[0]
    with edit(model, {"grad(attention:in)": scale(1.0), "grad(attention:in[0])": zero()}):
        mine = torch.autograd.grad(model(x), model.fc.weight)[0]
    torch.testing.assert_close(mine, truth)


class Both(nn.Module):
    """Hands its input on, beside what it makes of it."""

    def forward(self, x):
        return x, x * 3


@pytest.mark.parametrize("mixed", [False, True], ids=["nested", "one session"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    "more",
    [{}, {"grad(0:in)": scale(1.0)}, {"0:in": scale(1.0)}, {"0:in": lambda v: v, "grad(0:in)": scale(1.0)}],
    ids=", ".join,
)
def test_an_input_that_is_handed_on_is_older_than_the_call_although_it_was_edited(more, outside, mixed):
    model, x = nn.Sequential(Both()), torch.ones(2, requires_grad=True)
    sessions = [{"grad(0[0])": scale(10.0)}, more] if not mixed else [{"grad(0[0])": scale(10.0), **more}]
    with contextlib.ExitStack() as stack:
        for changes in reversed(sessions) if outside else sessions:
            stack.enter_context(edit(model, changes))
        a, b = model(x * 1)
        (a.sum() + b.sum()).backward()
    assert x.grad.tolist() == [13, 13]


def test_an_input_that_is_handed_on_by_a_module_that_calls_itself():
    class Twice(nn.Module):
        def forward(self, x, again=True):
            if again:
                a, b = self(x, False)
                return a * 2, x * 3 + b
            return x, x * 5

    model, x = Twice(), torch.ones(2, requires_grad=True)
    with edit(model, {"grad(.:out[0]@1)": scale(10.0), ".:in[0]": scale(1.0)}):
        sum(part.sum() for part in model(x * 1)).backward()
    assert x.grad.tolist() == [28, 28]
