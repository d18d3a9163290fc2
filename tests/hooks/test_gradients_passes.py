"""Several backward passes: which call and which pass a gradient belongs to."""

import pytest
import torch
from torch import nn

from tenterhook import NotSeenError, capture, observe
from tests.hooks.models import mlp, x


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
    gradients = [f"grad(0@{call})#{turn}" for call in (0, 1) for turn in (0, 1)]
    assert list(seen) == ["0@0", "0@1", *gradients, "grad(1)#0", "grad(1)#1"]
    assert torch.equal(seen["grad(0@0)#1"], third) and torch.equal(seen["grad(1)#1"], seen.calls("grad(1)")[1])


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
    assert [torch.equal(share, leaf.grad) for share in seen.calls("grad(.:in)")] == [True, True]


def test_keep_last_with_structures_and_an_older_call():
    class Named(nn.Module):
        def forward(self, x):
            return {"a": x * 2}

    model = Named()
    with capture(model, "grad(.)", keep="last") as seen:
        older, _ = model(x.clone().requires_grad_()), model(x)
        older["a"].sum().backward()
    assert torch.equal(seen["grad(.)"]["a"], torch.ones(3, 4))


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
    with capture(model, "grad(.:in)") as seen, observe(model, {"grad(.:in)": lambda g, site: shown.append(g.clone())}):
        model(leaf * 1).sum().backward(retain_graph=True)
    assert [g.unique().item() for g in seen.calls("grad(.:in)")] == [5.0, 5.0]
    assert [g.unique().item() for g in shown] == [5.0, 5.0]


def test_keep_last_does_not_pile_up_what_never_comes():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    ids = torch.randint(10, (2, 3))
    with capture(model, "**:in", grad=True, keep="last") as seen:
        for _ in range(300):
            model(ids)
    assert max(len(tap.action._outlines) for tap in seen._taps if hasattr(tap.action, "_outlines")) <= 101
