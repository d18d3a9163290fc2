"""Runs of two ranks against a run of one process, which had the batches of both."""

import subprocess
import sys
from pathlib import Path

import pytest

from tenterhook import compare_runs

SCRIPT = Path(__file__).with_name("ranks.py")


def train(folder, world, kind="ddp", factor=1.0):
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", SCRIPT, folder, str(world), str(rank), kind, str(factor)])
        for rank in range(world)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * world
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ranks") / "alone", 1)


def test_ranks_that_train_as_one_process_does(alone, tmp_path):
    found = compare_runs(alone, train(tmp_path / "two", 2, "ddp"))
    assert found.first is None and "within rounding" in found.verdict, found
    steps = {one.name: one.steps for one in found.kinds}
    assert steps["data"] == steps["outputs"] == steps["weights"] == 6 and "gradients" not in steps


def test_shards_that_part_where_a_batch_is_another_one(alone, tmp_path):
    found = compare_runs(alone, train(tmp_path / "two", 2, "fsdp", 2.0))
    assert (found.first.step, found.first.what) == (3, "input"), found
