"""Damaged runs: what is still there is read, and what is left out is said."""

import json
import random
import shutil
import warnings
from itertools import pairwise

import pyarrow as pa
import pytest

from tenterhook import RunError, TenterhookWarning, open_run
from tenterhook.report.verdict import Verdict
from tenterhook.store.levels import Levels
from tests.view.made import Made, finding


@pytest.fixture
def folder(tmp_path):
    made = Made(tmp_path / "run", sites=("a", "b"))
    for i in range(6):
        made.add(4, findings=[finding(i)])
    return made.end()


def stats_index(folder):
    lines = (folder / "rank-0" / "stats.index").read_text().splitlines()
    return [tuple(map(int, line.split()[:5])) for line in lines]


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(data)


def test_every_batch_has_its_line(folder):
    rows = [rows for _, _, rows, _, _ in stats_index(folder)]
    assert rows == [40] * 6 and len(open_run(folder).stats()) == 240
    offsets = [(offset, length) for offset, length, *_ in stats_index(folder)]
    assert all(a + n == b for (a, n), (b, _) in pairwise(offsets))


@pytest.mark.parametrize("which", range(6))
def test_a_flipped_bit_costs_one_batch_and_is_said(folder, which):
    offset, length, rows, first, last = stats_index(folder)[which]
    whole = open_run(folder).stats().to_pylist()
    flip(folder / "rank-0" / "stats.arrows", offset + length // 2)
    run = open_run(folder)
    with pytest.warns(
        TenterhookWarning, match=f"rank-0/stats.arrows is damaged: {rows} rows of steps {first} to {last}"
    ):
        read = run.stats().to_pylist()
    assert read == [row for row in whole if not first <= row["step"] <= last]
    assert [(d.first, d.last, d.rows) for d in run.dropped.values()] == [(first, last, rows)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        run.stats()
    assert any("is damaged" in remark for remark in Verdict.of(run).remarks)


def test_a_damaged_schema_is_replaced(folder):
    flip(folder / "rank-0" / "stats.arrows", 40)
    with pytest.warns(TenterhookWarning):
        assert len(open_run(folder).stats()) == 200


def test_a_damaged_line_of_the_index_drops_its_batch_only(folder):
    index = folder / "rank-0" / "stats.index"
    lines = index.read_text().splitlines()
    lines[2] = lines[2][:-1] + ("0" if lines[2][-1] != "0" else "1")
    index.write_text("\n".join(lines) + "\n")
    with pytest.warns(TenterhookWarning):
        assert len(open_run(folder).stats()) == 200


def test_what_was_written_after_the_last_line_is_read(folder):
    index = folder / "rank-0" / "stats.index"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:-1]) + lines[-1][:9])  # killed in between
    assert len(open_run(folder).stats()) == 240


def test_an_older_run_has_no_index(folder):
    for index in folder.glob("rank-0/*.index"):
        index.unlink()
    stream = folder / "rank-0" / "stats.arrows"
    assert len(open_run(folder).stats()) == 240
    stream.write_bytes(stream.read_bytes()[:-300])
    assert len(open_run(folder).stats()) == 200


def test_other_tools_read_the_streams(folder):
    for name in ("stats", "levels", "places", "steps"):
        with (folder / "rank-0" / f"{name}.arrows").open("rb") as file:
            assert len(pa.ipc.open_stream(file).read_all())


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00" * 40, '{"models": ', "[" * 100_000])
def test_a_damaged_rank_json_says_which_file_and_what_can_be_read(folder, text):
    (folder / "rank-0" / "rank.json").write_text(text)
    run = open_run(folder)
    with pytest.raises(RunError, match=r"rank\.json is damaged.*stats\(\), steps\(\) and findings\(\)"):
        run.rank_info()
    assert len(run.stats()) == 240


def test_a_newer_format_says_so(folder):
    (folder / "run.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(RunError, match=r"format 99; this tenterhook reads up to 1.*upgrade"):
        open_run(folder)


def test_random_damage_gives_rows_that_were_written_or_an_error(folder, tmp_path):
    whole = {name: open_run(folder).table(name).to_pylist() for name in ("stats", "steps", "levels", "places")}
    chance = random.Random(0)
    for i in range(60):
        broken = tmp_path / f"broken{i}"
        shutil.copytree(folder, broken)
        file = chance.choice(sorted(broken.glob("rank-0/*")))
        data = bytearray(file.read_bytes())
        at = chance.randrange(len(data))
        kind = chance.choice(("flip", "cut", "zero", "junk"))
        if kind == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del data[at:]
        else:
            size = min(len(data) - at, chance.randrange(1, 400))
            data[at : at + size] = bytes(size) if kind == "zero" else chance.randbytes(size)
        file.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = open_run(broken)
            for name, rows in whole.items():
                found = run.table(name).to_pylist()
                known = [json.dumps(row) for row in rows]
                assert all(json.dumps(row) in known for row in found), (kind, file)
            Levels(*(run.stream(name, 0) for name in ("places", "levels", "stats"))).update()
