"""The gradient of an input is the module's own share, also where one tensor is at several places."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import capture
from tenterhook.values.tree import leaves
from tests.hooks.models import x


class Residual(nn.Module):
    """Several users of one tensor, one of them in place."""

    def __init__(self, first):
        super().__init__()
        self.a, self.b = first, nn.Linear(4, 4)

    def forward(self, x):
        h = x * 2
        earlier = h * 10
        return self.a(h) + earlier + self.b(h)


@pytest.mark.parametrize("first", [nn.Tanh(), nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True)])
def test_the_gradient_of_an_input_is_the_modules_own_share(first):
    model = Residual(first)
    with capture(model, "grad(a:in)", "grad(b:in)") as seen:
        out = model(x.clone().requires_grad_())
        out.pow(2).sum().backward()
    h = (x * 2).requires_grad_()
    mine = F.tanh(h) if isinstance(first, nn.Tanh) else F.leaky_relu(h, getattr(first, "negative_slope", 0.0))
    after = mine if getattr(first, "inplace", False) else h
    upstream = 2 * out.detach()
    assert torch.equal(out, mine + h * 10 + model.b(after))
    total = upstream.clone()
    if getattr(first, "inplace", False):  # what b does to its input flows through a
        total += upstream @ model.b.weight
    assert torch.allclose(seen["grad(a:in)"], torch.autograd.grad(mine, h, total)[0])
    assert torch.allclose(seen["grad(b:in)"], upstream @ model.b.weight)


def test_a_module_that_uses_its_input_before_it_writes_into_a_part_of_it():
    class Messy(nn.Module):
        def forward(self, x):
            y = x.exp()
            x[:, 1].mul_(3)
            x.add_(1)
            return y + x**2

    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.messy = Messy()

        def forward(self, x):
            whole = torch.cat([x, x * 2], 1)
            view = whole[:, 2:6]
            return self.messy(view).sum() + whole.sum()

    model = Host()
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(messy:in)", "messy:in") as seen:
        loss = model(leaf)
        loss.backward()
    v = seen["messy:in"].requires_grad_()
    scaled = torch.stack([v[:, 0], v[:, 1] * 3, v[:, 2], v[:, 3]], 1) + 1
    # own share: through its output, and through what it left in the caller's memory
    own = (v.exp() + scaled**2).sum() + scaled.sum()
    (truth,) = torch.autograd.grad(own, v)
    torch.testing.assert_close(seen["grad(messy:in)"], truth)
    bare = x.clone().requires_grad_()
    Host()(bare).backward()
    assert torch.equal(leaf.grad, bare.grad)


def test_one_tensor_passed_twice_stays_one_tensor():
    class SelfAttention(nn.Module):
        def forward(self, q, k, v):
            assert q is k and k is v
            return q * k + v

    model = nn.Module()
    model.attn = SelfAttention()
    model.forward = lambda x: model.attn(x, x, v=x)
    with capture(model, "grad(attn:in[q])") as seen:
        model(x.clone().requires_grad_()).sum().backward()
    torch.testing.assert_close(seen["grad(attn:in[q])"], 2 * x + 1)


def test_lists_that_the_module_changes_stay_the_callers():
    class Appends(nn.Module):
        def forward(self, items):
            items.append(items[0] * 2)
            return items[0] * 3

    model = Appends()
    items = [x.clone().requires_grad_() * 1]
    with capture(model, "grad(.:in[0][0])") as seen:
        (model(items) + items[1]).sum().backward()
    assert len(items) == 2
    assert torch.equal(seen["grad(.:in[0][0])"], torch.full_like(x, 5.0))


class Hides(nn.Module):
    """Uses its input in ways that its output does not show."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        hidden = x.pow(3).sum()
        if self.way == "attribute":
            self.aux = hidden
        elif self.way == "list":
            self.aux = {"losses": [hidden]}
        elif self.way == "object":
            return x * 2, SimpleNamespace(inner=SimpleNamespace(loss=hidden))
        return x * 2


@pytest.mark.parametrize("way", ["attribute", "list", "object"])
def test_uses_that_the_output_does_not_show(way):
    model, h = Hides(way), x.clone().requires_grad_() * 1
    with capture(model, "grad(.:in)") as seen:
        out = model(h)
        hidden = {
            "attribute": lambda: model.aux,
            "list": lambda: model.aux["losses"][0],
            "object": lambda: out[1].inner.loss,
        }
        loss = (out[0] if way == "object" else out).sum() + hidden[way]()
        (loss + h.sum() * 100).backward()
    torch.testing.assert_close(seen["grad(.:in)"], 2 + 3 * x**2)


def test_shares_in_a_worker_thread_and_of_a_view_made_before_a_write():
    class Two(nn.Module):
        def forward(self, a, b):
            return a * 2 + b * 5

    model, layer = Two(), nn.Linear(4, 4)
    h = layer(x)
    k = h * 7
    found = []

    def work():
        with capture(model, "grad(.:in)") as seen:
            model(h, k).sum().backward()
        found.extend(g.unique().item() for g in seen["grad(.:in)"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [2.0, 5.0]
    base = layer(x)
    view = base[:, :2]
    base.mul_(2)
    split = nn.Module()
    split.forward = lambda v, b: (v * 3).sum() + (b * 5).sum()
    with capture(split, "grad(.:in)") as seen:
        split(view, base).backward()
    assert seen["grad(.:in)"][0].unique().item() == 3.0
    assert seen["grad(.:in)"][1].unique().item() == 5.0


def test_a_leaf_that_is_handed_on():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(0:in)", "grad(0)") as seen:
        for _ in range(2):
            model(leaf).sum().backward()
    assert len(seen.calls("grad(0:in)")) == len(seen.calls("grad(0)")) == 2
    torch.testing.assert_close(sum(seen.calls("grad(0:in)")), leaf.grad)


def test_frozen_and_one_tensor_passed_twice():
    model = nn.Module()
    model.forward = lambda a, b: a * 2 + b * 3
    for leaf, options in ((x, {"frozen": True}), (x.clone().requires_grad_(), {})):
        with capture(model, "grad(.:in)", **options) as seen:
            model(leaf, leaf).sum().backward()
        assert [g.unique().item() for g in seen["grad(.:in)"]] == [5.0, 5.0]


def test_a_share_is_what_it_was_when_it_came():
    """Somebody's hook, further back, writes into the gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = model[0].register_forward_hook(
        lambda m, a, out: out.register_hook(lambda g: g.clamp_(-0.01, 0.01)) and None
    )
    with capture(model, "grad(1:in)", "grad(1)") as seen:
        model(x).sum().backward()
    handle.remove()
    torch.testing.assert_close(seen["grad(1:in)"], seen["grad(1)"] @ model[1].weight)


@dataclasses.dataclass(slots=True)
class Slotted:
    a: object
    b: object = None


def deep(value, levels=8):
    return value if levels == 0 else {"in": deep(value, levels - 1)}


@pytest.mark.parametrize("wrap", [Slotted, deep, lambda t: [t] * 2500], ids=["slots", "deep", "long"])
def test_shares_through_any_structure(wrap):
    model = nn.Module()
    model.forward = lambda h: (h * 1.5, wrap(h * 2))
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(.:in)") as seen:
        first, rest = model(leaf * 1)
        (first.sum() + next(iter(leaves(rest)))[1].sum()).backward()
    assert torch.equal(seen["grad(.:in)"], torch.full_like(x, 3.5))


def test_sparse_and_dense_shares_add_up():
    model = nn.Module()
    model.forward = lambda w: F.embedding(torch.tensor([0, 1]), w, sparse=True).sum() + w.pow(2).sum()
    weight = torch.randn(3, 2, requires_grad=True)
    with capture(model, "grad(.:in)") as seen:
        model(weight).backward()
    torch.testing.assert_close(seen["grad(.:in)"], weight.grad)


def test_one_leaf_at_two_places():
    model = nn.Module()
    model.forward = lambda h: (h, h * 2, h)
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(.)") as seen:
        a, b, c = model(leaf)
        (a.sum() + b.sum() + 3 * c.sum()).backward()
    assert [g.unique().item() for g in seen["grad(.)"]] == [6.0, 1.0, 6.0]


def test_passes_that_need_only_some_of_the_users():
    model = nn.Module()
    model.forward = lambda h: (h * 2, h * 3)
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(.:in)") as seen:
        a, b = model(leaf * 1)
        for loss in (a, b, a + b):
            loss.sum().backward(retain_graph=True)
    assert [g.unique().item() for g in seen.calls("grad(.:in)")] == [2.0, 3.0, 5.0]


def test_an_input_that_is_used_and_handed_on_shows_all_users_and_says_so():
    model = nn.Module()
    model.skips = nn.Module()
    model.skips.forward = lambda h: (h * 2, h)
    model.plain = nn.Linear(4, 4)
    model.forward = lambda h: model.plain(model.skips(h)[0]).sum() + 10 * h.sum()
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(skips:in)", "grad(plain:in)") as seen:
        model(leaf * 1).backward()
    assert torch.equal(seen["grad(skips:in)"], leaf.grad)
    assert seen.report().notes == [
        "grad(skips:in): the module hands this input on, so the gradient is that of all users of the tensor"
    ]
