"""A model that is saved, pickled or copied inside a session has no trace of us."""

import copy
import copyreg
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tenterhook import capture, edit, observe, watch
from tenterhook.changes import scale
from tests.conftest import ours
from tests.hooks.models import mlp, x


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def sessions(model, folder):
    """What may be open while a model is saved, each with hooks of every kind."""
    yield capture(model, "0", "1:in", "grad(1:in)", grad=True)
    yield edit(model, {"0": scale(2.0), "1:in": lambda v: v, "grad(1:in)": scale(2.0)})
    yield observe(model, {"**": lambda value, site: None})
    yield watch(model, to=folder / "run", every=1)


@pytest.mark.parametrize("which", range(4))
def test_a_model_is_saved_pickled_and_copied_without_a_trace_of_us(tmp_path, which):
    model = mlp()
    ways = (saved, pickle.dumps, pickle._dumps)  # the last is the one written in Python
    bare, tables = [way(model) for way in ways], dict(copyreg.dispatch_table)
    with list(sessions(model, tmp_path))[which]:
        model(x).sum().backward()
        model.zero_grad()
        assert any(ours(model))
        assert [way(model) for way in ways] == bare
        twin = copy.deepcopy(model)
        for module in twin.modules():
            tables_of = (module._forward_hooks, module._forward_pre_hooks)
            assert not any((*tables_of, module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs))
        torch.jit.script(pickle.loads(pickle.dumps(model)))
    assert copyreg.dispatch_table == tables


def test_a_model_saved_inside_a_session_loads_with_weights_only(tmp_path):
    model = mlp()
    with capture(model, "0", "1:in", grad=True):
        torch.save(model, tmp_path / "model.pt")
    known = [nn.Sequential, nn.Linear, nn.ReLU]
    with torch.serialization.safe_globals(known):
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)(x), model(x))


def count(module, args, output):
    module.counted = True


def test_hooks_of_the_user_are_saved_as_ever():
    model = mlp()
    model[0].register_forward_hook(count)
    model[1].register_forward_pre_hook(lambda module, args: None).remove()
    bare = pickle.dumps(model)
    with capture(model, "0", "1:in"):
        assert pickle.dumps(model) == bare
    again = pickle.loads(bare)
    again(x)
    assert again[0].counted


def test_other_dicts_are_pickled_as_ever():
    class Kind(OrderedDict):
        pass

    model, plain, marked = mlp(), OrderedDict({-1: True, "a": model_free}), OrderedDict(b=1)
    marked.version = 3  # as a state dict has its metadata
    bare = [pickle.dumps(one) for one in (plain, marked, model.state_dict())]
    with capture(model, "0", "1:in"):
        assert [pickle.dumps(one) for one in (plain, marked, model.state_dict())] == bare
        assert copy.deepcopy(marked).version == 3 and type(copy.deepcopy(Kind(a=1))) is Kind


def model_free():
    """Something that can be pickled."""


def test_somebody_elses_reducer_stays_in_force():
    calls = []

    def reducer(table):
        calls.append(len(table))
        return table.__reduce__()

    copyreg.dispatch_table[OrderedDict] = reducer
    try:
        with capture(mlp(), "0"):
            pickle.dumps(OrderedDict(a=1, b=2))
        assert calls == [2] and copyreg.dispatch_table[OrderedDict] is reducer
    finally:
        del copyreg.dispatch_table[OrderedDict]


def test_sessions_that_overlap_hide_until_the_last_ends():
    model = mlp()
    bare, first, second = pickle.dumps(model), capture(model, "0"), capture(model, "1")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert pickle.dumps(model) == bare
    second.__exit__(None, None, None)
    assert OrderedDict not in copyreg.dispatch_table
