"""Weights that ranks should have alike, in runs of any length."""

import pytest

from tenterhook import open_run
from tenterhook.report.ranks import compare_ranks
from tenterhook.stats.columns import INDEX
from tenterhook.store.batches import Stream
from tests.view.made import KINDS, Made


def two_ranks(folder, batches, apart_from=None):
    """Rank 1 has another weight from this step on; batches of 4 samples, a step each."""

    def change(steps, numbers):
        if apart_from is not None:
            numbers[steps >= apart_from, KINDS.index("parameter"), INDEX["sum"]] += 5

    for rank in (0, 1):
        made = Made(folder, ("a", "b"), every=1, rank=rank, change=change if rank else None)
        for _ in range(batches):
            made.add(4)
        made.end()
    return open_run(folder)


@pytest.mark.parametrize("apart_from", [0, 1, 4, 17, 63, 159])
@pytest.mark.parametrize("batches", [1, 3, 40])
def test_the_first_step_is_found(tmp_path, batches, apart_from):
    found = compare_ranks(two_ranks(tmp_path / "run", batches, apart_from))
    if apart_from >= 4 * batches:
        assert found == "clean"
    else:
        assert (found["step"], found["site"], found["rank"]) == (apart_from, "a.weight", 1)


def test_a_long_run_is_not_read_whole(tmp_path, monkeypatch):
    run = two_ranks(tmp_path / "run", 200, 555)
    read, plain = [], Stream.read
    monkeypatch.setattr(Stream, "read", lambda self, *rest: read.append(0) or plain(self, *rest))
    assert compare_ranks(run)["step"] == 555
    assert len(read) < 60  # of 400


def test_ranks_without_a_step_in_common(tmp_path):
    Made(tmp_path / "run", ("a",)).add(3).end()
    Made(tmp_path / "run", ("a",), rank=1).end()
    assert compare_ranks(open_run(tmp_path / "run")) == "no step was sampled by two ranks"
