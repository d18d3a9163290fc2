"""Compiled code among other things: optimizers, modes, hooks, threads, and what is compiled inside a session."""

import copy
import gc
import io
import sys
import threading
import weakref

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tenterhook import capture, edit
from tenterhook.changes import scale
from tenterhook.hooks.tracing import active
from tests.compiled.models import DEVICE, Net, batch, by_hand, close, graphs, net, note_of
from tests.compiled.test_capture import captured, step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def same_as_by_hand(seen, want, *addresses):
    return set(seen) == set(addresses) and all(close(seen[a], want[a]) for a in addresses)


def test_a_compiled_optimizer_step():
    models = [net(), net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    steps = [optimizers[0].step, torch.compile(lambda: optimizers[1].step())]
    runs = [models[0], torch.compile(models[1], fullgraph=True)]
    for i in range(4):
        for model, run, one in zip(models, runs, steps, strict=True):
            model.zero_grad()
            with capture(model, "layer", "grad(layer.weight)", grad=True) as seen:
                step(run, batch(seed=i))
                one()
            assert len(seen) == 3
    assert all(close(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert "had the taps" in note_of(seen)


def test_compiled_autograd():
    model, x = net(), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            seen = captured(model, compiled, x, "layer", "grad(layer)", "grad(body.layer.weight)")
            assert same_as_by_hand(seen, want, "layer", "grad(layer)", "grad(body.layer.weight)"), note_of(seen)


def test_what_is_compiled_inside_a_session():
    model, x = net(), batch()
    want = by_hand(model, x)
    for _ in range(2):
        with capture(model, "layer", grad=True) as seen:
            step(torch.compile(model, fullgraph=True), x)
        assert same_as_by_hand(seen, want, "layer", "grad(layer)") and "had the taps" in note_of(seen)
    assert graphs() == 1
    run = torch.compile(model, fullgraph=True)
    assert close(run(x), want["."]) and graphs() == 2


def test_inference_mode():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    want = by_hand(model, x)
    with torch.inference_mode(), capture(compiled, "layer", "body") as seen:
        compiled(x)
    assert same_as_by_hand(seen, want, "layer", "body")
    with torch.inference_mode(), edit(compiled, {"layer": scale(0.0)}):
        assert not close(compiled(x), want["."])


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_that_leaves_a_model_eager():
    model, x = net(), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model)
    with Nothing(), capture(compiled, "layer", grad=True) as seen:
        step(compiled, x)
    assert same_as_by_hand(seen, want, "layer", "grad(layer)")


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.end = Net(), nn.Linear(4, 4)

    def forward(self, x):
        return self.end(self.apart(x))

    @torch.compiler.disable
    def apart(self, x):
        return self.body(x)


def test_a_part_that_is_not_compiled():
    model, x = Partly().to(DEVICE), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model)
    for _ in range(2):
        seen = captured(model, compiled, x, "body.layer", "grad(body.layer)", "end", "grad(end)")
        assert same_as_by_hand(seen, want, "body.layer", "grad(body.layer)", "end", "grad(end)")


def test_hooks_of_the_users_own_stay_and_come_in_turn():
    model, x = net(), batch()
    model.layer.register_forward_hook(lambda module, args, output: output * 2)
    want = by_hand(model, x)  # whose hooks come last
    compiled = torch.compile(model, fullgraph=True)
    step(compiled, x)
    seen = captured(model, compiled, x, "layer", "grad(layer)")
    assert same_as_by_hand(seen, want, "layer", "grad(layer)") and "had the taps" in note_of(seen)
    assert len(model.layer._forward_hooks) == 1


def test_sessions_in_two_threads_see_their_own_calls():
    model = net()
    compiled = torch.compile(model, fullgraph=True)
    inputs = [batch(seed=i) for i in range(2)]
    want = [by_hand(model, x) for x in inputs]
    seen, both = [None, None], threading.Barrier(2, timeout=60)

    def run(i):
        with capture(compiled, "layer", "body") as seen[i]:
            both.wait()
            for _ in range(10):
                compiled(inputs[i])
            both.wait()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(seen[i].calls("layer")) == 10
        assert all(close(value, want[i][a]) for a in ("layer", "body") for value in seen[i].calls(a))


def test_sessions_that_come_and_go_in_threads_lose_nothing():
    """Entering, calling and leaving at the same time, with threads that are switched as often as can be."""
    model = net()
    compiled = torch.compile(model, backend="eager")
    with capture(compiled, "layer"):
        compiled(batch())
    lost, together = [], threading.Barrier(4, timeout=60)

    def run(i):
        x = batch(seed=i)
        want = by_hand(model, x)["layer"]
        for _ in range(100):
            together.wait()
            try:
                with capture(compiled, "layer") as seen:
                    compiled(x)
                assert close(seen["layer"], want)
            except Exception as error:
                lost.append(repr(error))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert lost == [] and active == {} and not model.layer._forward_hooks


def test_a_copy_or_file_of_a_model_has_none_of_our_hooks():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    with capture(compiled, "layer", grad=True):
        step(compiled, x)
        other = copy.deepcopy(model)
        torch.save(model, file := io.BytesIO())
    assert not other.layer._forward_hooks and close(other(x), model(x))
    file.seek(0)
    assert not torch.load(file, weights_only=False).layer._forward_hooks


def test_a_model_is_let_go():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    with capture(compiled, "layer", grad=True), edit(compiled, {"body": scale(2.0)}):
        step(compiled, x)
    gone = weakref.ref(model.layer)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_an_exception_in_the_model_leaves_nothing():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    with pytest.raises(RuntimeError), capture(compiled, "layer"):
        compiled(x[:, :3])
    seen = captured(model, compiled, x, "layer")
    assert close(seen["layer"], by_hand(model, x)["layer"])
