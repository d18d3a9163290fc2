"""sessions: what is attached to a model; and sessions that nobody leaves."""

import gc
import threading
import warnings
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from tenterhook import TenterhookWarning, capture, edit, observe, sessions
from tenterhook.changes import scale
from tests.conftest import ours
from tests.verbs.models import mlp

X = torch.randn(3, 4)


def line():
    import sys

    return sys._getframe(1).f_lineno


def test_each_is_listed_with_the_line_that_entered_it():
    model = mlp()
    assert sessions(model) == [] and "no session is open" in str(sessions(model))
    with capture(model, "0", "grad(2)"), ExitStack() as stack:
        stack.enter_context(edit(model, {"0.weight": scale(2.0)}, strict=False))
        entered = line() - 1
        with observe(model, {"./input": lambda value, site: None}):
            found = sessions(model)
            assert [one.verb for one in found] == ["capture", "edit", "observe"]
            assert [one.addresses for one in found] == [("0", "grad(2)"), ("0.weight",), ("./input",)]
            assert {one.file for one in found} == {__file__}
            assert [one.line for one in found] == [entered - 1, entered, entered + 2]
            assert f"test_sessions.py:{entered}" in str(found) and "MainThread" in found._repr_html_()
            assert sessions(mlp()) == [] and [one.verb for one in sessions(model[0])] == ["capture", "edit"]
            model(X)
    assert sessions(model) == []


def test_those_of_other_threads_and_generators():
    model, go, done = mlp(), threading.Event(), threading.Event()

    def work():
        with capture(model, "0"):
            go.set()
            done.wait()

    def generate():
        with capture(model, "1"):
            yield

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    go.wait()
    running = generate()
    next(running)
    found = sessions(model)
    assert [(one.thread, one.addresses) for one in found] == [("worker", ("0",)), ("MainThread", ("1",))]
    done.set()
    thread.join()
    del running
    assert sessions(model) == []


def forget(model):
    seen = capture(model, "0", "grad(2)", "./input").__enter__()
    model(X)
    return seen["0"]


def test_one_that_is_never_left_is_told_of_and_leaves_no_hook():
    model = mlp()
    with pytest.warns(TenterhookWarning, match=r"capture was entered here and never left.*`with` block") as told:
        kept = forget(model)
        gc.collect()
    assert told[0].filename == __file__ and told[0].lineno == forget.__code__.co_firstlineno + 1
    assert ours(model) == [] and sessions(model) == [] and torch.equal(kept, model[0](X))


def test_parameters_come_back_when_an_edit_that_is_never_left_is_collected():
    model = mlp()
    before = model[0].weight.clone()
    with pytest.warns(TenterhookWarning, match="edit was entered here and never left"):
        edit(model, {"0.weight": scale(2.0)}).__enter__()
        gc.collect()
    assert torch.equal(model[0].weight, before)


def test_one_that_was_left_or_never_entered_is_not_told_of():
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, "0")
        with capture(model, "0"):
            pass
        again = capture(model, "0")
        with again:
            with pytest.raises(RuntimeError, match="entered once"):
                again.__enter__()
            model(X)
            assert len(again._seen.calls("0")) == 1
        with pytest.raises(RuntimeError, match="entered once"), again:
            pass
        gc.collect()
    assert ours(model) == []


def test_it_wants_a_model():
    with pytest.raises(TypeError, match="sessions needs a model"):
        sessions(nn.Linear)
