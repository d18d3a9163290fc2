"""edit at grad(...): against the same edit written into the model, which is a tensor hook in its own source."""

import asyncio
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import EditError, capture, edit
from tenterhook.changes import add, at, clip_norm, ones, reverse, scale, zero
from tests.verbs.models import Gate, X


class Net(nn.Module):
    """Every site once with a gate of the source's own: outputs, inputs, in-place neighbours, a residual branch."""

    def __init__(self, inplace=True):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = nn.ReLU(inplace=inplace)
        self.drop = nn.Dropout(0.5)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x, **gates):
        def gate(name, v):
            return Gate.apply(v, gates[name]) if name in gates else v

        h = gate("a", self.a(x))
        t = gate("b", self.b(gate("b:in", h))).tanh()
        d = gate("drop", self.drop(gate("drop:in", h)))
        k = gate("block", self.block(h) if "block.1" not in gates else Gate.apply(self.block(h), gates["block.1"]))
        r = gate("act", self.act(gate("act:in", h + t + k)))
        return gate("c", self.c(r + d * h))


CHANGES = {
    "double": lambda g: g * 2,
    "in place": lambda g: g.mul_(2),
    "in place, None": lambda g: (g.mul_(2), None)[1],
    "zero": zero(),
    "clip": clip_norm(0.1),
    "reverse": reverse(0.5),
    "positive only": lambda g: g.clamp(min=0),
    "one column": at((..., 0), ones()),
}


def by_hand(change):
    def f(g):
        g = g.clone()
        new = change(g)
        return g if new is None else new

    return f


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("where", ["a", "b", "b:in", "drop", "drop:in", "block", "block.1", "act", "act:in", "c"])
def test_a_gradient_edit_equals_the_same_edit_written_into_the_source(where, change):
    model = Net().eval()
    x = X.clone().requires_grad_()
    truth = torch.autograd.grad(model(x, **{where: by_hand(change)}).pow(2).sum(), [x, *model.parameters()])
    with edit(model, {f"grad({where})": change}) as edits:
        loss = model(x)
        mine = torch.autograd.grad(loss.pow(2).sum(), [x, *model.parameters()])
    assert torch.equal(loss, model(x))
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b)
    assert edits.report().silent == []


def test_only_the_modules_own_share_of_an_inputs_gradient_is_edited():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x):
            return self.f(x).sum() + (3 * x).sum()

    model, x = Model(), X.clone().requires_grad_()
    with edit(model, {"grad(f:in)": zero()}):
        model(x).backward()
    assert torch.equal(x.grad, torch.full((3, 4), 3.0))


def test_pass_through_modules_keep_their_neighbours_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.through, self.g = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

        def forward(self, x):
            h = self.f(x)
            return (self.g(self.through(h)) + 5 * h).sum()

    model = Model()
    with capture(model, "grad(f)") as seen:
        model(X).backward()
    for address in ("grad(through)", "grad(through:in)", "grad(g:in)"):
        with edit(model, {address: zero()}), capture(model, "grad(f)", "grad(g:in)", "grad(g)") as edited:
            model(X).backward()
        torch.testing.assert_close(edited["grad(f)"], torch.full((3, 4), 5.0))
        assert edited["grad(g)"].any()
        assert bool(edited["grad(g:in)"].any()) == (address != "grad(g:in)")
    assert not torch.equal(seen["grad(f)"], torch.full((3, 4), 5.0))


def test_a_block_and_its_last_layer_share_a_tensor_but_not_their_edits():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with capture(model, "grad(1)", "grad(1.1)", "grad(.)") as plain:
        model(X).sum().backward()
    with edit(model, {"grad(1.1)": scale(3.0)}), capture(model, "grad(1)", "grad(1.1)", "grad(.)", "grad(1.0)") as seen:
        model(X).sum().backward()
    assert torch.equal(seen["grad(1)"], plain["grad(1)"]) and torch.equal(seen["grad(.)"], plain["grad(.)"])
    assert torch.equal(seen["grad(1.1)"], 3 * plain["grad(1.1)"])
    order = []
    note = lambda name: lambda g: (order.append(name), None)[1]  # noqa: E731
    with edit(model, {"grad(1.1)": note("layer"), "grad(1)": note("block"), "grad(.)": note("model")}):
        model(X).sum().backward()
    assert order == ["model", "block", "layer"]


def test_nested_sessions_act_from_the_outside_in_and_a_capture_inside_sees_the_result():
    model = Net().eval()
    for address in ("grad(a)", "grad(b:in)", "grad(c.weight)", "grad(act:in)"):
        with capture(model, address) as plain:
            model(X).sum().backward()
        with capture(model, address) as before, edit(model, {address: scale(2.0)}), edit(model, {address: add(1.0)}):
            with capture(model, address) as after:
                model(X).sum().backward()
        torch.testing.assert_close(after[address], 2 * plain[address] + 1)
        if address in ("grad(a)", "grad(c.weight)"):  # elsewhere the edit is between the value and who is outside
            torch.testing.assert_close(before[address], plain[address])


def test_leaves_of_a_structure():
    lstm, x = nn.LSTM(4, 4), torch.randn(5, 2, 4)
    weights = list(lstm.parameters())

    def loss():
        out, (h, c) = lstm(x)
        return out, h, c, out.sum() + 2 * h.sum() + 3 * c.sum()

    out, h, c, total = loss()
    truth = torch.autograd.grad(
        [out, h, c], weights, [torch.ones_like(out), torch.zeros_like(h), 3 * torch.ones_like(c)]
    )
    with edit(lstm, {"grad(.:out[1][0])": zero()}):
        *_, total = loss()
        mine = torch.autograd.grad(total, weights)
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b)
    seen = []
    with edit(lstm, {"grad(.)": lambda g, site: seen.append(str(site))}):
        *_, total = loss()
        total.backward()
    assert sorted(seen) == ["grad(.:out[0]@0)", "grad(.:out[1][0]@0)", "grad(.:out[1][1]@0)"]


def test_single_calls_of_a_shared_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    shared = nn.Sequential(model, model, model)
    x = X.clone().requires_grad_()
    h1 = model(x)
    h2 = Gate.apply(model(h1), lambda g: g * 5)
    truth = torch.autograd.grad(model(h2).sum(), [x, *model.parameters()])
    with edit(shared, {"grad(0@1)": scale(5.0)}):
        mine = torch.autograd.grad(shared(x).sum(), [x, *model.parameters()])
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_before_and_after_accumulation():
    model = nn.Linear(4, 2)
    model(X).sum().backward()
    once = model.weight.grad.clone()
    model.zero_grad()
    with edit(model, {"grad(weight)": scale(2.0)}):
        model(X).sum().backward()
        model(X).sum().backward()
    torch.testing.assert_close(model.weight.grad, 4 * once)
    assert torch.equal(model.bias.grad, torch.full((2,), 6.0))
    model.zero_grad()
    with edit(model, {"grad(weight)": scale(2.0)}, reduced=True) as edits:
        model(X).sum().backward()
        torch.testing.assert_close(model.weight.grad, 2 * once)
        model(X).sum().backward()
    torch.testing.assert_close(model.weight.grad, 6 * once)  # (2·g + g)·2: what is accumulated is edited again
    assert "2×" in str(edits.report())


def test_autograd_grad_of_a_parameter_is_edited_too():
    model = nn.Linear(4, 2)
    truth = torch.autograd.grad(model(X).sum(), model.weight)[0]
    with edit(model, {"grad(weight)": reverse()}):
        torch.testing.assert_close(torch.autograd.grad(model(X).sum(), model.weight)[0], -truth)


def test_frozen_models_and_no_grad_are_errors_that_say_what_to_do():
    model = Net().eval().requires_grad_(False)
    with pytest.raises(EditError, match=r"grad\(a@0\) cannot be edited: frozen: .*frozen=True"):
        with edit(model, {"grad(a)": zero()}):
            model(X)
    with pytest.raises(EditError, match=r"grad\(b:in@0\) cannot be edited: frozen: .*frozen=True"):
        with edit(model, {"grad(b:in)": zero()}):
            model(X)
    with pytest.raises(EditError, match=r"grad\(a.weight\) cannot be edited: frozen: its requires_grad is False"):
        with edit(model, {"grad(a.weight)": zero()}):
            pytest.fail("never entered")
    with pytest.raises(EditError, match=r"grad\(a\) was never edited: it ran under torch.no_grad\(\).*with gradients"):
        trained = Net()
        with edit(trained, {"grad(a)": zero()}), torch.no_grad():
            trained(X)


def test_no_grad_inside_a_session_that_also_trains_is_fine():
    model = Net().eval()
    with edit(model, {"grad(a)": zero()}):
        with torch.no_grad():
            model(X)
        model(X).sum().backward()
    assert not model.a.weight.grad.any()


def test_frozen_true_opts_in():
    model = Net().eval().requires_grad_(False)
    twin = copy.deepcopy(model)
    h = twin.a(X).detach().requires_grad_()
    truth = torch.autograd.grad(twin.c(torch.relu(h + twin.b(h).tanh() + twin.block(h)) + h * h).sum(), h)[0]
    with edit(model, {"grad(a)": scale(2.0)}, frozen=True) as edits, capture(model, "grad(a)", frozen=True) as seen:
        model(X).sum().backward()
    torch.testing.assert_close(seen["grad(a)"], 2 * truth)
    assert edits.report().silent == []


def test_a_wide_selector_skips_what_has_no_gradient():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with edit(model, {"grad(**)": scale(2.0)}) as edits:
        model(torch.tensor([1, 2])).sum().backward()
    assert edits.report().silent == ["grad(0)"]
    torch.testing.assert_close(model[2].bias.grad, torch.full((2,), 2.0 * 4))  # the model and its last layer
    with pytest.raises(EditError, match=r"grad\(0@0\) cannot be edited"):
        with edit(model, {"grad(0)": scale(2.0)}):
            model(torch.tensor([1, 2]))


def test_a_gradient_of_another_shape_is_an_error_with_the_address():
    model = Net().eval()
    with pytest.raises(EditError, match=r"the change at grad\(a@0\) made 3×2 float32 of 3×4 float32"):
        with edit(model, {"grad(a)": lambda g: g[:, :2]}):
            model(X).sum().backward()


def test_in_place_changes_of_a_gradient_reach_nobody_else():
    """The same gradient tensor often goes to several places: to both sides of a sum, into another's capture."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = X.clone().requires_grad_()
    with edit(model, {"grad(0)": lambda g: (g.zero_(), None)[1]}):
        a, b = model(x), x * 1
        (a + b).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))


def test_second_order_gradients_go_through_an_edit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = X.clone().requires_grad_()

    def penalty(run):
        (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), list(model.parameters())[:2])

    def gated(x):
        h = model[0](x)
        h.register_hook(lambda g: g * 3)
        return model[2](model[1](h))

    truth = penalty(gated)
    with edit(model, {"grad(0)": scale(3.0)}):
        mine = penalty(model)
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_after_the_block_is_not_edited_and_says_so():
    model = Net().eval()
    with capture(model, "grad(a)") as plain:
        model(X).sum().backward()
    with pytest.raises(EditError, match="never edited: no backward inside this session"):
        with edit(model, {"grad(a)": zero()}):
            loss = model(X).sum()
    with capture(loss, "grad(**)"):
        model.zero_grad()
        loss.backward()
    assert model.a.weight.grad.any() and plain["grad(a)"].any()


def test_grad_scaler_and_autocast_see_scaled_gradients():
    model, scaler = Net().eval(), torch.amp.GradScaler("cpu", init_scale=8.0)
    with capture(model, "grad(a)") as plain, torch.autocast("cpu", torch.bfloat16):
        model(X).sum().backward()
    with edit(model, {"grad(a)": scale(2.0)}), capture(model, "grad(a)") as seen, torch.autocast("cpu", torch.bfloat16):
        scaler.scale(model(X).sum()).backward()
    torch.testing.assert_close(seen["grad(a)"], 16 * plain["grad(a)"])


def test_a_view_that_is_written_into_later_keeps_its_edit():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.relu = nn.Flatten(), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.flat(x * 1).sum() + self.relu(self.flat(x * 1)).sum()

    model, x = Model(), torch.ones(2, 2, 2, requires_grad=True)
    with edit(model, {"grad(flat)": scale(10.0)}):
        model(x).backward()
    assert torch.equal(x.grad, torch.full((2, 2, 2), 20.0))


def test_a_reentrant_checkpoint_does_not_know_the_end_of_the_pass():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with pytest.raises(EditError, match=r"grad\(weight\): a reentrant checkpoint is a backward pass of its own"):
        with edit(layer, {"grad(weight)": scale(0.5)}, reduced=True):
            checkpoint(layer, x, use_reentrant=True).sum().backward()
    layer.zero_grad()
    with edit(layer, {"grad(weight)": scale(0.5)}, reduced=True):
        checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False).sum().backward()
    mine = layer.weight.grad.clone()
    layer.zero_grad()
    layer(layer(x)).sum().backward()
    torch.testing.assert_close(mine, layer.weight.grad / 2)


def test_a_call_in_a_worker_thread_that_belongs_to_the_session():
    model, x = nn.Identity(), torch.ones(2, requires_grad=True)
    for _ in range(50):
        h = x * 1  # autograd numbers its nodes by thread
    with edit(model, {"grad(.)": scale(10.0)}):
        out = asyncio.run(asyncio.to_thread(model, h))
        (out.sum() + h.sum()).backward()
    assert x.grad.tolist() == [11, 11]


def test_the_gradient_is_that_of_the_value_which_the_model_used():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for address in ("0", "1:in"):
        edits = {address: scale(2.0), f"grad({address})": clip_norm(0.1)}
        norms = []
        for written in (edits, dict(reversed(edits.items()))):
            with capture(model, "grad(0)") as outside, edit(model, written), capture(model, f"grad({address})") as seen:
                model(X).sum().backward()
            norms.append((seen[f"grad({address})"].norm().item(), outside["grad(0)"].norm().item()))
        assert norms[0] == norms[1] and norms[0][0] == pytest.approx(0.1)


def test_transforms_without_a_backward_pass_say_so():
    model, x = nn.Sequential(nn.ReLU()), torch.ones(2, 3)
    for run in (torch.vmap(model), lambda x: torch.func.jvp(model, (x,), (x,))):
        with pytest.raises(EditError, match="inside vmap or jvp"), edit(model, {"grad(0:in)": scale(2.0)}):
            run(x)
