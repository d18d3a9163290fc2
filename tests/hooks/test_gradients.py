"""Gradients by tensor hooks, each checked against torch.autograd.grad or a hand-written twin."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import NotSeenError, OverwrittenError, capture, changes, edit, observe
from tenterhook.values.tree import leaves


def mlp(inplace=True):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))


x = torch.randn(3, 4)


def test_gradients_across_an_in_place_relu():
    model = mlp()
    with capture(model, "0", "1", "2", "0:in", "1:in", "2:in", grad=True) as seen:
        model(x.clone().requires_grad_()).pow(2).sum().backward()
    leaf = x.clone().requires_grad_()
    h = model[0](leaf)
    r = F.relu(h)
    y = model[2](r)
    truth = dict(zip(("0:in", "0", "1", "2"), torch.autograd.grad(y.pow(2).sum(), (leaf, h, r, y)), strict=True))
    truth |= {"1:in": truth["0"], "2:in": truth["1"]}
    for name, gradient in truth.items():
        assert torch.equal(seen[f"grad({name})"], gradient), name
    assert torch.equal(seen["0"], h)  # the value is the one before the in-place change, and so is its gradient


def test_an_output_whose_gradient_is_awaited_can_be_saved(tmp_path):
    model = mlp()
    with capture(model, "grad(2)", "grad(0)"), edit(model, {"grad(2)": changes.scale(2.0)}):
        output = model(x)
        torch.save(output, tmp_path / "output.pt")  # a warning would be an error here
        output.sum().backward()


@pytest.mark.parametrize("before", [True, False])
def test_gradient_is_that_of_the_value_at_that_point(before):
    """A hook before `mul_(5)` sees 5, one after it sees 1."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.late = nn.Identity(), nn.Identity()

        def forward(self, x):
            b = self.early(x * 1)
            b.mul_(5)
            return self.late(b)

    model = Scale()
    with capture(model, "grad(early)" if before else "grad(late)") as seen:
        model(x.clone().requires_grad_()).sum().backward()
    assert torch.equal(
        (tap := next(iter(seen._taps))).action.entries(tap)[0].value, torch.full_like(x, 5.0 if before else 1.0)
    )


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


class Many(nn.Module):
    def forward(self, x, mode):
        a, b, c = x.chunk(3, dim=-1)
        return {"tuple": (a, (b, c)), "dict": {"a": a, "b": {"c": b, "d": c}}, "ints": (a, torch.arange(3))}[mode]


class Wraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = Many()

    def forward(self, x, mode):
        out = self.many(x * 1, mode)
        return out[0] if mode in ("tuple", "ints") else out["a"]


def test_structured_gradients_have_none_where_nothing_came():
    model = Wraps()
    y = torch.randn(2, 6, requires_grad=True)
    for mode, check in (
        ("tuple", lambda g: torch.equal(g[0], torch.ones(2, 2)) and g[1] == (None, None)),
        ("dict", lambda g: torch.equal(g["a"], torch.ones(2, 2)) and g["b"] == {"c": None, "d": None}),
    ):
        with capture(model, "grad(many)") as seen:
            model(y, mode).sum().backward()
        assert check(seen["grad(many)"])


def test_an_unused_sibling_is_none_and_an_integer_has_no_gradient():
    model = Wraps()
    y = torch.randn(2, 6, requires_grad=True)
    with capture(model, "grad(many[1][0])", "grad(many[0])") as seen:
        model(y, "tuple").sum().backward()
    assert seen["grad(many[1][0])"] is None
    assert torch.equal(seen["grad(many[0])"], torch.ones(2, 2))
    with capture(model, "grad(many[1])") as seen:
        model(y, "ints").sum().backward()
    with pytest.raises(NotSeenError, match="int64 values have no gradient"):
        seen["grad(many[1])"]


def test_calls_and_backwards_are_told_apart():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with capture(model, "0", "grad(0)", "grad(1)") as seen:
        out = model(x).sum()
        out.backward(retain_graph=True)
        (out * 3).backward()
    h0, h1 = (seen[f"0@{k}"] for k in (0, 1))
    ones = torch.ones_like(h1)
    g0 = ones @ layer.weight * (1 - h0.tanh() ** 2)
    first, third = seen.calls("grad(0@0)")
    torch.testing.assert_close(first, g0)
    torch.testing.assert_close(third, 3 * g0)
    assert torch.equal(seen.calls("grad(0@1)")[1], 3 * ones)
    assert len(seen.calls("grad(0)")) == 4
    assert [fired for _, fired, _ in seen.report()] == ["2×", "4×", "2×"]
    assert list(seen) == ["0", "grad(0)", "grad(1)"]


def test_gradient_of_one_call():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, layer)
    with capture(model, "grad(0@1)", "grad(0)") as seen:
        model(x).sum().backward()
    assert torch.equal(seen["grad(0@1)"], seen.calls("grad(0)")[1])


def test_parameters_and_accumulation():
    model = mlp()
    with capture(model, "grad(0.weight)", "grad(**.bias)") as seen:
        model(x).sum().backward()
        one = model[0].weight.grad.clone()
        model(2 * x).sum().backward()
    first, second = seen.calls("grad(0.weight)")
    assert torch.equal(first, one)
    torch.testing.assert_close(first + second, model[0].weight.grad)
    assert len(seen.calls("grad(2.bias)")) == 2
    model.zero_grad(set_to_none=False)
    assert torch.equal(first, one)  # a gradient that was only aliased would now be zero


def test_the_gradient_of_a_leaf_is_not_the_buffer_that_accumulates():
    model = nn.Identity()
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(.)") as seen:
        model(leaf).sum().backward()
        model(leaf).mul(4).sum().backward()
    first, second = seen.calls("grad(.)")
    assert torch.equal(first, torch.ones_like(x))
    assert torch.equal(second, torch.full_like(x, 4.0))


def test_autograd_grad_and_double_backward():
    model = mlp(inplace=False)
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(1)", "grad(0.weight)") as seen:
        out = model(leaf).pow(2).sum()
        (g,) = torch.autograd.grad(out, leaf, create_graph=True)
        assert len(seen.calls("grad(1)")) == 1
        (g**2).sum().backward()
    assert not seen.calls("grad(1)")[0].requires_grad
    assert len(seen.calls("grad(1)")) == 2
    assert len(seen.calls("grad(0.weight)")) == 1


@pytest.mark.parametrize(
    ("context", "reason"),
    [(torch.no_grad, "torch.no_grad"), (torch.inference_mode, "inference_mode"), (torch.enable_grad, "frozen=True")],
)
def test_no_gradient_says_why(context, reason):
    model = mlp().requires_grad_(False)
    with capture(model, "grad(0)", "grad(0:in)", "grad(0.weight)") as seen, context():
        model(x)
    for address in ("grad(0)", "grad(0:in)"):
        with pytest.raises(NotSeenError, match=reason):
            seen[address]
    with pytest.raises(NotSeenError, match="frozen: its requires_grad is False"):
        seen["grad(0.weight)"]


def test_no_backward_says_so():
    model = mlp()
    with capture(model, "grad(0)", "grad(0.weight)") as seen:
        loss = model(x).sum()
    loss.backward()  # outside: the session has removed its hooks
    for address in ("grad(0)", "grad(0.weight)"):
        with pytest.raises(NotSeenError, match="no backward inside this session reached it"):
            seen[address]


@pytest.mark.parametrize("inplace", [True, False])
def test_frozen_models_by_opting_in(inplace):
    model = mlp(inplace).requires_grad_(False)
    with capture(model, "0", "grad(0)", "grad(1:in)", "grad(2)", frozen=True) as seen:
        out = model(x)
        out.pow(2).sum().backward()
    assert torch.equal(out, mlp_by_hand(model, x))
    h = model[0](x).requires_grad_()
    y = model[2](F.relu(h))
    gh, gy = torch.autograd.grad(y.pow(2).sum(), (h, y))
    assert torch.equal(seen["grad(0)"], gh)
    assert torch.equal(seen["grad(1:in)"], gh)
    assert torch.equal(seen["grad(2)"], gy)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def mlp_by_hand(model, x):
    return F.linear(F.relu(F.linear(x, model[0].weight, model[0].bias)), model[2].weight, model[2].bias)


def test_frozen_keeps_what_an_in_place_module_does_to_its_callers_tensor():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            h = x * 1
            self.relu(h)  # the return value is not used
            return h

    model = Ignores()
    with capture(model, "grad(relu:in)", frozen=True):
        assert torch.equal(model(x), x.relu())


def test_copy_false_gradients():
    model = mlp(inplace=False)
    with capture(model, "grad(0)", copy=False) as seen:
        model(x).sum().backward()
    held = seen["grad(0)"]
    held.zero_()
    with pytest.raises(OverwrittenError):
        seen["grad(0)"]


def test_a_view_whose_base_is_changed_through_an_alias_does_not_crash():
    """PyTorch 2.13 segfaults in register_hook here unless grad_fn is read first (hooks.md P23)."""

    class Alias(nn.Module):
        def forward(self, x):
            base = x * 1
            view = base.view(-1)
            base.add_(1)
            return view

    model = Alias()
    with capture(model, ".", grad=True) as seen:
        model(x.clone().requires_grad_()).sum().backward()
    assert torch.equal(seen["grad(.)"], torch.ones(12))
    assert torch.equal(seen["."], (x + 1).view(-1))


def test_a_view_whose_base_is_changed_later_says_that_the_hook_was_lost():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.view = nn.Flatten(0)

        def forward(self, x):
            base = x * 1
            view = self.view(base)
            base.add_(1)
            return view

    model = Later()
    with capture(model, "grad(view)") as seen:
        model(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(NotSeenError, match="the base of this view was changed in place"):
        seen["grad(view)"]


def test_sparse_gradients():
    model = nn.Embedding(10, 3, sparse=True)
    with capture(model, "grad(weight)") as seen:
        model(torch.tensor([1, 1, 4])).sum().backward()
    assert seen["grad(weight)"].is_sparse
    assert torch.equal(seen["grad(weight)"].to_dense(), model.weight.grad.to_dense())


def test_autocast_keeps_each_dtype():
    model = mlp(inplace=False)
    with torch.autocast("cpu", torch.bfloat16), capture(model, "0", "grad(0)", "grad(0:in)") as seen:
        model(x.clone().requires_grad_()).float().sum().backward()
    assert seen["0"].dtype == seen["grad(0)"].dtype == torch.bfloat16
    assert seen["grad(0:in)"].dtype == torch.float32


def test_gradients_inside_torch_func():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with capture(model, "grad(0)") as seen:
        torch.func.grad(lambda v: model(v).sum())(x)
    h = model[0](x).detach().requires_grad_()
    torch.testing.assert_close(seen["grad(0)"], torch.autograd.grad(h.tanh().sum(), h)[0])


def test_recurrent_and_attention_modules():
    lstm = nn.LSTM(4, 5, batch_first=True)
    y = torch.randn(2, 3, 4)
    with capture(lstm, ".", "grad(.)", "grad(.[1][0])") as seen:
        out, (h, c) = lstm(y)
        (out.sum() + h.pow(2).sum()).backward()
    assert torch.equal(seen["."][1][1], c)
    torch.testing.assert_close(seen["grad(.[1][0])"], 2 * h.detach())
    assert seen["grad(.)"][1][1] is None
    assert seen["grad(.)"][0].shape == out.shape
    mha = nn.MultiheadAttention(4, 2, batch_first=True)
    bare = mha(y, y, y)[0]
    with capture(mha, ".:in[query]", "grad(.:in)") as seen:
        assert torch.equal(mha(y.requires_grad_(), y, y)[0], bare)


def test_gradients_of_a_deep_copy_made_inside_do_not_arrive():
    import copy

    model = mlp()
    with capture(model, "grad(0)", "0", "grad(0.weight)") as seen:
        twin = copy.deepcopy(model)
        twin(x).sum().backward()
        model(x).sum().backward()
    assert len(seen.calls("grad(0)")) == len(seen.calls("0")) == len(seen.calls("grad(0.weight)")) == 1


def test_shares_of_several_passes_are_kept_apart():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with capture(second, "grad(.:in)") as seen:
        h = first(x)
        loss = second(h).pow(2).sum()
        (g,) = torch.autograd.grad(loss, h, retain_graph=True)  # the input itself is the target
        loss.backward()
    assert len(seen.calls("grad(.:in)")) == 2
    assert all(torch.equal(share, g) for share in seen.calls("grad(.:in)"))


def test_a_pass_that_raised_leaves_nothing_to_the_next():
    class Fails(torch.autograd.Function):
        armed = True

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if Fails.armed:
                raise ValueError("once")
            return grad

    layer = nn.Linear(4, 4)
    leaf = x.clone().requires_grad_()
    with capture(layer, "grad(.:in)") as seen:
        loss = layer(Fails.apply(leaf)).sum()
        with pytest.raises(ValueError, match="once"):
            loss.backward(retain_graph=True)
        Fails.armed = False
        loss.backward()
    assert all(torch.equal(share, leaf.grad) for share in seen.calls("grad(.:in)"))


def test_saliency_and_a_gradient_penalty():
    model = mlp(inplace=False)
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(.:in)") as seen:
        (g,) = torch.autograd.grad(model(leaf).pow(2).sum(), leaf, create_graph=True)
        g.pow(2).sum().backward()
    # The second pass also uses the input in nodes that the first one made: better nothing than a part of it.
    assert torch.equal(seen["grad(.:in)"], g)
    assert "in a second backward (create_graph) is not kept" in str(seen.report())


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


def test_keep_last_with_structures_and_an_older_call():
    class Named(nn.Module):
        def forward(self, x):
            return {"a": x * 2}

    model = Named()
    with capture(model, "grad(.)", keep="last") as seen:
        older, _ = model(x.clone().requires_grad_()), model(x)
        older["a"].sum().backward()
    assert torch.equal(seen["grad(.)"]["a"], torch.ones(3, 4))


def test_frozen_and_one_tensor_passed_twice():
    model = nn.Module()
    model.forward = lambda a, b: a * 2 + b * 3
    for leaf, options in ((x, {"frozen": True}), (x.clone().requires_grad_(), {})):
        with capture(model, "grad(.:in)", **options) as seen:
            model(leaf, leaf).sum().backward()
        assert [g.unique().item() for g in seen["grad(.:in)"]] == [5.0, 5.0]


def test_a_vectorised_jacobian_works_and_says_what_is_missing():
    model = mlp(inplace=False)
    bare = torch.autograd.functional.jacobian(model, x[0], vectorize=True)
    with capture(model, "grad(0)", "0") as seen:
        assert torch.equal(torch.autograd.functional.jacobian(model, x[0], vectorize=True), bare)
    assert torch.equal(seen["0"], model[0](x[0]))
    with pytest.raises(NotSeenError, match="vectorised jacobian"):
        seen["grad(0)"]


def test_selected_calls_and_the_report_agree():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, layer)
    with capture(model, "grad(0@1:3)", "0@-9", "0@0") as seen:
        for layer_ in model[:1]:
            layer_(x).sum().backward()
        model(x)
    told = {address: fired for address, fired, _ in seen.report()}
    assert told == {"grad(0@1:3)": "never", "0@-9": "never", "0@0": "1×"}
    with pytest.raises(NotSeenError, match="no backward inside this session"):
        seen["grad(0@1)"]
    with pytest.raises(NotSeenError, match="0@2: only 0@0 was captured"):
        seen["0@2"]


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


def test_a_backward_inside_a_backward():
    class Nested(nn.Module):
        busy = False

        def forward(self, h):
            a, b = h * 2, h * 3
            out = a + b

            def again(grad):
                if not self.busy:
                    self.busy = True
                    with torch.enable_grad():
                        torch.autograd.grad(out.sum(), h, retain_graph=True)

            a.register_hook(again)
            return out

    model, leaf, shown = Nested(), x.clone().requires_grad_(), []
    with capture(model, "grad(.:in)") as seen, observe(model, {"grad(.:in)": lambda site, g: shown.append(g.clone())}):
        model(leaf * 1).sum().backward(retain_graph=True)
    assert [g.unique().item() for g in seen.calls("grad(.:in)")] == [5.0, 5.0]
    assert [g.unique().item() for g in shown] == [5.0, 5.0]


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


def test_keep_last_does_not_pile_up_what_never_comes():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    ids = torch.randint(10, (2, 3))
    with capture(model, "**:in", grad=True, keep="last") as seen:
        for _ in range(300):
            model(ids)
    assert max(len(tap.action._outlines) for tap in seen._taps if hasattr(tap.action, "_outlines")) <= 101


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
