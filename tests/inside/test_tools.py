# ruff: noqa: F841
"""Debuggers, profilers, and what makes graphs or bytes of a model, while functions run copies of their code.

Tracers, tracebacks, source and pickles of models are in test_safety.py, compiled modules in ../compiled.
"""

import contextlib
import copy
import cProfile
import dis
import inspect
import io
import json
import marshal
import pdb
import pickle
import pstats
import re
import subprocess
import sys
import textwrap
import types
import warnings
from collections import Counter

import cloudpickle
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from tenterhook import capture, edit, observe
from tenterhook.changes import scale, zero
from tests.inside.models import X

SELECTORS = ["./y", "./**"]


def helper(t, fail=False):
    q = t * 5
    if fail:
        raise ValueError("on purpose")
    return q + 1


class Block(nn.Module):
    def __init__(self, debugger=None):
        super().__init__()
        self.fc, self.debugger = nn.Linear(4, 4), debugger

    def forward(self, x, fail=False):
        h = self.fc(x)
        if self.debugger is not None:
            self.debugger.set_trace()
        y = helper(h, fail) + h
        for k in range(2):
            y = y + k
        parts = [p * 2 for p in y]
        z = parts[0].sum()
        return y * z


def plain(model):
    return contextlib.nullcontext()


def watched(selector):
    return lambda model: capture(model, selector)


_LINES = enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), 1)
LINE = {text.strip(): number for number, text in reversed(list(_LINES))}  # where a line is first


# Debuggers.


def debugger(*commands, **options):
    """pdb with a script."""
    told = io.StringIO()
    found = pdb.Pdb(stdin=io.StringIO("\n".join(commands) + "\n"), stdout=told, nosigint=True, readrc=False, **options)
    found.use_rawinput, found.told = 0, told
    return found


def debugged(way, *commands, **options):
    """What pdb says to some commands while the model runs, and what the model gives."""
    torch.manual_seed(0)
    model, found = Block(), debugger(*commands, **options)
    before = sys.gettrace()
    try:
        with way(model):
            out = found.runcall(lambda: model(X))
    finally:
        found.clear_all_breaks()
        sys.settrace(before)
    return re.sub(r"[Bb]reakpoint \d+", "Breakpoint", found.told.getvalue()), out


AT = f"{__file__}:{LINE['y = helper(h, fail) + h']}"
SCRIPTS = {
    "where": [f"b {AT}", "c", "where", "p h.tolist()", "p x is self", "args", "list", "longlist", "c"],
    "next": [f"b {AT}", "c", *["n", "p y.tolist()"] * 8, "c"],
    "up and down": [
        f"b {__file__}:{LINE['q = t * 5']}",
        "c",
        "p t.tolist()",
        "u",
        "p h.tolist()",
        "u",
        "d",
        "d",
        "n",
        "p q.tolist()",
        "r",
        "p __return__.tolist()",
        "c",
    ],
    "change": [
        f"b {AT}",
        "c",
        "!h = torch.zeros(3, 4)",
        "n",
        "p y.tolist()",
        "!y = y - 100",
        "n",
        "n",
        "p y.tolist()",
        "u",
        "d",
        "c",
    ],
    "conditions": [f"b {__file__}:{LINE['y = y + k']}, k == 1", "c", "p k", "until", "p k", "c"],
    "functions": [
        f"tbreak {__file__}:{LINE['z = parts[0].sum()']}",
        "b helper",
        "c",
        "where",
        "c",
        "p x.tolist()",
        "c",
    ],
    "jump": [
        f"b {AT}",
        "c",
        f"jump {LINE['parts = [p * 2 for p in y]']}",
        "!y = x",
        "n",
        "p x.tolist()",
        f"jump {LINE['h = self.fc(x)']}",
        *(["n"] * 9),
        "p y.tolist()",
        "c",
    ],
}


@pytest.mark.filterwarnings("ignore:assigning None to:RuntimeWarning")  # by `jump`, of what has no value yet
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_pdb_shows_and_changes_the_same(script, selector):
    told, truth = debugged(plain, *SCRIPTS[script])
    assert (
        told.count("(Pdb)") > len(SCRIPTS[script]) - 2 and "***" not in told and ("where" not in script or AT in told)
    )
    shown, out = debugged(watched(selector), *SCRIPTS[script])
    assert shown == told
    assert torch.equal(out, truth)


def test_pdb_sees_the_edited_value():
    with_edit = debugged(lambda model: edit(model, {"./y#0": zero()}), f"b {AT}", "c", "n", "p y.tolist()", "c")[0]
    assert f"{torch.zeros(3, 4).tolist()}" in with_edit


# Profilers.


def test_profilers_count_the_same_calls():
    def profiled(way):
        torch.manual_seed(0)
        model, found = Block(), cProfile.Profile()
        before = sys.getprofile()
        events = []
        with way(model):
            found.runcall(lambda: [model(X) for _ in range(3)])
            sys.setprofile(lambda frame, event, _: events.append((frame.f_code.co_name, event, frame.f_lineno, frame)))
            try:
                model(X)
            finally:
                sys.setprofile(before)
        mine = [event[:3] for event in events if event[3].f_code.co_filename == __file__ and event[1][:2] != "c_"]
        counts = {where[1:]: one[:2] for where, one in pstats.Stats(found).stats.items() if where[0] == __file__}
        return counts, mine

    truth = profiled(plain)
    assert truth[0][(inspect.getsourcelines(helper)[1], "helper")] == (3, 3) and ("helper", "call") in [
        event[:2] for event in truth[1]
    ]
    for selector in SELECTORS:
        assert profiled(watched(selector)) == truth


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # older versions of torch
def test_the_profiler_of_torch_sees_the_same_operations_and_functions(tmp_path):
    def profiled(way):
        torch.manual_seed(0)
        model, file = Block(), str(tmp_path / "trace.json")
        with way(model):
            with profile(activities=[ProfilerActivity.CPU], with_stack=True) as found:
                model(X)
        found.export_chrome_trace(file)
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "python_function"]
        operations = Counter(event.name for event in found.events() if event.name.startswith("aten::"))
        return operations, Counter(name for name in names if re.search(r"test_tools.py.*: (forward|helper)$", name))

    operations, functions = profiled(plain)
    assert operations["aten::mul"] > 3 and any("helper" in name for name in functions)
    ours = {"aten::detach", "aten::clone", "aten::empty_strided", "aten::copy_", "aten::empty_like"}  # of what is kept
    for selector in SELECTORS:
        seen, named = profiled(watched(selector))
        assert named == functions and not (seen - operations).keys() - ours and not operations - seen
        seen, named = profiled(lambda model, selector=selector: observe(model, {selector: lambda value, site: None}))
        assert named == functions and not (seen - operations).keys() - {"aten::detach"} and not operations - seen


# What reads code, and what copies functions.


def test_code_is_read_as_ever():
    def lines(code):
        return {line for _, _, line in code.co_lines()}

    before, positions = Block.forward.__code__, [position for position in Block.forward.__code__.co_positions()]
    names = [one.opname for one in dis.get_instructions(Block.forward)]
    for selector in SELECTORS:
        with capture(Block(), selector):
            code = Block.forward.__code__
            assert code is not before and (lines(code) - {None}) == (lines(before) - {None})
            assert set(code.co_positions()) - {(None,) * 4} == set(positions) - {(None,) * 4}
            dis.dis(Block.forward, file=io.StringIO())
            assert inspect.getcallargs(Block().forward, 1).keys() == {"self", "x", "fail"}
            assert inspect.getclosurevars(Block.forward).globals["helper"] is helper
            assert inspect.getsource(code) == inspect.getsource(before)
    assert [one.opname for one in dis.get_instructions(Block.forward)] == names


def warns(t):
    q = t + 1
    warnings.warn("a warning", UserWarning, stacklevel=2)
    return q


def test_warnings_name_the_line_of_the_caller():
    class Warning_(nn.Module):
        def forward(self, x):
            y = warns(x)
            return y

    def told(way):
        with way(model), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(X)
        return [(one.filename, one.lineno) for one in found]

    model = Warning_()
    assert told(plain) == [(__file__, LINE["y = warns(x)"])] == told(watched("./y")) == told(watched("./**"))


def enclosing(k):
    def inner(t):
        v = t * k
        return v + 1

    return inner


def test_functions_that_are_copied_inside_a_session_run_on_after_it():
    inner, model = enclosing(3), Block()
    with capture(inner, "v") as seen, capture(model, "./helper/q"):
        model(X)
        same = [copy.copy(helper), copy.deepcopy(helper), pickle.loads(pickle.dumps(helper))]
        bound = copy.deepcopy(model.forward), pickle.loads(pickle.dumps(model.forward))
        code = marshal.loads(marshal.dumps(helper.__code__))
        twins = [
            types.FunctionType(helper.__code__, globals(), argdefs=(False,)),
            types.FunctionType(code, globals(), argdefs=(False,)),
            cloudpickle.loads(cloudpickle.dumps(inner)),
            types.FunctionType(inner.__code__, globals(), closure=inner.__closure__),
        ]
        assert torch.equal(twins[3](X), X * 3 + 1)
    assert all(one is helper for one in same)
    assert all(torch.equal(one(X), model(X)) for one in bound)
    truth = [helper(X), helper(X), inner(X), inner(X)]
    for _ in range(2):
        assert all(torch.equal(twin(X), value) for twin, value in zip(twins, truth, strict=True))
        with capture(inner, "nothing", "v"):
            pass


def test_a_function_pickled_by_value_runs_in_another_process_that_has_sessions_of_its_own(tmp_path):
    """Its copy must not take the numbers of the other process for its own."""
    inner = enclosing(3)
    with capture(inner, "v"):
        (tmp_path / "inner").write_bytes(cloudpickle.dumps(inner))
    script = """
        import pickle, sys, torch
        from tenterhook import capture

        def other(a):
            b = a * 2
            c = torch.relu(b)
            c[0] = 1
            return c + a

        inner = pickle.load(open(sys.argv[1], "rb"))
        with capture(other, "*") as seen:
            for _ in range(100):
                assert inner(torch.ones(2)).tolist() == [4, 4]
            other(torch.ones(2))
        assert list(seen) == ["b", "c#0", "c#1", "add"] and seen["b"].tolist() == [2, 2]
        assert inner(torch.ones(2)).tolist() == [4, 4]
    """
    run = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "inner")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# What makes a graph of a model. A graph made inside a session has what the session does in it, as with module hooks.


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *rest):
        y = self.fc(x)
        y = helper(y) + y
        z = y.relu()
        return z * 2


@pytest.fixture
def straight():
    yield Straight().eval()
    torch._dynamo.reset()


def twice_y(model):
    return edit(model, {"./y#0": scale(2.0)})


def edited(model):
    """What the model gives with that edit."""
    with twice_y(model):
        return model(X)


MAKERS = {"make_fx": lambda model: make_fx(model)(X)}


def kinds(graph):
    """The operations of a graph that do something, in order."""
    graph.graph.eliminate_dead_code()
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("way", MAKERS)
def test_graphs_that_are_made_inside_a_session(way, straight):
    make, truth = MAKERS[way], straight(X)
    expected = kinds(make(straight))
    for selector in SELECTORS:
        with capture(straight, selector) as seen:
            graph = make(straight)
        assert kinds(graph) == expected and torch.equal(graph(X), truth)
        assert "./y#0" in seen or "./y#0" in str(seen.report())
    with twice_y(straight) as edits:
        graph = make(straight)
    assert torch.equal(graph(X), edited(straight)) and not torch.equal(graph(X), truth)
    assert "./y#0" in str(edits.report())
    assert kinds(make(straight)) == expected


def test_symbolic_traces_and_scripts_have_the_functions_own_code(straight):
    class Scripted(nn.Module):
        def forward(self, x):
            y = x + 2
            return y * 3

    other = Scripted()
    truth = torch.fx.symbolic_trace(straight).code, torch.jit.script(other).code
    for selector in SELECTORS:
        with capture(straight, selector), capture(other, selector):
            assert (torch.fx.symbolic_trace(straight).code, torch.jit.script(other).code) == truth
            tracer = torch.fx.Tracer()
            assert len(tracer.trace(straight, concrete_args={"x": torch.fx.PH}).nodes) > 5


def test_a_graph_that_may_not_break_is_refused_with_a_word_of_us(straight):
    with capture(straight, "./y"), pytest.raises(torch._dynamo.exc.Unsupported, match="a tenterhook session looks"):
        torch.export.export(straight, (X,), strict=True)
    assert torch.equal(torch.export.export(straight, (X,), strict=True).module()(X), straight(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_before_and_inside(backend, straight):
    def step(run):
        x = X.clone().requires_grad_()
        out = run(x)
        out.sum().backward()
        return out.detach(), x.grad

    before, inside = (torch.compile(straight, backend=backend, fullgraph=True) for _ in range(2))
    truth = step(before)
    with capture(straight, "./y#1", "grad(./y#0)", "./helper/q") as expected:
        step(straight)
    for _ in range(2):
        with capture(straight, "./y#1", "grad(./y#0)", "./helper/q") as seen:
            step(before)
            step(inside)
        assert sorted(seen) == sorted(
            f"{name[:-1]}@{k})" if ")" in name else f"{name}@{k}" for name in expected for k in (0, 1)
        )
        for name, value in expected.items():
            assert all(torch.equal(one, value) for one in seen.calls(name))
        with twice_y(straight):
            assert torch.equal(step(before)[0], step(straight)[0])
        with torch.compiler.set_stance("fail_on_recompile"):
            assert all(map(torch.equal, step(before), truth))


IN_A_NEW_PROCESS = """
    import sys, torch
    from torch import nn
    from tenterhook import capture, edit
    from tenterhook.changes import scale

    X = torch.linspace(-1, 1, 12).reshape(3, 4)

    def helper(t, fail=False):
        q = t * 5
        return q + 1

    class Block(nn.Module):
        def forward(self, x):
            h = x.sin()
            y = helper(h) + h
            for k in range(2):
                y = y + k
            if y.sum() > 0:
                y = y * 2
            return y.cos()

    model = Block()
    def watch():
        return {way}
    def run(function):
        with watch() as seen:
            compiled = function()
            outs = [compiled(X * (i + 1)) for i in range(4)]
        assert len(set(map(id, outs))) == 4
        return outs, [(name, value) for name in seen for value in seen.calls(name)] if {looks} else []

    assert "torch._dynamo" not in sys.modules
    got = run(lambda: torch.compile(model, backend="aot_eager"))
    assert "torch._dynamo" in sys.modules
    torch._dynamo.reset()
    expected = run(lambda: model)
    assert [name for name, _ in got[1]] == [name for name, _ in expected[1]], [name for name, _ in got[1]]
    assert all(torch.allclose(a, b) for a, b in zip(got[0], expected[0], strict=True))
    assert all(torch.allclose(a, b) for (_, a), (_, b) in zip(got[1], expected[1], strict=True))
    plain = torch.compile(model, backend="aot_eager")
    assert torch.allclose(plain(X), model(X))
"""


@pytest.mark.parametrize(
    ("way", "looks"),
    [
        ('capture(model, "./y")', True),
    ],
)
def test_the_compiler_is_first_loaded_inside_a_session(way, looks):
    """No stance could be set when it began: Dynamo breaks its graphs where copies call us."""
    script = textwrap.dedent(IN_A_NEW_PROCESS).replace("{way}", way).replace("{looks}", str(looks))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
@pytest.mark.parametrize("selector", SELECTORS)
def test_monitoring_sees_the_same_lines(selector):
    def monitored(way):
        torch.manual_seed(0)
        model, found, tool, events = Block(), [], sys.monitoring.COVERAGE_ID, sys.monitoring.events

        def note(code, what, *_):
            if code.co_filename == __file__ and code.co_name in ("forward", "helper"):
                found.append((code.co_name, what))

        sys.monitoring.use_tool_id(tool, "lines")
        try:
            sys.monitoring.register_callback(tool, events.LINE, note)
            sys.monitoring.set_events(tool, events.LINE)
            with way(model):
                model(X)
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)
        return found

    truth = monitored(plain)
    assert ("helper", LINE["q = t * 5"]) in truth
    assert monitored(watched(selector)) == truth
