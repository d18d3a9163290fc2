"""Edits under activation checkpointing: the recomputation makes them again, even after the session is over."""

import contextlib
import functools
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tenterhook import EditError, capture, edit, observe
from tenterhook.changes import add, scale, zero
from tests.verbs.checkpointed import BOTH, EDITS, Takes, X, pair, run, same


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
def test_nested_sessions_that_are_over_act_in_their_order(reentrant):
    plain, wrapped = pair(reentrant)

    def both(model):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with edit(model, {"shared": scale(2.0)}):
            with edit(model, {"shared": add(1.0), "layers.0": scale(0.5)}):
                loss = model(x).sum()
        with pytest.raises(EditError), edit(model, {"shared": zero()}):  # not there when the forward ran
            loss.backward()
        return loss.detach(), x.grad, [p.grad for p in model.parameters()]

    same(both(wrapped), both(plain))


@BOTH
def test_a_gradient_that_a_checkpoint_will_have_after_the_block_is_lost_and_told_of(reentrant):
    fc, x = nn.Linear(4, 4), X.clone().requires_grad_()
    with pytest.raises(EditError, match=r"grad\(\.\) was never edited"), edit(fc, {"grad(.)": scale(3.0)}):
        y = checkpoint(fc, x, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(x.grad, fc.weight.sum(0).expand(3, 4))


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
        lambda model: observe(model, {"layer": lambda v, site: v.clone().mul(2).to(torch.float32)}),
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
            sessions.append(edit(fc, one, strict=False))
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
