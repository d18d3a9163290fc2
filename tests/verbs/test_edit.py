"""edit: values at outputs, inputs, leaves, calls, parameters and buffers; what must not leak; what is refused."""

import contextlib
import copy
import threading
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tenterhook import AddressError, EditError, TenterhookWarning, capture, edit, observe
from tenterhook.changes import add, any_shape, at, mean, ones, project_out, replace, scale, zero


class Net(nn.Module):
    """A residual net whose output is easy to write down again with an edit in it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, after_a=lambda v: v, into_b=lambda v: v, after_drop=lambda v: v):
        h = after_a(self.a(x))
        r = h + self.b(into_b(h)).tanh()
        return self.c(self.act(after_drop(self.drop(r)))) + h.sum(-1, keepdim=True)


@pytest.fixture
def net():
    return Net().eval()


X = torch.randn(3, 4)
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


def test_one_leaf_of_a_structure_and_the_same_tensor_beside_it():
    class Twice(nn.Module):
        def forward(self, x):
            y = x * 2
            return {"a": y, "b": [y, (y,)]}

    model = nn.Sequential(Twice())
    with edit(model, {"0[b][1][0]": zero()}):
        out = model(X)
    assert torch.equal(out["a"], X * 2) and torch.equal(out["b"][0], X * 2)
    assert torch.equal(out["b"][1][0], torch.zeros(3, 4))
    assert type(out) is dict and type(out["b"]) is list and type(out["b"][1]) is tuple


Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, Box, lambda a, b: [a, b], lambda a, b: {"left": a, "right": b}])
def test_leaves_by_name_and_position_keep_the_type(kind):
    class Model(nn.Module):
        def forward(self, x):
            return kind(x, x + 1)

    model = Model()
    key = 1 if isinstance(kind(0, 0), list) else "right"
    with edit(model, {f".[{key}]": scale(-1.0)}):
        out = model(X)
    assert type(out) is type(kind(X, X))
    left, right = (
        (out[0], out[1]) if isinstance(out, list | tuple) else vars(out).values() if kind is Box else out.values()
    )
    assert torch.equal(left, X) and torch.equal(right, -(X + 1))


def test_a_function_may_change_a_whole_structure():
    lstm = nn.LSTM(4, 4, batch_first=True)
    x = torch.randn(2, 3, 4)
    plain, (h, c) = lstm(x)

    def swap(value):
        out, (h, c) = value
        return out * 2, (c, h)

    with edit(lstm, {".": swap}):
        out, (first, second) = lstm(x)
    assert torch.equal(out, plain * 2) and torch.equal(first, c) and torch.equal(second, h)
    with edit(lstm, {".": lambda v: (v[0].zero_(), None)[1]}):
        out, (first, _) = lstm(x)
    assert not out.any() and torch.equal(first, h)


def test_a_ready_made_change_of_a_structure_wants_one_tensor():
    lstm = nn.LSTM(4, 4)
    with pytest.raises(EditError, match=r"zero\(\) changes one tensor.*tuple.*\[0\], \[1\]\[0\].*at \.@0"):
        with edit(lstm, {".": zero()}):
            lstm(torch.randn(2, 3, 4))

    class Alone(nn.Module):
        def forward(self, x):
            return (x, None)

    model = Alone()
    with edit(model, {".": zero()}):
        out, nothing = model(X)
    assert not out.any() and nothing is None


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


# Parameters and buffers


def test_parameters_and_buffers_are_changed_and_restored_bit_for_bit():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(0.5)
        twin[1].running_mean.fill_(3.0)
    with edit(model, {"0.weight": scale(0.5), "1.running_mean": 3.0, "0.bias": lambda b: None}) as edits:
        assert torch.equal(model(X), twin(X))
        assert torch.equal(model[0].weight, twin[0].weight)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert [row[1] for row in edits.report()] == ["1×", "1×", "1×"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_parameters_are_restored_when_the_block_fails(error):
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with pytest.raises(error), edit(model, {"weight": zero()}):
        assert not model.weight.any()
        raise error
    assert torch.equal(model.weight, before)


def test_a_failure_while_entering_restores_what_was_changed_already():
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"boom \(in the change at bias@0\)"):
        with edit(model, {"weight": zero(), "bias": raises}):
            pytest.fail("never entered")
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def raises(value):
    raise ValueError("boom")


def test_nested_edits_of_one_parameter():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with edit(model, {"weight": scale(2.0)}):
        with edit(model, {"weight": add(1.0)}):
            assert torch.equal(model.weight, before * 2 + 1)
        assert torch.equal(model.weight, before * 2)
    assert torch.equal(model.weight, before)


def test_an_optimizer_step_inside_is_undone_with_a_warning():
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(TenterhookWarning, match="weight was changed inside the block"):
        with edit(model, {"weight": scale(2.0)}):
            model(X).sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_buffer_that_the_model_replaces_comes_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n = self.n + 1
            return x + self.n

    model = Counter()
    original = model.n
    with pytest.warns(TenterhookWarning, match="n was changed inside"), edit(model, {"n": 10.0}):
        assert model(torch.zeros(1)) == 11
    assert model.n is original and model.n == 0


def test_gradients_with_respect_to_a_changed_parameter_are_those_at_the_changed_value():
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.mul_(2)
    twin(X).pow(2).sum().backward()
    with edit(model, {"weight": scale(2.0)}):
        model(X).pow(2).sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)


def test_a_backward_after_the_parameter_was_restored_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with edit(model, {"1.weight": scale(2.0)}):
        loss = model(X).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_weights_are_one_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = Tied()
    with edit(model, {"b.weight": zero()}):
        assert not model.a.weight.any()


def test_a_lazy_parameter_cannot_be_edited_yet():
    model = nn.LazyLinear(2)
    with pytest.raises(EditError, match="weight cannot be edited: it is not initialised"):
        edit(model, {"weight": zero()}).__enter__()


# What is refused, and how


def test_another_shape_or_dtype_is_an_error_that_names_both(net):
    with pytest.raises(EditError, match=r"the change at a@0 made 3×2 float32 of 3×4 float32; .*any_shape"):
        with edit(net, {"a": lambda v: v[:, :2]}):
            net(X)
    with pytest.raises(EditError, match=r"b:in\[0\]@0 made 3×4 float64 of 3×4 float32"):
        with edit(net, {"b:in[0]": lambda v: v.double()}):
            net(X)
    with pytest.raises(EditError, match=r"a@0 made 3×4 float32 of 3×4 bfloat16"):
        with edit(net, {"a": lambda v: v.float()}), torch.autocast("cpu", torch.bfloat16):
            net(X)
    with pytest.raises(EditError, match="made tuple"), edit(net, {"a": lambda v: (v,)}):
        net(X)
    with pytest.raises(EditError, match=r"made 2×2 float32 of 4×4 float32"):
        edit(net, {"a.weight": lambda w: w[:2, :2]}).__enter__()
    with pytest.raises(ValueError, match=r"replacement has shape 5, the value 3×4; .*\(in the change at a@0\)"):
        with edit(net, {"a": torch.zeros(5)}):
            net(X)


def test_another_shape_where_it_is_meant():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    with edit(model, {"0": any_shape(lambda v: v[:2])}) as edits:
        assert model(X).shape == (8,)
    assert "nothing to compare" in str(edits.report())
    with edit(model, {"0": any_shape(lambda v: v.double())}):
        assert model(X).dtype == torch.float64


@pytest.mark.parametrize("address", ["a", "b:in", "grad(a)", "grad(b:in)", "grad(c.weight)"])
def test_an_exception_in_a_change_carries_the_address_and_leaves_the_model_as_it_was(net, address):
    plain = net(X)
    with pytest.raises(ValueError) as caught, edit(net, {address: raises}):
        net(X.clone().requires_grad_()).sum().backward()
    assert str(caught.value).startswith("boom (in the change at ") and address.rstrip(")") in str(caught.value)
    assert torch.equal(net(X), plain)


def test_an_exception_without_a_message_gets_a_note(net):
    def fail(value):
        raise OSError(2, "no such thing")

    with pytest.raises(OSError) as caught, edit(net, {"a": fail}):
        net(X)
    assert caught.value.__notes__ == ["in the change at a@0"]


def test_what_is_no_change_is_refused_at_once(net):
    with pytest.raises(TypeError, match=r"a: a change is a function of the value, a tensor, .* got str"):
        edit(net, {"a": "zero"})
    with pytest.raises(TypeError, match=r"a: scale needs its arguments: scale\(by"):
        edit(net, {"a": scale})
    with pytest.raises(TypeError, match=r"edit needs one dict of selector: change, .*; got str"):
        edit(net, "a")
    with pytest.raises(TypeError, match="needs a model"):
        edit({"a": zero()}, net)
    with pytest.raises(AddressError, match="did you mean act"):
        edit(net, {"actt": zero()})


def test_a_factory_without_arguments_may_go_without_its_brackets(net):
    with edit(net, {"a": zero, "b": ones}), capture(net, "a", "b") as seen:
        net(X)
    assert not seen["a"].any() and (seen["b"] == 1).all()


def test_an_edit_that_never_fired_warns_and_says_why(net):
    with pytest.warns(TenterhookWarning, match="a was never edited: not reached"):
        with edit(net, {"a": zero()}):
            pass
    with pytest.warns(TenterhookWarning, match=r"grad\(a\) was never edited: no backward inside"):
        with edit(net, {"grad(a)": zero()}) as edits:
            net(X)
    assert edits.report().silent == ["grad(a)"]
    with pytest.warns(TenterhookWarning, match="but not the call"), edit(net, {"a@3": zero()}):
        net(X)
    with edit(net, {"**": scale(1.0)}):  # of a wide selector, some may stay silent
        net.c(X)


def test_the_report_says_how_much_changed(net):
    with edit(net, {"a": add(0.5), "b": lambda v: v - 2, "c": scale(1.0)}) as edits:
        net(X)
        net(X)
    assert list(edits.report()) == [
        ("a", "2×", "add(0.5)", "0.5", "0.5"),
        ("b", "2×", "<lambda>", "2", "2"),
        ("c", "2×", "scale(1.0)", "0", "0"),
    ]
    assert edits.report().notes == ["c: this edit changed nothing"]


def test_the_difference_is_right_although_the_value_is_overwritten_later():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    for change in (lambda v: v + 1, add(1.0), noise_like):
        with edit(model, {"0": change}) as edits:
            model(X)
        assert [row[3:] for row in edits.report()] == [("1", "1")]


def noise_like(value, site):
    return value + torch.ones_like(value)


def test_long_sessions_measure_now_and_then(net):
    with edit(net, {"a": add(1.0)}) as edits, torch.no_grad():
        for _ in range(100):
            net(X)
    assert "in the 11 of 100 calls that were measured" in str(edits.report())  # the first 8, and 16, 32, 64


def test_differences_of_infinities_integers_and_nothing():
    class Model(nn.Module):
        def forward(self, x):
            return x

    model = Model()
    cases = [
        (torch.tensor([-torch.inf, 1.0]), at(1, 3.0), ("2", "1")),
        (torch.tensor([1, 2]), add(3), ("3", "3")),
        (torch.tensor([True, False]), lambda v: ~v, ("1", "1")),
        (torch.zeros(0), scale(2.0), ("–", "–")),
        (torch.tensor([3 + 4j]), zero(), ("5", "5")),
    ]
    for value, change, figures in cases:
        with edit(model, {".": change}) as edits:
            model(value)
        assert [row[3:] for row in edits.report()] == [figures]


# Modes


def test_no_grad_inference_mode_and_autocast(net):
    truth = net(X, after_a=lambda v: v * 2)
    for mode in (torch.no_grad(), torch.inference_mode()):
        for change in (scale(2.0), lambda v: v * 2, lambda v: v.mul_(2), lambda v: (v.mul_(2), None)[1]):
            with edit(net, {"a": change}) as edits, mode:
                torch.testing.assert_close(net(X), truth)
            assert "changed nothing" not in str(edits.report())
    with edit(net, {"a": add(torch.ones(4))}), torch.autocast("cpu", torch.bfloat16), capture(net, "a") as seen:
        net(X)
    assert seen["a"].dtype == torch.bfloat16


def test_in_place_on_leaves_and_views():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 4))
            self.give, self.cut = nn.Identity(), nn.Identity()

        def forward(self, x):
            return (self.give(self.table) * x).sum() + self.cut(x.view(-1)[2:6]).sum()

    model, x = Model(), X.clone().requires_grad_()
    wipe = lambda v: (v.zero_(), None)[1]  # noqa: E731
    with edit(model, {"give": lambda v: v.mul_(3), "cut": wipe, "give:in": lambda v: v.add_(1)}):
        out = model(x)
    out.backward()
    assert torch.allclose(out, (6 * x).sum()) and torch.equal(model.table, torch.ones(3, 4))
    assert torch.allclose(model.table.grad, 3 * X) and torch.equal(x.grad, torch.full((3, 4), 6.0))


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


def test_a_learnable_change_gets_its_gradient_and_its_new_value(net):
    vector = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([vector], lr=1.0)
    losses = []
    with edit(net, {"a": add(vector)}):
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(X).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert vector.grad.any() and len(set(losses)) == 3
    truth = net(X, after_a=lambda v: v + vector)
    with edit(net, {"a": add(vector)}):
        torch.testing.assert_close(net(X), truth)


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


def test_another_thread_is_left_alone(net):
    plain = net(X)
    results = []
    with edit(net, {"a": zero()}):
        thread = threading.Thread(target=lambda: results.append(net(X)))
        thread.start()
        thread.join()
        assert not torch.equal(net(X), plain)
    assert torch.equal(results[0], plain)


def test_two_threads_edit_one_model_each_for_itself(net):
    truth = {k: net(X, after_a=lambda v, k=k: v * k) for k in (2.0, 3.0)}
    barrier, failures = threading.Barrier(2), []

    def work(k):
        for _ in range(50):
            barrier.wait()
            with edit(net, {"a": scale(k)}):
                if not torch.allclose(net(X), truth[k]):
                    failures.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in truth]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_torch_func_transforms(net):
    vmapped = torch.vmap(lambda row: net(row))
    with edit(net, {"a": scale(2.0)}) as edits:
        out = vmapped(X)
    torch.testing.assert_close(out, net(X, after_a=lambda v: v * 2))
    assert edits.report()
    with edit(net, {"a": lambda v: v * 2}):
        grad = torch.func.grad(lambda x: net(x).sum())(X)
    x = X.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(net(x, after_a=lambda v: v * 2).sum(), x)[0])


def test_a_copied_model_is_not_edited(net):
    with edit(net, {"a": zero()}):
        twin = copy.deepcopy(net)
        assert not torch.equal(twin(X), net(X))


def test_an_edit_holds_no_graph_and_no_model(net):
    with edit(net, {"a": scale(2.0), "b": lambda v: v + 1}) as edits:
        out = net(X.clone().requires_grad_())
    kept = [t for tap in edits._session.taps for old, _, new in tap.action.difference._put_off for t in (old, new)]
    assert not any(t.requires_grad for t in kept if t is not None)
    del out


# Found by trying to break it


def test_autocasts_cache_of_weights_does_not_hide_or_keep_a_change():
    m, x = nn.Linear(3, 4, bias=False), torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        plain = m(x)
        with edit(m, {"weight": zero()}):
            assert not m(x).any()
        assert torch.equal(m(x), plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_parameters_of_a_script_module_are_restored():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with edit(model, {"0.weight": zero(), "0.bias": zero()}):
        assert not model(torch.ones(1, 2)).any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_made_in_inference_mode_are_restored():
    with torch.inference_mode():
        m = nn.Linear(2, 2)
        before = m.weight.clone()
        with edit(m, {"weight": zero()}):
            assert not m.weight.any()
        assert torch.equal(m.weight, before)
    with edit(m, {"weight": zero()}):
        assert not m.weight.any()
    assert torch.equal(m.weight, before)
    model = nn.Identity()
    model.register_buffer("wide", torch.zeros(1, 3).expand(4, 3))
    with pytest.raises(EditError, match="wide cannot be edited: unsupported operation"):
        edit(model, {"wide": 1.0}).__enter__()


def test_blocks_that_end_in_the_order_in_which_they_began():
    m = nn.Linear(2, 2)
    before = m.weight.detach().clone()

    def block(k):
        with edit(m, {"weight": scale(k)}):
            yield

    first, second, third = block(2.0), block(3.0), block(5.0)
    for one in (first, second, third):
        next(one)
    for one in (second, first, third):
        one.close()
    assert torch.equal(m.weight, before)


def test_a_parameter_that_is_replaced_inside_comes_back():
    m = nn.Linear(2, 2)
    weight, before = m.weight, m.weight.detach().clone()
    with pytest.warns(TenterhookWarning, match="weight was changed inside the block"):
        with edit(m, {"weight": scale(2.0)}):
            m.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, assign=True)
    assert m.weight is weight and torch.equal(m.weight, before)


def test_what_writes_without_a_trace_is_noticed_too():
    norm = nn.BatchNorm1d(4)
    with pytest.warns(TenterhookWarning, match="running_mean was changed inside"):
        with edit(norm, {"running_mean": 1.0}):
            norm(X + 5)
    assert not norm.running_mean.any()
    m = nn.Linear(4, 2)
    before, optimizer = m.weight.detach().clone(), torch.optim.SGD(m.parameters(), lr=0.1, fused=True)
    with pytest.warns(TenterhookWarning, match="weight was changed inside"), edit(m, {"weight": scale(2.0)}):
        m(X).sum().backward()
        optimizer.step()
    assert torch.equal(m.weight, before)


def test_a_change_that_learns_cannot_be_one_of_a_parameter():
    m, learnt = nn.Linear(2, 2), torch.ones(2, 2, requires_grad=True)
    with pytest.raises(EditError, match="weight cannot be edited: it is changed once, on entering, so no gradient"):
        edit(m, {"weight": add(learnt)}).__enter__()
    with pytest.raises(EditError, match="cannot be edited"):
        edit(nn.Linear(2, 2), {"weight": lambda w: w * learnt}).__enter__()


def test_many_parameters_are_changed_with_one_mode_and_no_hooks():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(300)])
    with edit(model, {"**.weight": scale(2.0)}):
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0


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


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = x * 1
        out = self.relu(h)
        out += 1
        return h


def test_what_a_module_writes_into_its_edited_input_reaches_the_caller():
    model, x = InPlace(), torch.tensor([-1.0, 2.0], requires_grad=True)
    with edit(model, {"relu:in": scale(3.0)}):
        out = model(x)
    assert out.tolist() == [1.0, 7.0]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [0.0, 3.0]
    with edit(model, {"grad(relu:in)": scale(2.0)}):
        out = model(x)
        assert out.tolist() == [1.0, 3.0]
        assert torch.autograd.grad(out.sum(), x)[0].tolist() == [0.0, 2.0]
    with torch.no_grad(), edit(model, {"relu:in": lambda v: v * 3}):
        assert model(x).tolist() == [1.0, 7.0]


def test_whole_numbers_take_no_parts():
    model, x = nn.Identity(), torch.tensor([1, 2, 3])
    for change in (scale(torch.tensor(0.5)), add(torch.tensor(0.7)), scale(0.5), replace(torch.tensor(0.5))):
        with pytest.raises(EditError, match="of 3 int64"), edit(model, {".": change}):
            model(x)
    with pytest.raises(ValueError, match=r"1.5 is no int64, which the value is"), edit(model, {".": 1.5}):
        model(x)
    with edit(model, {".": 2.0}):
        assert model(x).tolist() == [2, 2, 2]
    linear = nn.Linear(4, 2)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), edit(linear, {".": torch.tensor([1, 2])}):
            assert linear(X).tolist() == [[1, 2]] * 3


def test_parts_of_another_shape_are_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"at these positions it made 1 float32 of 4 float32 \(in the change at \.@0\)"
    ):
        with edit(model, {".": at(0, lambda v: v[:1])}):
            model(X)
    with pytest.raises(EditError, match="made 1×4 float32 of 4×4 float32"):
        edit(model, {"weight": any_shape(lambda w: w[:1])}).__enter__()
    with pytest.raises(EditError, match=r"grad\(\.\): a gradient has the shape"):
        edit(model, {"grad(.)": any_shape(lambda g: g[:1])})


def test_parts_of_another_dtype_are_refused():
    for change, x in ((scale(0.5), torch.tensor([3, 4])), (lambda v: v.double(), torch.ones(2))):
        with (
            pytest.raises(ValueError, match="at these positions it made"),
            edit(nn.Identity(), {".": at([0], change)}) as e,
        ):
            e._model(x)
    with edit(nn.Identity(), {".": at(0, scale(2))}) as edits:
        assert edits._model(torch.tensor([3, 4])).tolist() == [6, 4]


def test_any_shape_in_a_list_and_of_a_structure():
    model = nn.Sequential(nn.Linear(4, 4))
    with edit(model, {".": [any_shape(lambda v: v[:2]), scale(2.0)]}):
        assert model(X).shape == (2, 4)

    class Two(nn.Module):
        def forward(self, a, b=0, c=0):
            return a, b, c

    two = Two()
    with edit(two, {".:in": any_shape(lambda given: (*given, 7)), ".": any_shape(lambda out: [*out, 9])}):
        assert two(1, 2) == [1, 2, 7, 9]


def test_the_report_tells_no_lies():
    model, x = nn.Identity(), torch.ones(2)
    with edit(model, {".": lambda v, site: v * 1000 if site.address.call == 9 else None}) as edits:
        for _ in range(12):
            model(x)
    assert edits.report().notes == [".: this edit changed nothing in the 8 of 12 calls that were measured"]
    vector = torch.ones(2)
    with edit(model, {".": add(vector)}) as edits:
        model(x)
    vector.mul_(100)
    assert next(iter(edits.report()))[3:] == ("–", "–") and "overwritten before they could be compared" in str(
        edits.report()
    )
    with edit(model, {".": scale(-1.0)}) as edits:
        model(torch.tensor([4e4], dtype=torch.float16))
    assert next(iter(edits.report()))[3:] == ("8e+04", "8e+04")
    with edit(model, {".": lambda v, site: v * (torch.nan if site.address.call else 2)}) as edits:
        model(x)
        model(x)
    assert next(iter(edits.report()))[3:] == ("nan", "nan")


def test_sparse_gradients():
    model = nn.Embedding(4, 3, sparse=True)
    with edit(model, {"grad(weight)": scale(2.0)}) as edits:
        model(torch.tensor([1, 1])).sum().backward()
    assert model.weight.grad.to_dense()[1].tolist() == [4.0, 4.0, 4.0]
    assert "grad(weight): a sparse tensor cannot be compared" in str(edits.report())


def test_a_change_that_raised_and_was_caught_says_so(net):
    model = Swallows()
    with pytest.warns(TenterhookWarning, match="inner was never edited: its change failed"):
        with edit(model, {"inner": raises}):
            model(X)


def test_an_output_without_a_tensor():
    class Nothing(nn.Module):
        def forward(self, x):
            return None

    model = Nothing()
    with pytest.raises(EditError, match=r"zero\(\) changes one tensor, and this is None, without any"):
        with edit(model, {".": zero()}):
            model(X)


def test_a_moved_tensor_is_kept_once():
    vector, model = torch.zeros(4), nn.Linear(4, 4).double()
    change = add(vector)
    with edit(model, {".": change}):
        for _ in range(20):
            vector.add_(1)
            model(X.double())
    assert len(change._moved) == 1


# Found by trying it as a newcomer


def test_what_is_no_tensor_is_not_said_to_be_unchanged():
    class Box:
        def __init__(self):
            self.t = torch.ones(2)

    class Model(nn.Module):
        def forward(self, box, x):
            return box.t + x

    def wipe(box):
        box.t.zero_()

    model, box = Model(), Box()
    with edit(model, {".:in[box]": wipe}) as edits:
        assert model(box, torch.ones(2)).tolist() == [1, 1]
    assert "what is no tensor in it was not compared" in str(edits.report())
    with edit(model, {".:in": lambda given: wipe(given[0])}) as edits:
        model(Box(), torch.ones(2))
    assert "what is no tensor in it was not compared" in str(edits.report())


def test_structures_keep_their_type_unless_it_is_meant():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x + 1

    model = Pair()
    with pytest.raises(EditError, match=r"made list\(0, 1\) of tuple\(0, 1\); the type and the leaves must stay"):
        with edit(model, {".": list}):
            model(X)
    with edit(model, {".": any_shape(lambda pair: {"a": pair[0]})}) as edits:
        assert list(model(X)) == ["a"]
    assert "its leaves are not those that it had before" in str(edits.report())
    with pytest.raises(EditError, match=r"made 0.0 of 3×4 float32; return a tensor like the value"):
        with edit(nn.Identity(), {".": lambda v: 0.0}) as edits:
            edits._model(X)


def test_a_missing_return_is_guessed(net):
    def forgetful(value):
        value * 2

    with edit(net, {"a": forgetful}) as edits:
        net(X)
    assert edits.report().notes == ["a: this edit changed nothing: its function returned None and wrote nothing"]


def test_a_direction_can_be_learnt(net):
    direction = torch.rand(4, requires_grad=True)
    with edit(net, {"a": project_out(direction)}):
        out = net(X)
    out.pow(2).sum().backward()
    d = direction.detach().clone().requires_grad_()
    truth = net(X, after_a=lambda v: v - (v @ d)[:, None] * d / d.dot(d))
    truth.pow(2).sum().backward()
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(direction.grad, d.grad)


def test_mistakes_of_the_first_hour(net):
    with pytest.raises(TypeError, match=r'edit needs one dict .*edit\(model, {"fc": zero\(\)}\); got str and 1 more'):
        edit(net, "a", zero())
    with pytest.raises(TypeError, match=r"at\(index: Any, change: Any\): a change is a function .* got ellipsis"):
        at(zero(), ...)
    with pytest.raises(TypeError, match=r"mean\(dim: .*\): missing a required argument: 'dim'"):
        mean()
    with pytest.raises(TypeError, match="add: vector is a tensor or a number, got list"):
        add([1.0, 2.0])
    with pytest.raises(TypeError, match=r"a: observing changes nothing; zero\(\) is for edit"):
        observe(net, {"a": zero()})
    assert repr(edit(net, {"a": zero(), "b": 1})) == "<edit of a: zero(), b: replace(1)>"
    assert "use it in a `with` block" in str(edit(net, {"a": zero()}).report())


# Found in the second attempt to break it


def test_threads_that_change_one_parameter_leave_it_as_it_was():
    model = nn.Linear(800, 800, bias=False)
    before = model.weight.detach().clone()

    def work(k):
        for _ in range(15):
            with warnings.catch_warnings(), edit(model, {"weight": scale(k)}):
                warnings.simplefilter("ignore")

    threads = [threading.Thread(target=work, args=(k,)) for k in (2.0, 3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each sees that the other was there
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(model.weight, before)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = x * 1
        self.relu(h)
        return h


def test_several_sessions_at_the_input_of_a_module_that_writes_into_it():
    model, x = Writes(), torch.tensor([-1.0, 2.0], requires_grad=True)
    with edit(model, {"relu:in": scale(3.0), "grad(relu:in)": scale(1.0)}):
        out = model(x)
        out.sum().backward()
        assert out.tolist() == [0, 6] and x.grad.tolist() == [0, 3]
    with edit(model, {"relu:in": scale(3.0), "relu:in[0]": add(1.0)}):
        assert model(x).tolist() == [0, 7]
    with edit(model, {"relu:in": scale(3.0)}), edit(model, {"relu:in": add(1.0)}):
        assert model(x).tolist() == [0, 7]
    x = x.detach()
    with edit(model, {"relu:in": scale(2.0)}, frozen=True), capture(model, "grad(relu:in)", frozen=True):
        assert model(x).tolist() == [0, 4]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, edit(model, {"relu:in": scale(3.0)}):
            assert model(x).tolist() == [0, 6]
        with mode, edit(nn.Identity(), {".:in": scale(3.0)}) as edits:
            assert edits._model(x).tolist() == [-3, 6]
        assert x.tolist() == [-1, 2]


def test_a_call_that_failed_is_forgotten():
    class Fails(nn.Module):
        def forward(self, x, fail):
            x.mul_(3)
            if fail:
                raise ValueError
            return x + 1

    model, a, b = Fails(), torch.ones(2), torch.ones(2)

    def go(x, fail):
        return model(x, fail)

    with edit(model, {".:in[0]@0": scale(2.0)}):
        with pytest.raises(ValueError):
            go(a, True)
        go(b, False)
    assert a.tolist() == [1, 1] and b.tolist() == [3, 3]


def test_a_module_may_write_into_a_leaf_where_it_says_no_grad():
    class Clamps(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                x.clamp_(max=1)
            return x * 2

    model, x = Clamps(), torch.tensor([0.5, 3.0], requires_grad=True)
    with edit(model, {".:in": scale(1.0)}):
        model(x)
    assert x.tolist() == [0.5, 1.0]


def test_a_refused_change_is_not_counted():
    lstm = nn.LSTM(3, 3)
    edits = edit(lstm, {".": zero()})
    with pytest.raises(EditError, match="changes one tensor"), edits:
        lstm(torch.randn(2, 1, 3))
    assert edits.report().silent == ["."] and "its change failed" in str(edits.report())


def test_a_failed_change_is_not_counted(net):
    edits = edit(net, {"a": mean(7)})
    with pytest.raises(IndexError), edits:
        net(X)
    assert edits.report().silent == ["a"] and "its change failed" in str(edits.report())


@pytest.mark.parametrize("change", [lambda v: v[:, :2], lambda v, site: v[:, :2]])
def test_a_refused_change_that_the_model_swallows_is_not_said_to_be_applied(change):
    model = Swallows()
    with pytest.warns(TenterhookWarning, match="inner was never edited: its change failed"):
        with edit(model, {"inner": change}) as edits:
            model(X)
    assert edits.report().silent == ["inner"]


@pytest.mark.parametrize("takes_site", [False, True])
def test_a_change_that_failed_once_and_was_swallowed_is_told(takes_site):
    model, calls = Swallows(), []

    def change(v, *site):
        calls.append(v)
        return v * 2 if len(calls) != 2 else v[:, :2]

    with pytest.warns(TenterhookWarning, match="inner: its change failed in 1 of 3 calls, and the exception"):
        with edit(model, {"inner": change if takes_site else lambda v: change(v)}) as edits:
            for _ in range(3):
                model(X)
    assert "its change failed in 1 of 3 calls" in str(edits.report())


class Swallows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        try:
            return self.inner(x)
        except (RuntimeError, ValueError):
            return x


def test_a_parameter_has_no_calls():
    with pytest.raises(AddressError, match="weight is a parameter, which is one tensor; inputs, leaves and calls"):
        edit(nn.Linear(2, 2), {"weight@1": zero()})


def test_gradients_edited_after_the_reduction_have_figures():
    fc = nn.Linear(4, 4)
    with edit(fc, {"grad(weight)": scale(3.0)}, reduced=True) as edits:
        fc(X).sum().backward()
    (_, applied, _, largest, _) = next(iter(edits.report()))
    assert applied == "1×" and float(largest) == pytest.approx(float(fc.weight.grad.abs().max()) * 2 / 3, rel=1e-2)


def test_a_failure_at_one_of_many_sites_is_told():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 3)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.a(x)
            return self.b(x)

    model = Tries()
    with pytest.warns(TenterhookWarning, match="a was never edited: its change failed"):
        with edit(model, {"*": add(torch.ones(3))}):
            model(X)


def test_a_tensor_of_inference_mode_outside_of_it_has_figures():
    with torch.inference_mode():
        x = torch.ones(2, 4)
    for change in (scale(3.0), lambda v: v * 3):
        with edit(nn.Identity(), {".": change}) as edits:
            edits._model(x)
        assert next(iter(edits.report()))[3:] == ("2", "2")


class Collects(nn.Module):
    """Takes the last of what it is given, in a list and in other containers, and puts its own there."""

    def forward(self, x, skips, cache, state):
        h = x * 2 + skips.pop() + cache["h"] + state.h
        skips.insert(0, h)
        cache["n"] = cache.pop("n") + 1
        cache["h"] = h * 3
        cache["new"] = [h]
        cache["inner"].append(h)
        state.h = h * 5
        return h


@dataclass
class State:
    h: torch.Tensor


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = Collects()

    def forward(self, x):
        skips, inner = [x * 7, x], [x]
        cache, state = {"h": x, "n": 1, "inner": inner}, State(x)
        h = self.b(x, skips, cache, state=state)
        first = [h, *skips, cache["h"], *cache["new"], *inner, state.h]
        assert len(skips) == 2 and cache["n"] == 2 and list(cache) == ["h", "inner", "n", "new"]
        h = self.b(x, skips, cache, state=state)
        return torch.stack([*first, h, *skips, cache["h"], *cache["new"], *inner, state.h])


@pytest.mark.parametrize(
    "changes",
    [
        {"grad(b:in)": scale(1.0)},
        {"grad(b:in[skips][-1])": scale(1.0)},
        {"b:in[skips][0]": scale(1.0)},
        {"b:in[cache][h]": scale(1.0)},
        {"b:in[cache][inner]": lambda v: None},
        {"b:in[state]": lambda v: None},
        {"b:in": lambda v: None},
        {"b:in": lambda v: None, "grad(b:in)": scale(1.0)},
    ],
    ids=", ".join,
)
def test_what_a_module_puts_into_a_container_reaches_the_caller(changes):
    model, x = Caller(), torch.ones(2, requires_grad=True)
    truth = model(x)
    (grad,) = torch.autograd.grad(truth.sum(), x)
    with edit(model, changes), edit(model, {"b:in[state][h]": scale(1.0)}):
        out = model(x)
        assert torch.equal(out, truth)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], grad)
    with capture(model, "grad(b:in)", frozen=True):
        assert torch.equal(model(x.detach()), truth)


def test_what_stays_in_an_edited_list_is_the_callers_own():
    class Pops(nn.Module):
        def forward(self, skips):
            return skips.pop(0) * 1

    model, a, b = Pops(), torch.ones(2), torch.ones(2)
    skips = [a, b]
    with edit(model, {".:in": lambda v: [x * 10 for x in v]}):
        assert model(skips).tolist() == [10, 10]
    assert len(skips) == 1 and skips[0] is b


def test_a_moved_tensor_is_for_all_that_come_later():
    model, x = nn.Sequential(nn.Linear(2, 2)).double(), torch.ones(1, 2).double()
    by = torch.tensor([1.0, 2.0])
    truth = model(x) * by.double()
    with edit(model, {"0": scale(by)}):
        with torch.inference_mode():
            model(x)
        out = model(x)
        out.sum().backward()
    assert torch.equal(out, truth)
    for transform in (torch.func.grad(lambda x: model(x).sum()), torch.vmap(model), torch.func.jacrev(model)):
        with edit(model, {"0": scale(by)}):
            transform(x)
            assert torch.equal(model(x), truth)


def test_reports_of_calls_under_vmap():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    for change in (scale(2.0), lambda v: v * 2):
        with edit(model, {"0": change}) as edits:
            for _ in range(3):
                torch.vmap(model)(x)
        assert next(iter(edits.report()))[1] == "3×" and "cannot be compared" in str(edits.report())
        with edit(model, {"0": change}) as edits:
            model(x)
            for _ in range(2):
                torch.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
        assert float(next(iter(edits.report()))[3]) == pytest.approx(model(x).abs().max().item(), rel=0.01)


def test_how_much_of_a_vector_can_be_learnt():
    model, x, vector = nn.Sequential(nn.Linear(2, 2)), torch.ones(3, 2), torch.tensor([1.0, 2.0])
    for start in (torch.tensor(0.9), torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.ones(3, 1)):
        times = start.requires_grad_()
        with edit(model, {"0": add(vector, times=times)}):
            out = model(x)
        truth = model(x) + times * vector
        torch.testing.assert_close(out, truth)
        grads = [torch.autograd.grad(one.pow(2).sum(), times)[0] for one in (out, truth)]
        torch.testing.assert_close(*grads)


class Log(list):
    """A list that counts, and that nobody can make with its items."""

    def __init__(self):
        super().__init__()
        self.appended = 0

    def append(self, x):
        self.appended += 1
        super().append(x)


@dataclass
class Counted:
    h: torch.Tensor
    steps: int = 0


def append(given):
    given.append(given[0] + 1)


def count(given):
    given["count"] = 2


def use(given):
    given["a"] = given.pop("a")


def empty_second(given):
    given.pop(0)
    given[0].clear()


def step(given):
    given.steps += 1
    given.more = 3


def counting_log():
    log = Log()
    log.append(torch.ones(2))
    return log


def without_debug(given):
    given["flag"] = True
    del given["debug"]
    return given


@pytest.mark.parametrize(
    ("make", "does", "change"),
    [
        (counting_log, append, lambda v: None),
        (lambda: deque([torch.ones(2)]), append, lambda v: None),
        (lambda: [torch.ones(2), torch.zeros(2)], append, any_shape(lambda v: v[:1])),
        (lambda: {"h": torch.ones(2), "debug": 1}, count, without_debug),
        (lambda: {"a": torch.ones(1), "b": torch.zeros(1)}, use, lambda v: None),
        (lambda: [{"t": torch.ones(1)}, {"t": torch.zeros(1)}, {}], empty_second, lambda v: None),
        (lambda: Counted(torch.ones(2)), step, lambda v: None),
    ],
    ids=["list of a kind", "deque", "shortened list", "other keys", "order", "emptied", "attributes"],
)
def test_what_a_module_does_to_a_container_is_done_to_the_callers_own_and_nothing_else(make, does, change):
    class Doing(nn.Module):
        def forward(self, given):
            does(given)
            return torch.zeros(1)

    def parts_of(x):
        attributes = vars(x).items() if hasattr(x, "__dict__") and not isinstance(x, torch.Tensor) else ()
        return [
            *attributes,
            *(x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, deque)) else ()),
        ]

    def things_in(x):
        return [x, *(thing for _, part in parts_of(x) for thing in things_in(part))]

    def told(x, known):
        which = next((i for i, thing in enumerate(known) if thing is x), "new")
        return x if isinstance(x, int) else (which, [(key, told(part, known)) for key, part in parts_of(x)])

    model, given, twin = nn.Sequential(Doing()), make(), make()
    known, known_to_twin = things_in(given), things_in(twin)
    does(twin)
    with edit(model, {"0:in": change}):
        model(given)
    assert told(given, known) == told(twin, known_to_twin)


def test_a_container_that_is_handed_on_is_the_callers():
    class Block(nn.Module):
        def forward(self, x, kept):
            kept.append(x * 2)
            return x + 1, kept

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x, kept):
            x, kept = self.a(x, kept)
            return self.b(x, kept)[0]

    net, kept = Net(), [first := torch.zeros(1)]
    with edit(net, {"a:in": lambda v: None}):
        net(torch.ones(1), kept)
    assert kept[0] is first and torch.cat(kept).tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    "changes",
    [{"0:in": lambda v: None}, {"0:in[0][now][0][0]": scale(1.0)}, {"grad(0:in)": scale(1.0)}],
    ids=["all", "a leaf", "gradient"],
)
@pytest.mark.parametrize(
    "again",
    [lambda x: x, lambda x: [x], lambda x: (1, x[0]), lambda x: {"k": deque([x])}],
    ids=["moved", "in a list", "unpacked", "deeper"],
)
def test_a_container_that_a_module_stores_inside_another_is_the_callers(again, changes):
    class Stores(nn.Module):
        def forward(self, state):
            state["before"] = again(state["now"])
            return state["now"][0][0] * 2

    def found(x):
        while not (isinstance(x, list) and isinstance(x[0], torch.Tensor)):
            x = x["k"] if isinstance(x, dict) else x[-1]
        return x

    model, h = nn.Sequential(Stores()), torch.ones(2, requires_grad=True)
    state = {"now": (own := [h],)}
    with edit(model, changes):
        model[0](state).sum().backward()
    assert found(state["before"]) is own and state["now"][0] is own and len(own) == 1 and own[0] is h
    assert type(state["before"]) is type(again(state["now"]))


@pytest.mark.parametrize("change", [{"0:in[0][h]": scale(1.0)}, {"0:in": lambda v: None}], ids=["a leaf", "all"])
def test_a_container_that_a_module_stores_in_another_argument_is_the_callers(change):
    class Stores(nn.Module):
        def forward(self, state, history):
            history["all"].append((state, state["h"]))
            return state["h"] * 2

    model, state, every = nn.Sequential(Stores()), {"h": torch.ones(2)}, []
    with edit(model, change):
        model[0](state, {"all": every})
    assert len(every) == 1 and every[0][0] is state


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)])
def test_an_output_that_refuses_writes_stays_as_it_is(wrap):
    class Locked(dict):
        def __setitem__(self, key, value):
            raise RuntimeError("locked")

    class HandsOn(nn.Module):
        def forward(self, kept):
            kept.append(kept[0] * 2)
            self.out = wrap(Locked(kept=kept))
            return self.out

    model, kept = nn.Sequential(HandsOn()), [torch.ones(1)]
    with edit(model, {"0:in": lambda v: None}):
        assert model(kept) is model[0].out
    assert torch.cat(kept).tolist() == [1, 2]


def test_parts_that_are_attributes_too_are_edited_there_and_kept_as_copies():
    class Out(tuple):
        def __init__(self, parts):
            self.logits = self[0]

    class Head(nn.Module):
        def forward(self, x):
            return Out((x * 2, x * 3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Head()

        def forward(self, x):
            return self.head(x).logits + 0

    net, x = Net(), torch.ones(2, requires_grad=True)
    with edit(net, {"head[0]": zero()}):
        assert net(x).tolist() == [0, 0]
    with capture(net, "head") as seen:
        net(x)
    assert seen["head"].logits is seen["head"][0] and seen["head"].logits.grad_fn is None


def test_nan_in_inference_mode_is_no_write_into_an_input():
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3))
    with torch.inference_mode():
        x = torch.ones(3)
        with edit(model, {"1:in": lambda v: v * float("nan")}):
            assert model(x).isnan().all()
    assert torch.equal(x, torch.ones(3))


class Keeps(nn.Module):
    """Puts what it is given into containers that it is given, in other places and beside itself."""

    def forward(self, k, pair, past, s):
        past.append(k)
        past.append(pair)
        s["prev"], s["t"], s["h"] = s["h"], (s["h"],), s["h"] + 1
        return k + past[0]


@pytest.mark.parametrize("verb", ["in", "grad"])
def test_an_input_that_a_module_puts_in_another_place_is_the_edited_one(verb):
    model, x = nn.Sequential(Keeps()), torch.ones(2, requires_grad=True)

    def given():
        return x * 1, (x * 2,), [x * 3], {"h": x * 4}

    def run(call, times):
        k, pair, past, s = call
        out = model[0](k, pair, past, s)
        return [times(t) for t in (out, past[1], past[2][0], s["prev"], s["t"][0], s["h"])], past[0]

    k, (p,), (q,), s = given()
    twin = model[0](k * 2, (p * 2,), past := [q * 2], t := {"h": s["h"] * 2})
    truth = [twin, past[1], past[2][0], t["prev"], t["t"][0], t["h"]]
    call = given()
    if verb == "in":
        with edit(model, {"0:in": lambda v: (v[0] * 2, (v[1][0] * 2,), [v[2][0] * 2], {"h": v[3]["h"] * 2})}):
            out, first = run(call, lambda t: t)
        assert all(map(torch.equal, out, truth)) and torch.equal(first, x * 3)
        return
    with edit(model, {"grad(0:in)": scale(2.0)}):
        out, first = run(call, lambda t: t)
        (grad,) = torch.autograd.grad(sum(t.sum() for t in out), x)
    assert torch.equal(grad, torch.autograd.grad(sum(t.sum() for t in truth), x)[0])


@pytest.mark.parametrize(
    ("does", "left"),
    [
        (lambda v: v.reverse(), [3, 2, 1]),
        (lambda v: v.append(v.pop(0)), [2, 3, 1]),
        (lambda v: v.append(v[0]), [1, 2, 3, 10]),
        (lambda v: v.__setitem__(0, v[1]), [20, 2, 3]),
        (lambda v: v.insert(1, v[0] * 1), [1, 10, 2, 3]),
    ],
    ids=["reversed", "rotated", "appended", "doubled", "inserted"],
)
def test_what_moves_in_a_list_is_the_callers_and_what_is_doubled_is_edited(does, left):
    class Doing(nn.Module):
        def forward(self, v):
            does(v)
            return v[0]

    model, v = nn.Sequential(Doing()), [torch.tensor(i) for i in (1, 2, 3)]
    with edit(model, {"0:in": lambda v: [x * 10 for x in v]}):
        model(v)
    assert [x.item() for x in v] == left


class Registered:
    """A class that torch.utils._pytree knows: its part is an attribute, in one, or in an object of its own."""

    def __init__(self, h):
        self.h, self.steps = h, 0


class RegisteredList:
    def __init__(self, layers=()):
        self.layers = list(layers)


class RegisteredCache(RegisteredList):
    pass


class Unknown:
    def __init__(self, h):
        self.h = h


class InSlot:
    __slots__ = ("h",)


class RegisteredSlot(InSlot):
    def __init__(self, h, note=None):
        self.h = h
        if note:
            self.note = note


pytree.register_pytree_node(Registered, lambda r: ([r.h], None), lambda parts, _: Registered(*parts))
pytree.register_pytree_node(RegisteredList, lambda r: (list(r.layers), None), lambda parts, _: RegisteredList(parts))
pytree.register_pytree_node(
    RegisteredCache,
    lambda r: ([layer.h for layer in r.layers], None),
    lambda parts, _: RegisteredCache(map(Unknown, parts)),
)
pytree.register_pytree_node(
    RegisteredSlot, lambda r: ([r.h], vars(r).get("note")), lambda parts, note: RegisteredSlot(*parts, note)
)


def test_what_a_module_does_to_a_registered_class_is_done_to_the_callers():
    class Steps(nn.Module):
        def forward(self, x, state, cache, slot, some):
            cache.layers.append(Unknown(x))
            some.layers.append(x)
            state.h, state.steps, slot.h = state.h + x, state.steps + 1, slot.h * 3
            return state.h * len(cache.layers) * len(some.layers)

    model, x = nn.Sequential(Steps()), torch.ones(2, requires_grad=True)
    grad, part = {"grad(0:in)": scale(1.0)}, {"0:in[1][0]": scale(1.0), "0:in[3][0]": scale(1.0)}
    for changes in ({"0:in": lambda v: None}, part, {"0:in[0]": scale(1.0)}, grad):
        state, cache, some = Registered(x * 2), RegisteredCache(), RegisteredList([x])
        layers, slot = some.layers, RegisteredSlot(x * 1, "a note")
        with edit(model, changes):
            outs = [model[0](x, state, cache, slot, some) for _ in range(2)]
            sum(outs).sum().backward()
        assert [out.tolist() for out in outs] == [[6, 6], [24, 24]] and state.steps == 2 and len(cache.layers) == 2
        assert state.h.tolist() == [4, 4] and slot.h.tolist() == [9, 9] and slot.note == "a note"
        assert some.layers is layers and len(layers) == 3 and layers[0] is x


@pytest.mark.parametrize(
    "made", [lambda h: RegisteredList([h]), lambda h: RegisteredSlot(h), lambda h: RegisteredSlot(h, "a note")]
)
def test_a_write_into_a_registered_class_reaches_nobody_else(made):
    class Makes(nn.Module):
        def forward(self, x):
            self.h = x * 2
            return made(self.h)

    def write(value):
        pytree.tree_leaves(value)[0].mul_(10)

    model, x = nn.Sequential(Makes()), torch.ones(2)
    with edit(model, {"0": write}), capture(model, "0") as seen:
        (out,) = pytree.tree_leaves(model(x))
    assert out.tolist() == [20, 20] and model[0].h.tolist() == [2, 2]
    assert pytree.tree_leaves(seen["0"])[0].tolist() == [20, 20]


class Batch(MutableMapping):
    """A mapping that is no dict, whose copy would share what it holds."""

    def __init__(self, **held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_tensors_in_what_cannot_be_copied_are_not_edited():
    class Takes(nn.Module):
        def forward(self, x, batch):
            return x + batch["h"]

    def write(v):
        v[1]["h"].mul_(5)

    model, x = nn.Sequential(Takes()), torch.ones(3, requires_grad=True)
    h = x * 1
    with pytest.raises(EditError, match=r"it wrote into .* \(in the change at 0:in@0\)"), edit(model, {"0:in": write}):
        model[0](x, Batch(h=torch.ones(3)))
    with pytest.raises(EditError, match=r"grad\(0:in\) .* Batch cannot be made anew"):
        with edit(model, {"grad(0:in)": scale(3.0)}):
            model[0](x, Batch(h=h))
    with edit(model, {"0:in": lambda v: (v[0] * 2, Batch(h=v[1]["h"] * 3))}):
        assert model[0](x, Batch(h=h)).tolist() == [5, 5, 5]
    with edit(model, {"0:in[0]": scale(3.0)}):
        assert model[0](x, Batch(h=h)).tolist() == [4, 4, 4]
    with edit(model, {"0:in": lambda v: (v[0] * 2, v[1])}), pytest.raises(KeyError):
        model[0](x, Batch(n=1))  # there is no tensor in it


def test_what_a_module_writes_into_its_edited_input_reaches_the_caller_under_vmap():
    class Reads(Writes):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

    x = torch.tensor([[-1.0, float("nan"), 2.0], [3.0, -4.0, 5.0]])
    for model, truth in ((Writes(), x.relu() * 2), (Reads(), x)):
        with edit(model, {"relu:in": scale(2.0)}):
            for transformed in (
                torch.vmap(model),
                torch.vmap(torch.vmap(model)),
                torch.vmap(model, in_dims=1, out_dims=1),
            ):
                assert torch.equal(transformed(x).nan_to_num(7), truth.nan_to_num(7))
            total = torch.func.grad(lambda x, f: torch.vmap(f)(x).nan_to_num().sum())(x, model)
            assert torch.equal(total[1], torch.tensor([2.0, 0.0, 2.0]) if truth is not x else torch.ones(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["layers.0", "layers.1:in[src]"])
def test_nested_tensors_are_edited_by_functions(where, mode):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    src, pad = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with mode():
        handle = encoder.layers[0].register_forward_hook(lambda m, given, out: out * 2)
        truth = encoder(src, src_key_padding_mask=pad)
        handle.remove()
        with edit(encoder, {where: lambda v: v * 2}) as edits:
            assert torch.equal(encoder(src, src_key_padding_mask=pad), truth)
    assert "cannot be compared" in str(edits.report())


def test_the_order_of_a_mapping_is_the_one_that_the_module_made():
    class Uses(nn.Module):
        def forward(self, x, cache):
            cache["new"] = x
            cache.move_to_end("b")
            return x

    model, x = nn.Sequential(Uses()), torch.ones(2)
    cache = OrderedDict(a=x, b=x * 2)
    with edit(model, {"0:in": lambda v: None}):
        model[0](x, cache)
    assert list(cache) == ["a", "new", "b"]


@pytest.mark.parametrize(
    "wrap", [lambda s: {"s": s}, lambda s: [s], lambda s: (1, [s]), Counted, lambda s: {"deep": (s,)}], ids=range(5)
)
def test_a_container_that_is_handed_on_inside_another_is_the_callers(wrap):
    class HandsOn(nn.Module):
        def forward(self, x, state):
            state["h"] = x * 2
            return wrap(state)

    def unwrapped(x):
        while not (isinstance(x, dict) and "h" in x):
            x = x.h if isinstance(x, Counted) else next(iter(x.values())) if isinstance(x, dict) else x[-1]
        return x

    model, x, state = nn.Sequential(HandsOn()), torch.ones(2), {"h": torch.zeros(2)}
    with edit(model, {"0:in": lambda v: None}), edit(model, {"0:in[1][h]": scale(1.0)}):
        assert unwrapped(model[0](x, state)) is state
    assert state["h"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"0:in[0]": scale(2.0)},
        {"0:in": lambda v: (v[0] * 2, v[1])},
        {"0:in": lambda v: v[0].mul_(2)[:0].tolist() or None},
    ],
    ids=["beside", "all", "in place"],
)
def test_an_input_that_refers_to_itself(changes):
    class Takes(nn.Module):
        def forward(self, x, loop):
            loop.append(x)
            return x * loop[1][0] * loop[1][1][0]

    loop = [torch.tensor([3.0])]
    loop += [loop, (loop,)]
    model, x = nn.Sequential(Takes()), torch.ones(1, requires_grad=True)
    with edit(model, {"grad(0:in)": scale(5.0)}), edit(model, changes):
        out = model[0](x * 1, loop)
        (grad,) = torch.autograd.grad(out, x)
    assert out.item() == 18 and grad.item() == 90
    assert loop[1] is loop and loop[2][0] is loop and loop[0].item() == 3 and loop[3].item() == 2
