"""What runs a copy of its code is told from what does not, and everything is put back."""

import contextlib
import copy
import gc
import inspect
import io
import itertools
import linecache
import pickle
import random
import sys
import threading
import traceback
import weakref

import cloudpickle
import pytest
import torch
from torch import nn

from tenterhook import capture, edit, observe, sites
from tenterhook.changes import add, scale, zero
from tenterhook.errors import AddressError
from tenterhook.inside import copies, dispatch, engine
from tenterhook.inside.instrument import Want
from tenterhook.platform import assembler
from tests.inside.models import Residual, X, module_of, names


def helper(t, fail=False):
    q = t * 5
    if fail:
        raise ValueError(
            "x" + str(int(q.numel())))  # fmt: skip
    return q + 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, fail=False):
        """A docstring."""
        h = self.fc(x)
        try:
            y = helper(h, fail) + torch.relu(h)
        except KeyError:
            y = h
        for k in range(3):
            y = y + k
            if k == 1:
                continue
        with torch.no_grad():
            z, w = y.chunk(2, -1)
        parts = [p * 2 for p in (z, w)]
        self.kept = parts[0].detach()
        return y * 2


class Generating(nn.Module):
    def forward(self, x):
        y = x + 1
        yield y
        y = y + 1
        yield y


def test_functions_have_their_own_code_before_and_after_and_copies_are_made_once():
    model, plain = Block(), Block.forward.__code__
    with capture(model, "fc", "grad(fc)"), observe(model, {"fc": lambda v, site: v.norm()}):
        model(X)
        assert Block.forward.__code__ is plain
    with capture(model, "./y"):
        first = Block.forward.__code__
        with capture(model, "./z"):
            both = Block.forward.__code__
        assert Block.forward.__code__ is first is not both
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert torch._C._len_torch_function_stack() == 0
    assert Block.forward.__code__ is plain
    with capture(model, "./y"):
        assert Block.forward.__code__ is first


def test_sessions_end_in_any_order():
    model = Residual()
    first, second = capture(model, "./y"), edit(model, {"./y": zero()})
    a = first.__enter__()
    second.__enter__()
    model(X)
    first.__exit__(None, None, None)
    model(X)
    second.__exit__(None)
    assert len(a.calls("./y")) == 1 and torch.equal(a["./y"], X + 2)  # the outer session sees it as the model made it


def test_the_copies_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(copies, "MOST", 3)
    refs = []
    for k in range(10):
        known = {}
        exec(f"def forward(self, x):\n    y = x + {k}\n    return y", known)
        with capture(module_of(known["forward"]), "./y") as seen:
            seen._session.model()(X)
            refs.append(weakref.ref(known["forward"].__code__))
        known.clear()
    del seen
    gc.collect()
    assert len(copies._kept) <= 3
    assert sum(ref() is not None for ref in refs) <= 3


def test_tracebacks_are_the_same_to_the_caret():
    def told(run):
        with pytest.raises(ValueError) as error:
            run()
        lines = "".join(traceback.format_exception(error.value)).splitlines()
        return lines[next(i for i, line in enumerate(lines) if "in forward" in line) :]

    model = Block()
    plain = told(lambda: model(X, fail=True))
    for selector in ("./**", "./helper/q", "./y"):
        with capture(model, selector):
            assert told(lambda: model(X, fail=True)) == plain


def test_tracers_see_the_same_lines():
    def traced(run):
        found = []

        def tracer(frame, event, argument):
            if frame.f_code.co_filename != __file__ or frame.f_code.co_name == "<lambda>":
                return None
            found.append((frame.f_code.co_name, event, frame.f_lineno))
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            run()
        finally:
            sys.settrace(before)
        return found

    model = Block()
    plain = traced(lambda: model(X))
    for selector in ("./**", "./y"):
        with capture(model, selector):
            assert traced(lambda: model(X)) == plain


def test_source_signature_and_docstring_are_the_functions_own():
    plain = inspect.getsource(Block.forward), inspect.signature(Block.forward)
    with capture(Block(), "./**"):
        assert (inspect.getsource(Block.forward), inspect.signature(Block.forward)) == plain
        assert Block.forward.__doc__ == "A docstring."


def test_copies_and_pickles_of_a_model_inside_a_session():
    model = Block()
    truth = model(X)
    with capture(model, "./**") as seen:
        file = io.BytesIO()
        torch.save(model, file)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            twins.append(cloudpickle.loads(cloudpickle.dumps(model)))
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        assert len(list(seen)) == 0
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    for twin in twins:
        assert "forward" not in vars(twin) and torch.equal(twin(X), truth)
        assert "./y#0" in names(twin, X)


def test_scripting_tracing_and_exporting_inside_a_session():
    class Plain(nn.Module):
        def forward(self, x):
            y = x + 2
            return y * 3

    model = Plain()
    with capture(model, "./y"):
        scripted = torch.jit.script(model)
        graph = torch.fx.symbolic_trace(model)
        traced = torch.jit.trace(model, X)
    for other in (scripted, graph, traced):
        assert torch.equal(other(X), model(X))


def test_generators_that_began_before_and_that_outlive_the_session():
    model = Generating()
    early = model(torch.ones(1))
    next(early)
    with capture(model, "./y") as seen:
        late = model(torch.ones(1))
        assert next(early) == 3 and next(late) == 2
    assert next(late) == 3
    assert seen.calls("./y") == [2]


def test_another_model_of_the_class_and_other_threads_run_as_ever():
    model, other = Block(), Block()
    truth = other(X)
    stop, wrong, count = threading.Event(), [], []

    def work():
        while not stop.is_set():
            count.append(1)
            if not torch.equal(other(X), truth):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for k in range(60):
            selector = random.Random(k).choice(["./y", "./**", "./helper/q"])
            with edit(model, {"./y#0": scale(100.0)}), capture(model, selector) as seen:
                model(X)
                assert torch.equal(other(X), truth)
            assert len(list(seen)) > 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert count and not wrong


def test_recursion_and_a_function_that_is_running_when_the_session_begins():
    class Recursive(nn.Module):
        def forward(self, x, depth=2):
            y = x * 2
            return y if depth == 0 else self(y, depth - 1)

    model = Recursive()
    with capture(model, "./y") as seen, edit(model, {"./y@1": add(100.0)}):
        assert model(torch.ones(1)) == 208
    assert seen.calls("./y") == [2, 4, 208]
    told = []

    class Opens(nn.Module):
        def forward(self, x, opens=True):
            with capture(self, "./y") as seen:
                y = x * 2
                y = self(y, False) if opens else y
            told.append(list(seen))
            return y

    Opens()(torch.ones(1))
    assert told == [[], ["./y#0", "./y#1"]]


def test_a_function_with_builtins_of_its_own_is_left_alone():
    known = {"__builtins__": {"range": range}}
    exec("def forward(self, x):\n    y = x + 1\n    return y", known)
    model = module_of(known["forward"])
    plain = known["forward"].__code__
    with capture(model, "./y") as seen:
        model(X)
        assert known["forward"].__code__ is plain
    assert "./y" not in seen


def test_somebody_who_exchanges_the_code_meanwhile_keeps_theirs():
    def forward(self, x):
        y = x + 1
        return y

    model, other = module_of(forward), (lambda self, x: x * 3)
    with capture(model, "./y"):
        forward.__code__ = other.__code__
    assert forward.__code__ is other.__code__


def test_dynamo_does_not_trace_the_dispatcher():
    assert dispatch.tell._torchdynamo_disable
    assert Want() | Want(frozenset("a")) == Want(frozenset("a")) and not Want()


@pytest.fixture
def fresh_compiler():
    yield
    torch._dynamo.reset()  # else reports say that something was compiled


def test_compiled_code_runs_eagerly_inside_and_compiled_after(fresh_compiler):
    class Plain(nn.Module):
        def forward(self, x):
            y = x + 2
            return y.sin()

    model = Plain()
    compiled = torch.compile(model, backend="eager")
    truth = compiled(X)
    with capture(model, "./y") as seen:
        assert torch.equal(compiled(X), truth)
    assert torch.equal(seen["./y"], X + 2)
    assert torch.equal(compiled(X), truth)
    with edit(model, {"./y": zero()}):
        assert not compiled(X).any()
    assert torch.equal(compiled(X), truth)
    assert len(sites(model, X)) > 1


def multiplied_by(k):
    def f(x):
        y = x * k
        return y

    return f


def test_functions_that_share_their_code_are_told_apart():
    one, other = multiplied_by(2), multiplied_by(10)
    with edit(one, {"y": zero()}) as edits, capture(other, "y") as seen:
        assert torch.equal(other(X), X * 10) and not one(X).any()
    assert len(seen.calls("y")) == 1 and torch.equal(seen["y"], X * 10)
    assert edits.report().rows[0][1] == "1×"


def test_functions_with_equal_code_are_told_apart():
    text, files = "def f(x):\n    y = x * 2\n    return y", ({}, {})
    for known in files:
        exec(compile(text, "same.py", "exec"), known)
    one, other = (known["f"] for known in files)
    with capture(one, "y") as a, capture(other, "y") as b:
        one(X)
        other(X + 100)
    assert torch.equal(a["y"], X * 2) and torch.equal(b["y"], (X + 100) * 2)


def test_a_function_that_is_made_inside_keeps_its_own_code():
    class Maker(nn.Module):
        def forward(self, x):
            def act(v):
                w = v * 2
                return w.tanh()

            self.act = act
            return x

    model = Maker()
    with capture(model, "**/**"):
        model(X)
    assert ".here" not in model.act.__code__.co_varnames
    with capture(multiplied_by, "**/*"):
        made = multiplied_by(2)
    assert made.__code__ is multiplied_by(2).__code__


def test_ctrl_c_while_a_session_ends_leaves_no_copy():
    def forward(self, x):
        y = x + 1
        return y

    model = module_of(forward)
    own, hooks = forward.__code__, {name: len(table) for name, table in vars(model).items() if name.endswith("_hooks")}
    before = sys.gettrace()
    for at in range(1, 150):  # lines that run when the block ends
        events = itertools.count(1)

        def interrupt(frame, event, arg, at=at, events=events):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            can_come = "with " not in line and "exit" not in frame.f_code.co_name  # else no lock would be safe
            if event == "line" and can_come and next(events) == at:
                raise KeyboardInterrupt
            return interrupt

        with contextlib.suppress(KeyboardInterrupt):
            session = capture(model, "./y", "./x", "grad(./y)")
            session.__enter__()
            assert forward.__code__ is not own
            sys.settrace(interrupt)
            session.__exit__(None, None, None)
        sys.settrace(before)
        assert forward.__code__ is own
        assert {name: len(table) for name, table in vars(model).items() if name.endswith("_hooks")} == hooks
        assert not engine.anywhere
    assert next(events) < at  # else there are more lines than were tried


def test_a_python_that_was_not_checked_is_refused_for_inner_addresses_alone(monkeypatch):
    monkeypatch.setattr(assembler.sys, "version_info", (3, 99, 0))
    model = nn.Sequential(Block())
    for ask in (
        lambda: capture(model, "0/y"),
        lambda: capture(model, "0", "**/**"),
        lambda: edit(model, {"0/y": zero}),
    ):
        with pytest.raises(AddressError, match=r"CPython 3\.11 to 3\.14, and this is cpython 3\.99"), ask():
            pass
    with pytest.raises(AddressError, match=r"3\.99"):
        sites(model, X)
    assert len(sites(model)) > 1
    with capture(model, "0.fc", "grad(0.fc)") as seen, edit(model, {"0.fc": scale(2.0)}):
        model(X).sum().backward()
    assert len(seen) == 2 and not copies.running()
