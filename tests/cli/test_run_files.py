"""The files of a run: what opens them, also when they were cut off."""

import itertools

import pyarrow
import pyarrow.ipc
import pytest

from tenterhook import open_run
from tenterhook.report.verdict import Verdict
from tests.cli.processes import RUN, SCRIPTS, latest, python


@pytest.fixture(scope="module")
def small(zygote, tmp_path_factory):
    """A run of 60 steps, in several batches."""
    folder = tmp_path_factory.mktemp("small")
    done = zygote(*RUN, "--every", "1", "-c", SEVERAL, cwd=folder, env={"STEPS": "60"})
    assert done.returncode == 0
    return latest(folder)


SEVERAL = f"""
import runpy, sys
import tenterhook.record.log as log
log._ROWS = 200
sys.argv = [{str(SCRIPTS / "small.py")!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_other_tools_open_the_files(small):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    for name in ("stats", "steps"):
        path = small.folder / "rank-0" / f"{name}.arrows"
        with path.open("rb") as file:
            rows = pyarrow.ipc.open_stream(file).read_all()
        assert len(rows) > 20 and rows.to_pandas().equals(small.table(name, 0).drop(["rank"]).to_pandas())
        assert polars.read_ipc_stream(path).height == len(rows)
        assert duckdb.sql("select count(*), max(step) from rows").fetchall() == [(len(rows), 59)]


def test_a_file_that_was_cut_off(small, tmp_path):
    whole = {name: small.table(name) for name in ("stats", "steps")}
    (tmp_path / "rank-0").mkdir()
    for name in ("run.json", "rank-0/rank.json"):
        (tmp_path / name).write_bytes((small.folder / name).read_bytes())
    for name, table in whole.items():
        data = (small.folder / "rank-0" / f"{name}.arrows").read_bytes()
        with pyarrow.ipc.open_stream(data) as stream:
            ends = list(itertools.accumulate((len(batch) for batch in stream), initial=0))
        assert len(ends) > 3
        seen = set()
        for size in range(0, len(data) + 1, max(1, len(data) // 300)):
            (tmp_path / "rank-0" / f"{name}.arrows").write_bytes(data[:size])
            part = open_run(tmp_path).table(name)
            assert part.equals(table.slice(0, len(part)))
            seen.add(len(part))
        assert seen <= set(ends) and len(seen) >= len(ends) - 1
    (tmp_path / "rank-0/rank.json").unlink()
    assert open_run(tmp_path).models == [] and len(open_run(tmp_path).findings()) == 0
    assert "nothing" in str(Verdict.of(open_run(tmp_path)))


def test_reading_needs_no_torch(small):
    code = (
        "import sys; from tenterhook import open_run; run = open_run(sys.argv[1]); run.stats().to_pandas(); run.steps()"
    )
    done = python("-c", code + "; print('torch' in sys.modules, run)", small.folder, cwd=small.folder)
    assert done.stdout.decode().startswith("False Run("), done.stderr
