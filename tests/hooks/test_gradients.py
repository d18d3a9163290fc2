"""Gradients by tensor hooks, each checked against torch.autograd.grad or a hand-written twin."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import NotSeenError, OverwrittenError, capture, changes, edit
from tests.hooks.models import mlp, x


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


def test_saliency_and_a_gradient_penalty():
    model = mlp(inplace=False)
    leaf = x.clone().requires_grad_()
    with capture(model, "grad(.:in)") as seen:
        (g,) = torch.autograd.grad(model(leaf).pow(2).sum(), leaf, create_graph=True)
        g.pow(2).sum().backward()
    # The second pass also uses the input in nodes that the first one made: better nothing than a part of it.
    assert torch.equal(seen["grad(.:in)"], g)
    assert "in a second backward (create_graph) is not kept" in str(seen.report())
