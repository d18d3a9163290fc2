"""Sessions with eager=True over compiled code: it runs eagerly meanwhile, and as it was compiled before and after."""

import copy
import inspect
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo
from torch import nn

from tenterhook import capture, edit, observe, sites
from tenterhook.changes import scale, zero

# Dynamo looks at the .grad of what flows into a graph. It hides the warning, but only after it was made an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.layer, self.act, self.body = nn.Linear(4, 4), nn.ReLU(inplace=True), body or nn.Tanh()

    def forward(self, x):
        return self.body(self.act(self.layer(x)) + x)


@pytest.fixture(autouse=True)
def backend():
    """A backend that runs a graph as it is, and counts graphs made and graphs run; with a fresh compiler."""

    def backend(graph, example_inputs):
        def run(*args):
            backend.ran += 1
            return graph(*args)

        backend.made += 1
        return run

    backend.made = backend.ran = 0
    torch._dynamo.reset()
    yield backend
    torch._dynamo.reset()


def by_hand(model, x):
    """What a copy of the model computes eagerly at every module, kept by PyTorch's own hooks."""
    twin, want = copy.deepcopy(model), {}

    def keep(name, output):
        want[name] = output.detach().clone()
        output.register_hook(lambda grad: want.update({f"grad({name})": grad.clone()}))

    for name, module in twin.named_modules():
        module.register_forward_hook(lambda _, args, output, name=name or ".": keep(name, output))
    twin(x).square().sum().backward()
    return want | {"grad(body.layer.weight)": twin.body.layer.weight.grad}


def check(model, run, want):
    """A training step of `run` with everything captured gives what was kept by hand."""
    model.zero_grad()
    with capture(model, "**", "grad(body.layer.weight)", grad=True, eager=True) as seen:
        run(X).square().sum().backward()
    assert set(seen) == set(want) and not seen.report().silent
    for address, value in want.items():
        assert torch.equal(seen[address], value), address
    return str(seen.report())


WAYS = {
    "module": lambda m, b: torch.compile(m, backend=b),
    "in place": lambda m, b: m.compile(backend=b) or m,
    "forward method": lambda m, b: setattr(m, "forward", torch.compile(m.forward, backend=b)) or m,
    "function": lambda m, b: torch.compile(lambda x: m(x), backend=b),
    "submodule": lambda m, b: setattr(m, "body", torch.compile(m.body, backend=b)) or m,
    "submodule in place": lambda m, b: m.body.compile(backend=b) or m,
    "second instance": lambda m, b: [compiled("module", Net(Net()), b), torch.compile(m, backend=b)][1],
}


def compiled(way, model, backend):
    """What to call, after its first call."""
    run = WAYS[way](model, backend)
    run(X)
    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_session_sees_what_an_eager_twin_computes_and_leaves_compiled_code_as_it_was(way, backend):
    model = Net(Net())
    want = by_hand(model, X)
    run = compiled(way, model, backend)
    ignored = []
    handle = model.body.layer.register_forward_hook(lambda *_: ignored.append(1))
    before = run(X)
    handle.remove()
    made, ran = backend.made, backend.ran
    assert made == 1 and ran >= 2 and not ignored, "PyTorch heeds a late hook: then this test shows nothing"

    assert "compiled code ran eagerly" in check(run if isinstance(run, nn.Module) else model, run, want)
    assert (backend.made, backend.ran) == (made, ran), "a graph was made or run inside the session"

    torch._dynamo.utils.counters.clear()
    assert torch.equal(run(X), before)
    assert (backend.made, backend.ran) == (made, ran + 1) and not torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize("name", ["aot_eager", "inductor"])
def test_with_the_backends_that_people_use(name):
    model = Net(Net())
    want = by_hand(model, X)
    run = compiled("module", model, name)
    run(X).square().sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    check(run, run, want)
    with observe(
        run, {"body.layer": lambda value, site: want.update({str(site): value.clone()})}, eager=True
    ) as watched:
        run(X)
    assert torch.equal(want["body.layer@0"], want["body.layer"]) and "ran eagerly" in str(watched.report())
    assert torch.equal(capture.once(run, X, "layer", eager=True), want["layer"])
    model.zero_grad()
    with torch.compiler.set_stance("fail_on_recompile"):
        run(X).square().sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("way", ["module", "submodule"])
def test_names_are_those_of_the_plain_model(way, backend):
    model = Net(Net())
    table = str(sites(model))
    run = compiled(way, model, backend)
    assert any("_orig_mod" in name for name, _ in run.named_modules()) and str(sites(run)) == table

    wrapped = {"module": "_orig_mod.body.layer", "submodule": "body._orig_mod.layer"}[way]
    with capture(run, wrapped, f"grad({wrapped}.weight)", "grad(body.layer)", model.body) as seen:
        run(X).sum().backward()
    assert set(seen) == {"body.layer", "grad(body.layer.weight)", "grad(body.layer)", "body"}
    assert seen[wrapped] is seen["body.layer"] is seen[model.body.layer] is seen[f"{wrapped}@-1"]
    assert seen[f"grad({wrapped}.weight)"] is seen["grad(body.layer.weight)"] and "_orig" not in str(seen.report())


def test_a_model_compiled_inside_a_session(backend):
    model = Net(Net())
    want = by_hand(model, X)
    assert "compiled" not in check(model, model, want)
    check(model, lambda x: torch.compile(model, backend=backend, fullgraph=True)(x), want)
    assert torch.equal(torch.compile(model, backend=backend)(X), want["."]) and (backend.made, backend.ran) == (1, 1)


def in_a_new_process(body):
    """Run statements where torch has not imported its compiler."""
    head = "import copy, sys, torch; from torch import nn; from tenterhook import capture, observe, sites"
    parts = [head, *map(inspect.getsource, (Net, by_hand)), textwrap.dedent(body)]
    done = subprocess.run([sys.executable, "-c", "\n".join(parts)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_session_that_is_open_before_the_compiler_is_there():
    in_a_new_process("""
        model, x = Net(Net()), torch.randn(2, 4)
        want = by_hand(model, x)
        with capture(model, "**", "grad(body.layer.weight)", grad=True) as seen:
            assert "torch._dynamo" not in sys.modules
            run = torch.compile(model, backend="eager")
            for _ in range(10):  # more often than Dynamo compiles one function again, which is 8 times
                run(x).square().sum().backward()
        for address, value in want.items():
            calls = seen.calls(address)
            assert len(calls) == 10 and all(torch.equal(call, value) for call in calls), address
        assert torch.equal(run(x), want["."]) and len(seen.calls("layer")) == 10
    """)


def test_a_full_graph_compiled_inside_such_a_session_fails_loudly():
    """Nothing was compiled when it was opened, so the stance could not be set; torch refuses to leave hooks out."""
    in_a_new_process("""
        model, x = Net(Net()), torch.randn(2, 4)
        with capture(model, "layer"):
            try:
                torch.compile(model, backend="eager", fullgraph=True)(x)
            except torch._dynamo.exc.Unsupported:
                pass
            else:
                raise AssertionError("silent")
    """)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")  # it traces us up to the refusal
def test_a_session_inside_compiled_code_is_refused():
    model = Net()

    @torch.compile(backend="eager")
    def step(x):
        with capture(model, "layer"):
            return model(x)

    with pytest.raises(RuntimeError, match="open it around the call"):
        step(X)


def test_where_nothing_is_compiled_the_compiler_is_not_imported():
    in_a_new_process("""
        model, x = Net(Net()), torch.randn(2, 4)
        with capture(model, "**", "layer:in", grad=True) as seen, observe(model, {"layer": lambda value, site: None}):
            model(x).sum().backward()
        assert capture.once(model, x, "layer").shape == (2, 4)
        assert len(seen) == 15 and "compiled" not in str(seen.report()), seen.report()
        assert len(sites(model)) == 7 and "torch._dynamo" not in sys.modules
    """)


@pytest.fixture
def uses_graph(backend):
    """Whether a call of a compiled model (`uses_graph.model`) runs the compiled code."""
    model = Net(Net())
    run = compiled("module", model, backend)

    def uses_graph(x=X):
        before = backend.ran
        run(x)
        assert backend.made == 1, "compiled again"
        return backend.ran > before

    assert uses_graph()
    uses_graph.model = model
    return uses_graph


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("first_out", [0, 1])
def test_sessions_run_eagerly_until_the_last_is_left(first_out, threads, uses_graph):
    with ThreadPoolExecutor(1) as pool:

        def there(function, *args):
            return pool.submit(function, *args).result(20) if threads == 2 else function(*args)

        sessions = [capture(uses_graph.model, "layer", eager=True) for _ in range(2)]
        seen = [sessions[0].__enter__(), there(sessions[1].__enter__)]
        assert not uses_graph() and not there(uses_graph)
        for i in (first_out, 1 - first_out):
            assert not uses_graph() and not there(uses_graph), "a session is still open"
            there(sessions[i].__exit__, None, None, None) if i else sessions[i].__exit__(None, None, None)
        assert uses_graph() and there(uses_graph)
    calls = [len(seen[i].calls("layer")) for i in (first_out, 1 - first_out)]
    assert calls == ([4, 6] if threads == 1 else [2, 3])  # those of its own thread


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
def test_a_stance_of_the_user_comes_back(stance, uses_graph):
    def behaviour():
        try:
            return uses_graph(), uses_graph(torch.randn(2, 3, 4))  # a rank that it was not compiled for
        except RuntimeError as error:
            return str(error)

    with torch.compiler.set_stance(stance):
        before = behaviour()
        with capture(uses_graph.model, "layer", eager=True) as seen:
            assert behaviour() == (False, False)
        assert behaviour() == before and len(seen.calls("layer")) == 2
    assert uses_graph()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, ReferenceError])
def test_an_exception_puts_the_stance_back(error, uses_graph):
    session = capture(model := Net(), "body", "layer", eager=True)
    if error is ReferenceError:
        del model.layer  # so that entering fails half-way
    with pytest.raises(error), session:
        assert error is not ReferenceError and not uses_graph()
        raise error
    assert uses_graph()


def test_edits_of_a_compiled_model_equal_those_of_the_plain_one(backend):
    model = Net()
    compiled = torch.compile(model, backend=backend)
    plain = compiled(X)
    edits = {"layer": scale(2.0), "act:in": lambda v: v + 1, "layer.bias": zero(), "grad(layer)": scale(3.0)}
    with edit(model, edits):
        truth = model(X)
        truth.sum().backward()
        grad = model.layer.weight.grad.clone()
    model.zero_grad()
    ran = backend.ran
    with edit(compiled, edits, eager=True) as session:
        out = compiled(X)
        out.sum().backward()
    assert torch.equal(out, truth) and torch.equal(model.layer.weight.grad, grad)
    assert "ran eagerly" in str(session.report()) and backend.ran == ran
    assert torch.equal(compiled(X), plain) and backend.ran == ran + 1 and backend.made == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_compiled_checkpoint_that_runs_again_after_the_session(backend, reentrant):
    model = Net()
    x = X.clone().requires_grad_()
    function = torch.compile(lambda x: model(x).sin(), backend=backend)
    function(x)
    with edit(model, {"layer": scale(2.0)}):
        (truth,) = torch.autograd.grad(model(x).sin().sum(), x)
        loss = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, truth)


def test_the_inside_of_a_compiled_model(backend):
    class Inner(nn.Module):
        def forward(self, x):
            y = x + 2
            return y.relu()

    model = torch.compile(nn.Sequential(Inner()), backend=backend, fullgraph=True)
    model(X)
    with capture(model, "0/y", "0/relu", eager=True) as seen:
        model(X)
    assert torch.equal(seen["0/y"], X + 2) and torch.equal(seen["0/relu"], (X + 2).relu())
    with edit(model, {"0/y": zero()}, eager=True):
        assert model(X).count_nonzero() == 0
    model(X)
    assert (backend.made, backend.ran) == (1, 2)
