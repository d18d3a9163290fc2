"""watch as a `with` block in code: what it records, and that it leaves nothing behind."""

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from tenterhook import TenterhookWarning, open_run, watch
from tests.conftest import ours


def hooks():
    module = torch.nn.modules.module
    tables = [getattr(module, name) for name in dir(module) if name.startswith("_global_") and "hooks" in name]
    tables += [optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks]
    return sum(len(table) for table in tables)


def fit(model, steps=12, **wrong):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if wrong.get("at") == step:
            raise KeyError("mine")


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def test_ranks_share_a_folder_in_whatever_order_they_begin(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        model = build()
        with watch(model, to=tmp_path / "run"):
            fit(model)
    assert open_run(tmp_path / "run").ranks == [0, 1]
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(FileExistsError, match="holds a run already"), watch(build(), to=tmp_path / "run"):
            pass


def test_watch_leaves_nothing_behind(tmp_path):
    before, model = hooks(), build()
    with watch(model, to=tmp_path / "a") as run:
        fit(model)
        assert hooks() > before
    assert hooks() == before and not ours(model)
    assert len(run.open().steps()) == 12 and run.open().rank_info()["ended"] == "finished"
    with pytest.raises(KeyError, match="mine"), watch(model, to=tmp_path / "b"):
        fit(model, at=5)
    assert hooks() == before and not ours(model)
    assert open_run(tmp_path / "b").rank_info()["ended"] == "KeyError" and len(open_run(tmp_path / "b").steps()) == 6
    with pytest.raises(FileExistsError, match="holds a run already"), watch(model, to=tmp_path / "a"):
        pass
    with pytest.raises(RuntimeError, match="entered once"), run:
        pass
    assert hooks() == before and not ours(model)


def test_watch_twice_at_once(tmp_path):
    before, model, other = hooks(), build(), build()
    with watch(model, to=tmp_path / "a"), watch(model, to=tmp_path / "b"), watch(other, to=tmp_path / "c"):
        fit(model)
        fit(other, 5)
    assert hooks() == before and not ours(model) and not ours(other)
    a, b, c = (open_run(tmp_path / name) for name in "abc")
    assert a.stats().to_pandas().equals(b.stats().to_pandas())
    assert [len(run.steps()) for run in (a, b, c)] == [12, 12, 5]


def test_watch_a_frozen_model_and_one_without_optimizer(tmp_path):
    model = build().requires_grad_(False)
    with watch(model, to=tmp_path / "a"), torch.no_grad():
        for _ in range(5):
            model(torch.randn(4, 8))
    assert len(open_run(tmp_path / "a").steps()) == 5
    assert set(open_run(tmp_path / "a").stats().to_pandas()["what"]) == {"input", "output"}
    model = build()
    with watch(model, to=tmp_path / "b"):
        for _ in range(5):
            model(torch.randn(4, 8)).sum().backward()
    assert len(open_run(tmp_path / "b").steps()) == 5
    with pytest.warns(TenterhookWarning, match="recorded nothing"), watch(model, to=tmp_path / "c"):
        pass
