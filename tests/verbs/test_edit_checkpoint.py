"""Edits under activation checkpointing: the recomputation makes them again, even after the session is over."""

import contextlib
import functools
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tenterhook import EditError, TenterhookWarning, capture, edit, observe
from tenterhook.changes import add, at, noise, ones, replace, reverse, scale, zero
from tests.hooks.test_checkpoint import Net as Segments

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
X = torch.randn(3, 4)


class Net(Segments):
    """Three segments; `shared` runs in all of them, twice in each; `through` hands its input on."""

    def __init__(self, reentrant=None):
        super().__init__(reentrant)
        self.through = nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def segment(self, layer, x):
        h = self.shared(layer(x)).tanh()
        h = self.relu(self.shared(h)) * h
        return self.through(h).sin() * h


EDITS = {
    "output": {"layers.1": scale(2.0)},
    "function": {"layers.1": lambda v: v.mul_(2)},
    "input": {"shared:in": add(0.5)},
    "one call": {"shared@3": zero()},
    "by call": {"shared": lambda v, site: v * (1 + site.address.call)},
    "pass-through": {"through": scale(3.0)},
    "constant": {"layers.0": replace(torch.ones(3, 4))},
    "noise": {"layers.1": noise(0.5)},
    "own generator": {"layers.1": noise(0.5, seed=3)},
    "part": {"shared@1": at((..., 0), ones())},
    "several": {"layers.*": scale(0.5), "shared@2": add(1.0), "relu:in": lambda v: v + 1},
    "gradient": {"grad(shared)": scale(2.0)},
    "gradient of one call": {"grad(shared@4)": reverse()},
    "gradient of an input": {"grad(relu:in)": scale(0.5)},
    "gradient of a pass-through": {"grad(through)": zero()},
    "gradient and value": {"layers.1": scale(2.0), "grad(layers.1)": scale(3.0)},
    "parameter": {"shared.weight": scale(2.0)},
}


def run(model, edits, inside=True, backwards=1):
    torch.manual_seed(3)
    model.zero_grad()
    x = X.clone().requires_grad_()
    with edit(model, edits) as session:
        loss = model(x).pow(2).sum()
        if inside:
            for _ in range(backwards):
                loss.backward(retain_graph=backwards > 1)
    if not inside:
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)
    return loss.detach(), x.grad, [p.grad for p in model.parameters()], session


def pair(reentrant):
    plain, wrapped = Net(), Net(reentrant)
    wrapped.load_state_dict(plain.state_dict())
    return plain, wrapped


def same(a, b):
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1], b[1])
    for p, q in zip(a[2], b[2], strict=True):
        torch.testing.assert_close(p, q)


@BOTH
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_edits_under_a_checkpoint_equal_those_without_one(reentrant, edits, backwards):
    plain, wrapped = pair(reentrant)
    truth, mine = run(plain, edits, backwards=backwards), run(wrapped, edits, backwards=backwards)
    same(mine, truth)
    rows = [row[:2] for row in truth[3].report()]
    assert [row[:2] for row in mine[3].report()] == rows
    unedited = wrapped(X.clone().requires_grad_())
    assert torch.equal(unedited, plain(X)), "nothing stays"


VALUES = {name: edits for name, edits in EDITS.items() if not name.startswith(("gradient", "parameter"))}


@BOTH
@pytest.mark.parametrize("edits", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_backward_after_the_session_recomputes_with_the_edit(reentrant, edits, backwards):
    plain, wrapped = pair(reentrant)
    truth, mine = run(plain, edits, False, backwards), run(wrapped, edits, False, backwards)
    same(mine, truth)
    rows = [row[:2] for row in truth[3].report()]
    assert [row[:2] for row in mine[3].report()] == rows


@BOTH
def test_a_parameter_that_was_restored_before_the_backward_is_an_error(reentrant):
    _, model = pair(reentrant)
    with pytest.raises(
        EditError, match=r"shared.weight: it ran with a changed value under a checkpoint.*inside the block"
    ):
        run(model, {"shared.weight": scale(2.0)}, inside=False)
    run(model, {"layers.0": scale(2.0)}, inside=False)


@BOTH
def test_nested_sessions_that_are_over_act_in_their_order(reentrant):
    plain, wrapped = pair(reentrant)

    def both(model):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"shared": scale(2.0)}):
            with edit(model, {"shared": add(1.0), "layers.0": scale(0.5)}):
                loss = model(x).sum()
        with pytest.warns(TenterhookWarning), edit(model, {"shared": zero()}):  # not there when the forward ran
            loss.backward()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    same(both(wrapped), both(plain))


@BOTH
def test_several_forwards_some_edited_and_backwards_in_another_order(reentrant):
    plain, wrapped = pair(reentrant)

    def several(model):
        model.zero_grad()
        x = X.clone().requires_grad_()
        first = model(x).sum()
        with edit(model, {"shared@7": zero(), "layers.1": scale(3.0)}):
            second, third = model(x * 2).sum(), model(x * 3).sum()
            fourth = model(x).pow(2).sum()
            third.backward()
        (fourth + first).backward()
        second.backward()
        return third.detach(), x.grad, [p.grad for p in model.parameters()]

    same(several(wrapped), several(plain))


@BOTH
def test_a_session_opened_inside_the_checkpointed_function(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def function(x):
        with edit(model, {"0": scale(3.0), "2@0": add(1.0)}):
            return model(x).sin()

    x = X.clone().requires_grad_()
    truth = torch.autograd.grad(function(x).sum(), [x, *model.parameters()])
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    for mine, theirs in zip([x.grad, *(p.grad for p in model.parameters())], truth, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch says so of the inner one
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_within_a_checkpoint(outer, inner, inside):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())

    def part(x):
        return model[3](model[2](model[1](model[0](x))))

    def whole(x, kind=None):
        half = part if kind is None else lambda x: checkpoint(part, x, use_reentrant=kind)
        return half(half(x) * 2).sin() + half(x)

    def go(function):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"0@1": scale(3.0), "2": lambda v, site: v * (site.address.call + 1)}):
            loss = function(x).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    truth = go(whole)
    same(go(lambda x: checkpoint(whole, x, inner, use_reentrant=outer)), truth)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch says so of the inner one
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradients_within_a_checkpoint_within_a_checkpoint(outer, inner):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def whole(x, kind=None):
        half = model if kind is None else lambda x: checkpoint(model, x, use_reentrant=kind)
        return half(half(x) * 2).sin()

    def go(function):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"grad(0@0)": scale(3.0)}), capture(model, "0", "grad(0)") as seen:
            function(x).sum().backward()
        return seen, x.grad, model[0].weight.grad

    truth = go(whole)
    mine = go(lambda x: checkpoint(whole, x, inner, use_reentrant=outer))
    torch.testing.assert_close(mine[1:], truth[1:])
    for address in ("0", "grad(0)"):
        torch.testing.assert_close(mine[0].calls(address), truth[0].calls(address))


def test_composable_and_sequential_checkpoints():
    from torch.distributed._composable import checkpoint as composable

    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    truth = run(plain, {"*.0": scale(2.0), "1.1": add(1.0)}, inside=False)
    inner = list(plain)
    model = nn.Sequential(*inner)
    for block in inner:
        composable(block)
    same(run(model, {"*.0": scale(2.0), "1.1": add(1.0)}, inside=False), truth)

    class Whole(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
            self.net.load_state_dict(plain.state_dict())
            self.reentrant = reentrant

        def forward(self, x):
            return checkpoint_sequential(self.net, 2, x, use_reentrant=self.reentrant)

    for reentrant in (True, False):
        edits = {"net.*.0": scale(2.0), "net.1.1": add(1.0)}
        same(run(Whole(reentrant), edits, inside=False), truth)


@BOTH
def test_what_a_checkpoint_remembers_goes_with_its_graph(reentrant):
    _, model = pair(reentrant)
    edits = {"layers.1": scale(2.0)}
    with edit(model, edits) as session:
        loss = model(X.clone().requires_grad_()).sum()
    alive = weakref.ref(session._session)
    del session
    loss.backward()
    del loss
    gc.collect()
    assert alive() is None


@BOTH
def test_an_exception_in_the_recomputation_leaves_no_hook(reentrant):
    _, model = pair(reentrant)
    count = []

    def fail_later(value):
        count.append(1)
        if len(count) > 3:
            raise ValueError("boom")

    with edit(model, {"layers.*": fail_later}):
        loss = model(X.clone().requires_grad_()).sum()
    with pytest.raises(ValueError, match=r"boom \(in the change at layers"):
        loss.backward()
    assert torch.isfinite(model(X.clone().requires_grad_())).all()


@BOTH
def test_a_backward_in_another_thread(reentrant):
    plain, wrapped = pair(reentrant)

    def go(model):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"shared": scale(2.0), "layers.1": add(1.0)}):
            loss = model(x).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    same(go(wrapped), go(plain))


def test_no_grad_and_inference_pay_no_attention_to_checkpoints():
    _, model = pair(False)
    plain, _ = pair(False)
    plain.load_state_dict(model.state_dict())
    for mode in (torch.no_grad, torch.inference_mode):
        with edit(model, {"layers.1": scale(2.0)}), edit(plain, {"layers.1": scale(2.0)}), mode():
            assert torch.equal(model(X), plain(X))


# Found by trying to break it


@BOTH
def test_a_changed_parameter_in_a_checkpoint_in_which_no_module_is_called(reentrant):
    fc, x = nn.Linear(4, 2), X.clone().requires_grad_()

    def run():
        return checkpoint(lambda x: F.linear(x, fc.weight).tanh(), x, use_reentrant=reentrant).sum()

    with edit(fc, {"weight": scale(3.0)}):
        run().backward()
    inside, x.grad, fc.weight.grad = (x.grad, fc.weight.grad), None, None
    twin = (fc.weight.detach() * 3).requires_grad_()
    truth = torch.autograd.grad(F.linear(x, twin).tanh().sum(), (x, twin))
    for ours, theirs in zip(inside, truth, strict=True):
        torch.testing.assert_close(ours, theirs)
    with edit(fc, {"weight": scale(3.0)}):
        out = run()
    with pytest.raises(EditError, match="weight: it ran with a changed value under a checkpoint"):
        out.backward()


@BOTH
def test_a_changed_parameter_that_no_module_in_the_checkpoint_holds(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def part(self, x):
            return torch.tanh(self.layer(x) * self.gamma)

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant).sum()

    model, x = Model(), X.clone().requires_grad_()
    with edit(model, {"gamma": scale(3.0)}):
        loss = model(x)
    with pytest.raises(EditError, match="gamma: it ran with a changed value under a checkpoint"):
        loss.backward()


class Wrapped(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kinds", [*itertools.product([None, True, False], repeat=3)])
@pytest.mark.parametrize("inside", [True, False])
def test_three_checkpoints_within_each_other(kinds, inside):
    def go(kinds):
        torch.manual_seed(0)
        layer, rest = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nested = nn.Sequential(Wrapped(Wrapped(layer, kinds[2]), kinds[1]), rest)
        model = Wrapped(nested, kinds[0])
        x = X.clone().requires_grad_()
        with edit(model, {"inner.0.inner.inner": lambda v: v * 2, "inner.1.0:in": scale(3.0)}):
            loss = model(x).pow(2).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    same(go(kinds), go((None,) * 3))


@pytest.mark.parametrize(
    "saved", [getattr(torch.ops.aten, name) for name in ("mul", "clone", "addmm", "_to_copy")], ids=str
)
@pytest.mark.parametrize(
    "change",
    [scale(2.0), lambda v: v * 2, [lambda v: v * 2], scale(torch.arange(4.0))],
    ids=["ready-made", "function", "list", "moved"],
)
@pytest.mark.parametrize(
    "watch",
    [
        lambda model: contextlib.nullcontext(),
        lambda model: capture(model, "layer", "layer:in"),
        lambda model: capture(model, "layer", reduce=lambda v: v.clone().mul(2).to(torch.float32)),
        lambda model: observe(model, {"layer": lambda site, v: v.clone().mul(2).to(torch.float32)}),
    ],
    ids=["nothing", "capture", "reduce", "observe"],
)
def test_selective_checkpoints_count_on_nothing_that_is_ours(saved, change, watch):
    """They remember what some operations gave, in order; measuring and keeping must not be among them."""

    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operation.overloadpacket is saved else CheckpointPolicy.PREFER_RECOMPUTE

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def part(self, x):
            for _ in range(5):
                x = torch.tanh(self.layer(x).clone()) * 1.5 * torch.ones(4).to(x.dtype)
            return x

        def forward(self, x, selective):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.part, x, use_reentrant=False, context_fn=contexts) if selective else self.part(x)

    model = Model().double()
    grads = []
    for selective in (True, False):
        model.zero_grad()
        with edit(model, {"layer": change}), watch(model):
            model(X.double(), selective).pow(2).sum().backward()
        grads.append(model.layer.weight.grad)
    torch.testing.assert_close(*grads)


def test_a_module_that_is_gone_when_the_checkpoint_runs_again():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.z = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)

    model, x = Model(), X.clone().requires_grad_()
    truth = torch.autograd.grad((model.a(x) * 2).tanh().sum(), x)[0]
    with edit(model, {"*": scale(2.0)}):
        out = model(x)
    model.z = nn.Identity()
    out.sum().backward()
    torch.testing.assert_close(x.grad, truth)
    assert not model.a._forward_hooks


@BOTH
@pytest.mark.parametrize("who", ["a session", "a hook"])
def test_what_came_after_an_edit_comes_after_it_in_the_recomputation_too(reentrant, who):
    fc = nn.Linear(4, 4)

    def go(checkpointed):
        x = X.clone().requires_grad_()
        with contextlib.ExitStack() as later:
            first = edit(fc, {".": scale(2.0), ".:in[0]": add(1.0)})
            first.__enter__()
            if who == "a session":
                later.enter_context(edit(fc, {".": add(1.0), ".:in[0]": scale(3.0)}))
            else:
                later.callback(fc.register_forward_hook(lambda module, args, out: out + 1).remove)
                later.callback(fc.register_forward_pre_hook(lambda module, args: (args[0] * 3,)).remove)
            square = lambda x: fc(x).pow(2)  # noqa: E731
            y = checkpoint(square, x, use_reentrant=reentrant) if checkpointed else square(x)
            first.__exit__(None)
            y.sum().backward()
        assert not fc._forward_hooks and not fc._forward_pre_hooks
        return x.grad

    torch.testing.assert_close(go(True), go(False))


@BOTH
@pytest.mark.parametrize(
    "edits",
    [
        [{".": add(0.5), ".:in": add(0.3)}],
        [{".:in": add(0.5), "grad(.)": scale(1.0)}],
        [{".": add(0.5), "grad(.:in)": scale(1.0)}],
        [{".": add(0.5)}, {".:in": add(0.3)}],
        [{".:in": add(0.3)}, {".": add(0.5)}],
        [{".": add(0.5), ".:in": add(0.3)}, {".": scale(2.0), ".:in": scale(3.0)}],
        [{".:in": add(0.3)}, {"./linear": scale(2.0)}],
    ],
)
@pytest.mark.filterwarnings("ignore:grad")
@pytest.mark.parametrize("last_first", [True, False])
def test_hooks_of_the_users_before_and_between_and_after_keep_their_places(reentrant, edits, last_first):
    fc = nn.Linear(4, 4)

    def go(checkpointed):
        x, handles = X.clone().requires_grad_(), []

        def users(number):
            curve = lambda module, args, out: out * number + out.sin()  # noqa: E731
            handles.extend([fc.register_forward_hook(curve), fc.register_forward_hook(curve)])
            handles.append(fc.register_forward_pre_hook(lambda module, args: (args[0] * number + args[0].cos(),)))

        users(1.1)
        sessions = []
        for i, one in enumerate(edits):
            sessions.append(edit(fc, one))
            sessions[-1].__enter__()
            users(1.2 + i)
        square = lambda x: fc(x).pow(2)  # noqa: E731
        y = checkpoint(square, x, use_reentrant=reentrant) if checkpointed else square(x)
        if not checkpointed:
            y.sum().backward()
        for session in reversed(sessions) if last_first else sessions:
            session.__exit__(None)
        if checkpointed:
            keys = list(fc._forward_hooks), list(fc._forward_pre_hooks)
            y.sum().backward()
            assert keys == (list(fc._forward_hooks), list(fc._forward_pre_hooks))
        for handle in handles:
            handle.remove()
        assert not fc._forward_hooks and not fc._forward_pre_hooks
        fc.zero_grad()
        return x.grad

    torch.testing.assert_close(go(True), go(False))


class Takes(nn.Module):
    """A variable takes what a module returns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return torch.tanh(h) * h


@BOTH
@pytest.mark.parametrize("edits", [{"fc": add(1.0), "./h": scale(2.0)}, {"./h": scale(2.0), "fc": add(1.0)}])
def test_a_module_and_the_variable_that_takes_its_output(reentrant, edits):
    model = Takes()

    def go(checkpointed):
        x = X.clone().requires_grad_()
        with edit(model, edits):
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.pow(2).sum().backward()
        return x.grad

    torch.testing.assert_close(go(True), go(False))


def test_a_backward_inside_a_change_runs_a_checkpoint_again_with_its_edits():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Takes()

        def forward(self, x):
            y = checkpoint(self.inner, x, use_reentrant=False)
            loss = y.pow(2).sum()
            return loss

    model, found = Outer(), []

    def look(v):
        found.append(torch.autograd.grad(v, model.inner.fc.weight, retain_graph=True)[0])
        return v

    for site in (".", "./loss"):
        with edit(model, {"inner/h": scale(3.0), site: look}):
            model(X)
    torch.testing.assert_close(*found)


class WritesUnused(nn.Module):
    """Writes into a tensor in place and drops the result, under a checkpoint or not."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.reentrant = reentrant

    def inner(self, x):
        h = self.a(x)
        self.act(h)
        return self.b(h)

    def forward(self, x):
        return (
            self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        ).pow(2)


@BOTH
@pytest.mark.filterwarnings("ignore:.*was never edited")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("address", ["grad(act:in)", "act:in"])
def test_what_a_module_writes_into_its_input_is_carried_over_in_the_recomputation(reentrant, inside, address):
    plain, wrapped = WritesUnused(), WritesUnused(reentrant)
    wrapped.load_state_dict(plain.state_dict())
    same(run(wrapped, {address: scale(1.0)}, inside=inside), run(plain, {}))


def test_a_frozen_capture_of_what_is_written_into_under_a_checkpoint():
    plain, wrapped = WritesUnused(), WritesUnused(False)
    wrapped.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, wrapped):
        model.a.requires_grad_(False)
        with capture(model, "grad(act:in)", frozen=True) as seen:
            model(X).sum().backward()
        grads.append((model.b.weight.grad, seen["grad(act:in)"]))
    model.zero_grad()
    plain.zero_grad()
    plain(X).sum().backward()
    torch.testing.assert_close(grads[1], (plain.b.weight.grad, grads[0][1]))


def test_a_parameter_changed_inside_the_checkpointed_function_is_an_error():
    layer, x = nn.Linear(4, 4), X.clone().requires_grad_()
    before = layer.weight.clone()

    def function(x):
        with edit(layer, {"weight": scale(2.0)}):
            return layer(x)

    with pytest.raises(EditError, match=r"weight: .*; open the block around the checkpoint"):
        checkpoint(function, x, use_reentrant=False)
    assert torch.equal(layer.weight, before)
    with torch.no_grad():
        assert torch.equal(
            checkpoint(function, x, use_reentrant=False), nn.functional.linear(x, 2 * before, layer.bias)
        )
