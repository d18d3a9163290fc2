"""Levels: what they say of values, and that those of a recorded run are those of its statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tenterhook import open_run, watch
from tenterhook.stats.arithmetic import Numbers
from tenterhook.stats.columns import INDEX, START
from tenterhook.store.levels import NOT_FINITE, NOTHING, PER_DECADE, ZERO, Levels, levels_of
from tenterhook.store.write import RankWriter
from tests.view.made import Made


def level(**numbers):
    row = np.array([START], float)
    for name, value in numbers.items():
        row[0, INDEX[name]] = value
    return int(levels_of(Numbers(row))[0])


@given(st.floats(1e-30, 1e30))
def test_a_level_is_the_logarithm_of_the_rms(rms):
    assert abs(level(count=10, sumsq=10 * rms**2) / PER_DECADE - math.log10(rms)) <= 0.5 / PER_DECADE + 1e-9


def test_what_is_no_number_has_a_level_of_its_own():
    assert level(count=3) == ZERO
    assert level(count=3, nan=1, sumsq=4) == level(count=3, pos_inf=3) == level(count=3, sumsq=math.inf) == NOT_FINITE
    assert level() == NOTHING
    assert NOTHING < ZERO < level(count=1, sumsq=1e-300) < level(count=1, sumsq=1e300) < NOT_FINITE


def levels(run):
    found = Levels(*(run.stream(name, 0) for name in ("places", "levels", "stats")))
    found.update()
    return found


def test_those_of_a_training_are_those_of_its_statistics(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, to=tmp_path / "run", every=1):
        for step in range(30):
            optimizer.zero_grad()
            (model if step % 3 else model[:2])(
                torch.randn(5, 4)
            ).square().mean().backward()  # not always the same sites
            optimizer.step()
    run = open_run(tmp_path / "run")
    recorded = levels(run)
    for index in (tmp_path / "run").glob("rank-0/levels.*"):
        index.unlink()
    worked_out = levels(run)  # as of a run that is older than the levels
    rows = run.stats().to_pylist()
    assert len(recorded.steps) == len(worked_out.steps) == 30
    seen = 0
    for kind in ("output", "output_grad", "parameter", "parameter_grad", "update"):
        tables = []
        for one in (recorded, worked_out):
            codes, steps, places = one.pooled(kind, 0, 1e9, 1000)
            tables.append(
                {
                    (int(s), one.places[p][1]): int(codes[i, k])
                    for i, s in enumerate(steps)
                    for k, p in enumerate(places)
                }
            )
        assert tables[0] == tables[1]
        for row in (row for row in rows if row["what"] == kind and row["rms"]):
            assert abs(tables[0][row["step"], row["site"]] / PER_DECADE - math.log10(row["rms"])) < 0.51 / PER_DECADE
            seen += 1
        measured = {(row["step"], row["site"]) for row in rows if row["what"] == kind}
        assert all(code == NOTHING for at, code in tables[0].items() if at not in measured)
    assert seen > 300


def test_stretches_show_their_largest(tmp_path):
    made = Made(tmp_path / "run", sites=("a", "b"), kinds=("output",))
    made.add(50, broken=[(7, 1)], zero=[(k, 0) for k in range(20, 30)])
    made.add(50)
    found = levels(open_run(made.end()))
    fine, steps, _ = found.pooled("output", 0, 1e9, 5000)
    assert steps.tolist() == list(range(0, 1000, 10)) and fine[7, 1] == NOT_FINITE
    codes, starts, _ = found.pooled("output", 0, 1e9, 10)
    assert starts.tolist() == list(range(0, 1000, 100))
    assert (codes == fine.reshape(10, 10, 2).max(1)).all()
    assert codes[0, 1] == NOT_FINITE and codes[2, 0] == ZERO
    inside, steps, _ = found.pooled("output", 200, 299, 500)
    assert steps.tolist() == list(range(200, 300, 10)) and (inside == fine[20:30]).all()
    assert found.pooled("output", 5000, 6000, 10)[0].shape[0] == 0
    assert found.pooled("input", 0, 1e9, 10)[0].shape == (0, 0)


def test_a_run_that_grows_is_read_on(tmp_path):
    made = Made(tmp_path / "run", sites=("a", "b")).add(5)
    found = levels(open_run(made.folder))
    assert len(found.steps) == 5 and not found.update()
    made.add(7)
    assert found.update() and len(found.steps) == 12
    fresh = levels(open_run(made.end()))
    assert (found.pooled("output", 0, 1e9, 100)[0] == fresh.pooled("output", 0, 1e9, 100)[0]).all()


def test_a_run_is_looked_at_whatever_is_written_next(tmp_path, monkeypatch):
    """A recorder writes one table after another, and a page may look between any two of them."""
    looking: list[Levels] = []
    plain = RankWriter.write

    def watched(writer, table, columns):
        plain(writer, table, columns)
        for one in looking:
            one.update()

    monkeypatch.setattr(RankWriter, "write", watched)
    made = Made(tmp_path / "run", ("a", "b"))
    run = open_run(made.folder)
    looking.append(Levels(*(run.stream(name, 0) for name in ("places", "levels", "stats"))))
    for samples in (3, 7, 10):
        made.add(samples - made.samples)
        assert looking[0].many == samples
    made.end()
    whole = levels(run)
    assert whole.steps.tolist() == looking[0].steps.tolist()
    assert (whole.grids["output"].codes[:10] == looking[0].grids["output"].codes[:10]).all()


def test_places_that_come_while_levels_are_read(tmp_path, monkeypatch):
    made = Made(tmp_path / "run", ("a", "b")).add(1)
    found = Levels(*(open_run(made.folder).stream(name, 0) for name in ("places", "levels", "stats")))
    stream, number = found._streams[1], len(made.places)
    plain = stream.news

    def news():  # the places that are on disk were read before
        place = {"place": [number], "model": ["net"], "site": ["late"], "what": ["output"], "dtype": [""]}
        made.writer.write("places", place)
        made.writer.write("levels", {"step": [10], "places": [[number]], "levels": [[7]]})
        return plain()

    monkeypatch.setattr(stream, "news", news)
    found.update()
    assert found.places[number] == ("net", "late", "output") and "?" not in found.grids
    assert found.grids["output"].codes[1, found.grids["output"].places.index(number)] == 7
    made.end()


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_many_sites(tmp_path, sites):
    made = Made(tmp_path / "run", sites=[f"s{i}" for i in range(sites)]).add(3)
    assert len(levels(open_run(made.end())).places) == 5 * sites
