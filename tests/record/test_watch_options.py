"""watch's own options: where it writes, how often it samples, and log."""

import math
import os
import warnings

import pytest
import torch
from torch import nn

from tenterhook import RunError, open_run, watch


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def fit(model, steps=6, norms=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if norms is not None:
            grads = {name: p.grad.double() for name, p in model.named_parameters()}
            norms.append({name: (grad.norm().item(), grad.numel()) for name, grad in grads.items()})
        optimizer.step()


def test_a_cell_can_be_run_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, runs = build(), []
    for _ in range(2):
        with watch(model) as run:
            fit(model)
        runs.append(run)
    folders = sorted(path.name for path in (tmp_path / ".tenterhook").iterdir() if path.name[0].isdigit())
    assert len(folders) == 2 and all("Z-Sequential" in name for name in folders)
    assert [len(run.open().steps()) for run in runs] == [6, 6]
    assert open_run().folder.resolve() == runs[1].open().folder.resolve()
    monkeypatch.chdir("/")
    assert len(runs[0].open().steps()) == 6 and "tenterhook summary .tenterhook" in runs[0].verdict()


def test_options_by_keyword(tmp_path):
    model = build()
    with watch(model, to=tmp_path / "a", dense=2, every=3, budget=0.5) as run:
        fit(model, 8)
    assert run.open().info["schedule"]["dense"] == 2 and run.open().info["schedule"]["budget"] == 0.5
    sampled = run.open().steps().to_pandas()["sampled"]
    assert sampled[0] and sampled[1] and not sampled[2]
    with pytest.raises(TypeError, match=r"its optimizer, got str; a folder is to='runs/z'"):
        watch(model, "runs/z")
    with pytest.raises(TypeError, match=r"its optimizer, got int"):
        watch(model, 3)
    with pytest.raises(TypeError, match=r"log is a function \(step, name, stats\), got 'file'"):
        watch(model, log="file")
    with pytest.raises(ValueError, match="budget=3"):
        watch(model, budget=3)
    with pytest.raises(ValueError, match="dense=-1"):
        watch(model, dense=-1)
    with pytest.raises(RunError, match="was not entered"):
        watch(model).open()


def test_ranks_share_a_folder_that_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="the ranks of a job share one folder: give it as `to`"):
        watch(build())
    assert watch(build(), to=tmp_path) is not None


@pytest.mark.parametrize("every", [1, 2])
def test_log_is_told_what_was_measured(tmp_path, every):
    model, norms, told = build(), [], {}

    def log(step, name, stats):
        told[step, name] = stats

    with watch(model, to=tmp_path / "a", every=every, dense=0, log=log, rules=[]) as run:
        fit(model, 5, norms)
    sampled = run.open().steps().to_pandas()
    steps = sampled[sampled["sampled"]]["step"].tolist()
    assert len(steps) == (5 if every == 1 else 4)
    assert {step for step, _ in told} == set(steps) and list(told) == sorted(told, key=lambda key: key[0])
    for step in steps:
        for name, (norm, count) in norms[step].items():
            stats = told[step, f"parameter_grad/{name}"]
            assert stats.norm == pytest.approx(norm, rel=1e-6) and stats.count == count and stats.nan == stats.inf == 0
            assert stats.rms == pytest.approx(norm / math.sqrt(count), rel=1e-6)
    table = run.open().stats().to_pandas()
    assert {f"{row.what}/{row.site}" for row in table.itertuples()} == {name for _, name in told}
    for row in table.itertuples():
        stats = told[row.step, f"{row.what}/{row.site}"]
        assert (stats.mean, stats.std, stats.min, stats.max) == (row.mean, row.std, row.min, row.max)


def test_what_log_raises_is_said_once(tmp_path, capfd):
    model, called = build(), []

    def broken(step, name, stats):
        called.append(step)
        raise KeyError("mine")

    twin = build()
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    fit(twin)
    torch.manual_seed(1)
    with warnings.catch_warnings(), watch(model, to=tmp_path / "a", log=broken) as run:
        warnings.simplefilter("error")
        fit(model)
    said = capfd.readouterr().err
    assert said.count("log=broken raised KeyError: 'mine'") == 1 and os.path.basename(__file__) in said  # noqa: PTH119
    assert set(called) == set(range(6)) and run.open().rank_info()["failed"] is None
    assert len(run.open().steps()) == 6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_values_that_are_not_finite_and_two_models(tmp_path):
    model, told = build(), {}
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    with watch(model, to=tmp_path / "a", log=lambda step, name, stats: told.setdefault(name, stats)):
        fit(model, 1)
    stats = told["parameter/0.weight"]
    assert stats.nan == 64 and math.isnan(stats.norm) and math.isnan(stats.mean) and math.isnan(stats.max)
