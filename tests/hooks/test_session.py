"""What a session promises: nothing changed, own calls only, nothing left, whatever happens."""

import asyncio
import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tenterhook import NotSeenError, capture, observe
from tenterhook.hooks import scope
from tests.conftest import ours
from tests.hooks.models import mlp, x


class Block(nn.Module):
    """Residual, dropout, batch norm, in-place ReLU, several users of one tensor: whatever could make a difference."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)

    def mix(self, x):
        return torch.stack([layer(x).tanh() for layer in self.qkv]).sum(0)

    def forward(self, x, *, scale=1.0):
        return {"x": x + self.drop(self.act(self.mix(self.norm(x)))) * scale}


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)["x"]
        return self.head(x)


def train(context):
    """Everything that a training step leaves behind, as bytes that can be compared."""
    torch.manual_seed(1)
    model = Net()
    x = torch.randn(8, 6, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    outputs = []
    with context(model):
        for _ in range(3):
            optimizer.zero_grad()
            out = model(x)
            out.pow(2).mean().backward()
            optimizer.step()
            outputs.append(out.detach().clone())
    grads = [p.grad for p in model.parameters()]
    return [*outputs, x.grad, *grads, *model.state_dict().values(), torch.get_rng_state()]


SESSIONS = {
    "everything": lambda m: capture(m, grad=True),
    "inputs": lambda m: capture(m, "**:in", grad=True),
    "both": lambda m: capture(m, "**", "**:in", "**.weight", "**.running_mean", grad=True),
    "aliases": lambda m: capture(m, "**", "**:in", grad=True, copy=False),
    "graph": lambda m: capture(m, grad=True, detach=False),
    "reduced": lambda m: capture(m, "**:in", "**", grad=True, reduce=lambda t: t.float().norm(), keep="last"),
    "observed": lambda m: observe(m, {"**<Linear>": lambda v, s: v.sum(), "grad(**<Linear>:in)": lambda v, s: v.sum()}),
}


@pytest.mark.parametrize("kind", SESSIONS)
def test_observing_changes_nothing(kind):
    bare = train(lambda model: contextlib.nullcontext())
    watched = train(SESSIONS[kind])
    assert len(bare) == len(watched) > 40
    for ours_, theirs in zip(watched, bare, strict=True):
        assert torch.equal(ours_, theirs)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_exit_removes_exactly_our_hooks(error):
    model = mlp()
    theirs = model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(error), capture(model, "**", "**:in", "**.weight", grad=True):
        model(x.clone().requires_grad_()).sum().backward()
        assert ours(model)
        raise error
    assert not ours(model)
    assert list(model[0]._forward_hooks) == [theirs.id]
    theirs.remove()


def test_a_forward_that_raises_half_way_leaves_nothing_and_keeps_what_came():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("half way")

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    with pytest.raises(RuntimeError, match="half way"), capture(model, "0", "1:in", "1", "grad(1:in)") as seen:
        model(x)
    assert torch.equal(seen["1:in"], seen["0"])
    with pytest.raises(NotSeenError):
        seen["1"]
    assert not ours(model)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failure_while_entering_leaves_nothing(fails_at):
    model = mlp()
    session = capture(model, "0", "1:in", "2")

    class Interrupted(list):
        def __iter__(self):
            yield from self[:fails_at]
            assert ours(model)
            raise KeyboardInterrupt

    session._session.taps = Interrupted(session._session.taps)
    with pytest.raises(KeyboardInterrupt):
        session.__enter__()
    assert not ours(model)


def test_a_wrong_address_among_right_ones_places_no_hook():
    model = mlp()
    with pytest.raises(LookupError):
        capture(model, "0", "1", "nope")
    assert not ours(model)


def test_tensor_hooks_are_removed_too():
    model = mlp()
    with capture(model, "grad(0)", "grad(1:in)"):
        h = model[0](x)
        assert h._backward_hooks
        out = model(x).sum()
    assert not h._backward_hooks
    out.backward()


def test_a_session_is_entered_once():
    session = capture(mlp())
    with session:
        pass
    with pytest.raises(RuntimeError, match="entered once"), session:
        pass


def test_other_peoples_hooks_stay_and_are_seen_through():
    model = mlp()
    handle = model[0].register_forward_hook(lambda m, a, out: out * 2)
    with capture(model, "0") as seen:
        model(x)
    assert torch.equal(seen["0"], 2 * torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    handle.remove()


def test_nested_sessions_each_see_their_own():
    model = mlp()
    with capture(model, "0") as outer:
        model(x)
        with capture(model, "0", "2") as inner:
            model(x)
        model(x)
    assert len(outer.calls("0")) == 3
    assert len(inner.calls("0")) == len(inner.calls("2")) == 1
    assert torch.equal(inner["0"], outer.calls("0")[1])


def test_sessions_left_in_another_order():
    model = mlp()
    first, second = capture(model, "0"), capture(model, "0")
    seen1, seen2 = first.__enter__(), second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert (len(seen1.calls("0")), len(seen2.calls("0"))) == (1, 2)


def test_eight_threads_on_one_model_see_only_their_own_calls():
    model = mlp().eval()
    ready = threading.Barrier(8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def work(i):
        ready.wait()
        for k in range(200):
            mine = torch.full((2, 4), float(i * 1000 + k))
            with capture(model, "0", "0:in", "2", "grad(2:in)", "grad(0)") as seen:
                out = model(mine)
                out.sum().backward()
            assert torch.equal(seen["0:in"], mine)
            assert torch.equal(seen["2"], out)
            assert len(seen.calls("0")) == len(seen.calls("grad(0)")) == len(seen.calls("grad(2:in)")) == 1
        return i

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == list(range(8))
    torch.set_num_threads(before)
    assert not ours(model)


def test_calls_from_another_thread_are_left_alone_and_reported():
    model = mlp()
    with capture(model, "0") as seen:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    with pytest.raises(NotSeenError, match="from another thread or async task"):
        seen["0"]
    assert "calls from other threads or async tasks, or made by a change" in str(seen.report())


def test_async_tasks_see_their_own_calls_also_in_worker_threads():
    model = mlp().eval()

    async def handle(i):
        mine = torch.full((1, 4), float(i))
        with capture(model, "0:in") as seen:
            await asyncio.sleep(0)
            model(mine)
            await asyncio.to_thread(model, mine + 0.5)
        first, second = seen.calls("0:in")
        return torch.equal(first, mine) and torch.equal(second, mine + 0.5)

    async def serve():
        return await asyncio.gather(*(handle(i) for i in range(20)))

    assert all(asyncio.run(serve()))


def test_a_session_may_be_left_in_another_context_than_it_was_entered_in():
    model = mlp()
    session = capture(model, "0")
    session.__enter__()
    contextvars.copy_context().run(session.__exit__, None, None, None)
    assert not ours(model)
    scope._open_scopes.set(())


def test_a_module_that_is_called_inside_itself():
    class Down(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(4, 4)

        def forward(self, x, depth):
            return self.scale(x) if depth == 0 else self(x, depth - 1) * 2

    model = Down()
    with capture(model, ".", ".:in[0]", "grad(.:in[0])", "grad(.)") as seen:
        model(x.clone().requires_grad_(), 2).sum().backward()
    inner, middle, outer = seen.calls(".")
    assert torch.equal(middle, inner * 2) and torch.equal(outer, inner * 4)
    assert [g.unique().item() for g in seen.calls("grad(.)")] == [4.0, 2.0, 1.0]
    for share in seen.calls("grad(.:in[0])"):
        torch.testing.assert_close(share, 4 * torch.ones(3, 4) @ model.scale.weight)


def test_a_forward_replaced_on_the_instance_is_hooked():
    model = mlp()
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) + 1
    with capture(model, "0") as seen:
        model(x)
    assert torch.equal(seen["0"], plain(x) + 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_torchscript_children_say_that_they_cannot_be_seen():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    with capture(model, "0", "1", "1.0", ".") as seen:
        out = model(x)
    assert torch.equal(seen["."], out)
    for address in ("1", "1.0"):
        with pytest.raises(NotSeenError, match="TorchScript"):
            seen[address]


def test_data_parallel_and_fx():
    model = nn.DataParallel(mlp())
    here = x.to(next(model.parameters()).device)
    with capture(model, "0") as seen:
        model(here)
    assert torch.equal(seen["0"], model.module[0](here))
    graph = torch.fx.symbolic_trace(mlp())
    with capture(graph, "0", "grad(2)") as seen:
        graph(x).sum().backward()
    assert len(seen) == 2


def test_modules_in_plain_lists_and_closures():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
            secret = nn.Linear(4, 2)
            self.run = lambda x: secret(x)
            self.secret = lambda: secret

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.run(x)

    model = Hidden()
    secret = model.secret()
    with capture(model, "layers.1", secret, grad=True) as seen:
        out = model(x)
        out.sum().backward()
    assert torch.equal(seen["layers.1"], model.layers[1](model.layers[0](x)))
    assert torch.equal(seen[secret], out)
    assert torch.equal(seen.calls("**<Linear>")[0], seen["layers.1"])
