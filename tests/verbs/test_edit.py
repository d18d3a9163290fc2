"""edit: an edit of an output or input is the same edit written into the source, and ends with the block."""

import copy

import pytest
import torch
from torch import nn

from tenterhook import AddressError, capture, edit
from tenterhook.changes import add, at, ones, replace, scale, zero
from tests.verbs.models import X

CHANGES = {
    "new tensor": lambda v: v * 3,
    "in place": lambda v: v.mul_(3),
    "in place, None": lambda v: (v.mul_(3), None)[1],
    "part in place": lambda v: (v[:, 0].fill_(0), None)[1],
    "with site": lambda v, site: v * 3 if site.address.call == 0 else v,
    "ready-made": scale(3.0),
    "ready-made at": at((slice(None), 0), zero()),
    "list": [scale(2.0), lambda v: v + 1, 0.5],
    "tensor": torch.full((3, 4), 0.5),
    "number": 0.25,
}


def by_hand(change):
    """The same change as a plain function of a tensor, for the model's own source."""

    def f(v):
        v = v.clone()
        if isinstance(change, list):
            return (v * 2 + 1) * 0 + 0.5
        if isinstance(change, torch.Tensor | float):
            return v * 0 + change
        if change is CHANGES["with site"] or change is CHANGES["ready-made"]:
            return v * 3
        if change is CHANGES["ready-made at"]:
            return torch.cat([v[:, :1] * 0, v[:, 1:]], 1)
        new = change(v)
        return v if new is None else new

    return f


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("where", ["a", "b:in", "b:in[0]", "b:in[input]", "drop"])
def test_an_edit_equals_the_same_edit_written_into_the_source(net, where, change):
    place = {"a": "after_a", "drop": "after_drop"}.get(where, "into_b")
    x = X.clone().requires_grad_()
    truth = net(x, **{place: by_hand(change)})
    truth_grads = torch.autograd.grad(truth.pow(2).sum(), [x, *net.parameters()], allow_unused=True)
    with edit(net, {where: change}) as edits:
        out = net(x)
    grads = torch.autograd.grad(out.pow(2).sum(), [x, *net.parameters()], allow_unused=True)
    torch.testing.assert_close(out, truth)
    for mine, theirs in zip(grads, truth_grads, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert next(iter(edits.report()))[1] == "1×"


def test_edits_act_on_the_users_own_calls_and_end_with_the_block(net):
    plain = net(X)
    with edit(net, {"a": zero()}):
        edited = net(X)
    assert not torch.equal(plain, edited)
    assert torch.equal(net(X), plain)


def test_none_and_the_value_itself_leave_it_as_it_is(net):
    plain = net(X)
    with edit(net, {"a": lambda v: None, "b": lambda v: v, "c:in": lambda v: print(end="")}) as edits:
        assert torch.equal(net(X), plain)
    assert all(figures == ["0", "0"] for _, _, _, *figures in edits.report())
    assert "changed nothing" in str(edits.report())


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Flatten(1)], ids=str)
@pytest.mark.parametrize("change", [lambda v: v.mul_(0), lambda v: (v.fill_(7), None)[1], zero(), scale(2.0)])
def test_an_edit_of_what_is_handed_on_does_not_reach_its_input(module, change):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.through = nn.Linear(4, 4), module

        def forward(self, x):
            h = self.first(x)
            return h, self.through(h)

    model = Model()
    plain, _ = model(X)
    with edit(model, {"through": change}), capture(model, "first", "through:in", "through") as seen:
        first, through = model(X)
    assert torch.equal(first, plain) and torch.equal(seen["first"], plain) and torch.equal(seen["through:in"], plain)
    assert torch.equal(seen["through"], through) and not torch.equal(through, plain)


class Keywords(nn.Module):
    def forward(self, x, /, scale, *, shift=None, extra=()):
        return x * scale + (0 if shift is None else shift) + sum(extra)


@pytest.mark.parametrize(
    ("address", "truth"),
    [
        (".:in[0]", 0 * 2 + 3 + 4 + 5),
        (".:in[scale]", 1 * 0 + 3 + 4 + 5),
        (".:in[1]", 1 * 0 + 3 + 4 + 5),
        (".:in[shift]", 1 * 2 + 0 + 4 + 5),
        (".:in[extra][1]", 1 * 2 + 3 + 4 + 0),
    ],
)
@pytest.mark.parametrize("keyword", [True, False])
def test_inputs_by_position_and_name_however_they_are_passed(address, truth, keyword):
    model, t = Keywords(), torch.tensor
    extra = (t(4.0), t(5.0))
    with edit(model, {address: zero()}):
        if keyword:
            out = model(t(1.0), scale=t(2.0), shift=t(3.0), extra=extra)
        else:
            out = model(t(1.0), t(2.0), shift=t(3.0), extra=extra)
    assert out == truth
    assert extra[1] == 5.0


def test_all_inputs_at_once_as_a_function_sees_them():
    model, t = Keywords(), torch.tensor
    with edit(model, {".:in": lambda given: {**given, "shift": t(100.0)}}):
        assert model(t(1.0), t(2.0), shift=t(3.0)) == 102.0

    class Two(nn.Module):
        def forward(self, a, b):
            return a - b

    two = Two()
    with edit(two, {".:in": lambda given: (given[1], given[0])}):
        assert two(t(5.0), t(3.0)) == -2.0


def test_single_calls():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Identity()

        def forward(self, x):
            return torch.stack([self.step(x + i) for i in range(5)])

    model, x = Loop(), torch.zeros(())
    with edit(model, {"step@1": 10.0, "step@3:": lambda v, site: v + 100 * site.address.call}) as edits:
        assert model(x).tolist() == [0, 10, 2, 303, 404]
    assert [row[:2] for row in edits.report()] == [("step@1", "1×"), ("step@3:", "2×")]
    for address in ("step@-1", "step@-2:", "step@:-1"):
        with pytest.raises(AddressError, match="known only afterwards"):
            edit(model, {address: zero()})


def test_what_a_session_before_sees_and_what_one_inside_sees(net):
    plain = capture.once(net, X, "a")
    with capture(net, "a", "b:in") as outside, edit(net, {"a": scale(2.0)}) as outer:
        with edit(net, {"a": add(1.0)}), capture(net, "a", "b:in") as inside:
            net(X)
    assert torch.equal(outside["a"], plain)
    assert torch.equal(inside["a"], plain * 2 + 1)
    assert torch.equal(inside["b:in"], plain * 2 + 1) and torch.equal(outside["b:in"], plain * 2 + 1)
    assert outer.report().silent == []


def test_two_addresses_of_one_session_at_one_site_act_in_the_order_written(net):
    plain = capture.once(net, X, "a")
    with edit(net, {"a": scale(2.0), "*<Linear>": lambda v: v + 1}), capture(net, "a") as seen:
        net(X)
    assert torch.equal(seen["a"], plain * 2 + 1)


def test_a_factory_without_arguments_may_go_without_its_brackets(net):
    with edit(net, {"a": zero, "b": ones}), capture(net, "a", "b") as seen:
        net(X)
    assert not seen["a"].any() and (seen["b"] == 1).all()


def test_a_replacement_is_not_written_into_by_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    donor = torch.full((3, 4), -1.0)
    for change in (donor, replace(donor), replace(donor[:1])):
        with edit(model, {"0": change}):
            model(X)
            with torch.no_grad():
                model(X)
        assert (donor == -1).all()


def test_gradients_reach_what_lies_before_a_replaced_value_as_zeros(net):
    for change in (zero(), ones(), replace(torch.ones(3, 2)), replace(1.0), at((..., 0), zero())):
        net.zero_grad()
        with edit(net, {"c": change}), capture(net, "c", "grad(c)") as seen:
            net(X).sum().backward()
        assert seen["grad(c)"].shape == (3, 2)
        assert net.c.weight.grad is not None and not net.c.weight.grad[0].any()


def test_a_module_as_a_change(net):
    autoencoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with edit(net, {"a": autoencoder}):
        edited = net(X)
    torch.testing.assert_close(edited, net(X, after_a=autoencoder))


def test_a_change_that_calls_the_model_itself_is_not_edited_again(net):
    plain = net.a(X)
    with edit(net, {"a": lambda v: v + net.a(X)}), capture(net, "a") as seen:
        net(X)
    torch.testing.assert_close(seen.calls("a")[-1], 2 * plain)


def test_a_copied_model_is_not_edited(net):
    with edit(net, {"a": zero()}):
        twin = copy.deepcopy(net)
        assert not torch.equal(twin(X), net(X))


def test_an_edit_holds_no_graph(net):
    with edit(net, {"a": scale(2.0), "b": lambda v: v + 1}) as edits:
        net(X.clone().requires_grad_())
    kept = [t for tap in edits._session.taps for old, _, new in tap.action.difference._put_off for t in (old, new)]
    assert kept and not any(t.requires_grad for t in kept if t is not None)


def test_a_function_that_writes_without_a_trace():
    def through_data(v):
        v.data[:, 0] = 0

    def through_numpy(v):
        v.detach().numpy()[:, 0] = 0
        return v

    m = nn.Linear(4, 3)
    for f in (through_data, through_numpy):
        with edit(m, {".": f}):
            assert not m(X)[:, 0].any()

    class Box(nn.Module):
        def forward(self, x):
            return {"x": x * 1, "n": 1}

    def count(value):
        value["n"] = 5

    box = Box()
    with edit(box, {".": count}):
        assert box(X)["n"] == 5


def test_a_moved_tensor_is_kept_once():
    vector, model = torch.zeros(4), nn.Linear(4, 4).double()
    change = add(vector)
    with edit(model, {".": change}):
        for _ in range(20):
            vector.add_(1)
            model(X.double())
    assert len(change._moved) == 1
