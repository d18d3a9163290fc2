"""Two recorded runs: which kind of thing parts first, and when."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from tenterhook import open_run, watch
from tenterhook.cli import main
from tenterhook.comparing.runs import _added, compare_runs

STEPS = 12


def train(folder, *, seed=0, change=lambda step, model, optimizer, x: x):
    """A small training; `change` may do something at a step, and returns the batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with watch(model, to=folder, every=1):
        for step in range(STEPS):
            x = change(step, model, optimizer, torch.randn(16, 4, generator=generator))
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return open_run(folder)


def at(when, do):
    def change(step, model, optimizer, x):
        return do(model, optimizer, x) if step == when else x

    return change


def kinds(found):
    return {kind.name: kind for kind in found.kinds}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


def test_the_same_training_twice_is_equal(plain, tmp_path):
    found = compare_runs(plain, train(tmp_path))
    assert found.equal and found.first is None and "equal in all" in found.verdict


def test_other_data_at_one_step(plain, tmp_path):
    found = compare_runs(plain, train(tmp_path, change=at(7, lambda model, optimizer, x: x * 2)))
    assert (found.first.step, found.first.what) == (7, "input")
    assert kinds(found)["weights at the start"].first is None and kinds(found)["learning rate"].first is None
    assert found.verdict.startswith("same weights at the start") and "until step 7, then data" in found.verdict


def test_another_learning_rate(plain, tmp_path):
    def halve(model, optimizer, x):
        optimizer.param_groups[0]["lr"] = 0.05
        return x

    found = compare_runs(plain, train(tmp_path, change=at(5, halve)))
    assert (found.first.step, found.first.what) == (5, "rate")
    assert kinds(found)["data"].first is None


def test_another_seed_has_other_weights_at_the_start(plain, tmp_path):
    found = compare_runs(plain, train(tmp_path, seed=3))
    assert found.kinds[0].name == "weights at the start" and found.kinds[0].rounding.step == found.first.step


def test_rounding_is_told_from_more(plain, tmp_path):
    def nudge(model, optimizer, x):
        with torch.no_grad():
            model[0].weight.mul_(1 + 1e-6)
        return x

    found = compare_runs(plain, train(tmp_path, change=at(4, nudge)))
    assert not found.equal and found.first is None and "within rounding" in found.verdict


def test_the_spread_of_two_seeds_is_what_differs_by_itself(plain, tmp_path):
    other = train(tmp_path / "seed", seed=3)
    found = compare_runs(plain, train(tmp_path / "again", seed=4), spread=other)
    assert kinds(found)["outputs"].rounding is not None
    loud = train(tmp_path / "loud", change=at(6, lambda model, optimizer, x: x * 100))
    assert kinds(compare_runs(plain, loud, spread=other))["data"].spread.step == 6


def test_ranks_add_up():
    rows = [
        {
            "count": 2,
            "nan": 0,
            "pos_inf": 0,
            "neg_inf": 0,
            "zeros": 1,
            "sum": 3.0,
            "sumsq": 9.0,
            "min": 0.0,
            "max": 3.0,
        },
        {
            "count": 2,
            "nan": 1,
            "pos_inf": 0,
            "neg_inf": 0,
            "zeros": 0,
            "sum": 1.0,
            "sumsq": 1.0,
            "min": 1.0,
            "max": 1.0,
        },
    ]
    total = _added(rows)
    assert (total["count"], total["nan"], total["min"], total["max"]) == (4, 1, 0.0, 3.0)
    assert total["mean"] == pytest.approx(4 / 3) and total["rms"] == pytest.approx(math.sqrt(10 / 3))


def test_runs_on_the_command_line(plain, tmp_path, capsys):
    again = train(tmp_path / "again")
    other = train(tmp_path / "other", change=at(7, lambda model, optimizer, x: x * 2))
    assert main(["compare", str(plain.folder), str(again.folder)]) == 0
    assert main(["compare", str(plain.folder), str(other.folder)]) == 1
    assert "until step 7, then data" in capsys.readouterr().out
    assert main(["compare", str(plain.folder), str(tmp_path / "nowhere")]) == 2


def test_torch_is_not_needed(plain):
    ends = [str(plain.folder)] * 2
    code = f"import sys; from tenterhook.cli import main; main(['compare', *{ends}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done
