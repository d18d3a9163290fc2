"""The table of statistics: what follows from it, and that a new one is a row of it."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest

import tenterhook
from tenterhook.stats import NUMBERS, Stats, native
from tenterhook.stats.arithmetic import merged
from tenterhook.stats.columns import START, TABLE
from tenterhook.stats.summary import merge
from tenterhook.store.run import with_moments
from tenterhook.store.schemas import schemas

DOCS = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def documented():
    """The rows of docs/format.md for what TABLE declares: neighbours that mean the same share one."""
    groups = itertools.groupby(TABLE, key=lambda column: (column.dtype, column.meaning))
    for (dtype, meaning), columns in groups:
        yield f"| {', '.join(column.name for column in columns)} | {dtype} | {meaning} |\n"


def test_the_docs_say_what_the_table_says():
    assert "".join(documented()) in DOCS


@pytest.mark.parametrize("table", ["stats", "steps"])
def test_the_docs_list_all_columns_in_their_order(table):
    rows = DOCS.partition(f"\n## {table}\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    found = []
    for row in rows:
        names, types = (cell.strip().split(", ") for cell in row.split("|")[1:3])
        found += zip(names, itertools.cycle(types), strict=False)
    types = [re.sub(r"list<item: (\w+)>", r"list of \1", str(field.type)) for field in schemas()[table]]
    types = [text.replace("float", "float32").replace("double", "float64") for text in types]
    assert found == [*zip(schemas()[table].names, types, strict=True)]


def test_the_order_of_columns_of_version_1_stays():
    names = ["step", "model", "site", "what", "calls", "count", "nan", "pos_inf", "neg_inf", "zeros", "sum", "sumsq"]
    names += ["min", "max", "sampled", "bins", "counts", "dead", "saturated"]
    assert [name for name in schemas()["stats"].names if name in names] == names


def test_no_values_change_nothing():
    row = [float(i) for i in range(1, len(TABLE) + 1)]
    assert merge(row, START) == merge(START, row) == row
    assert np.array_equal(merged(np.array([START, row, START, START]), np.array([0, 3])), [row, START])


def test_readers_work_out_what_follows_also_from_a_run_that_is_older_than_a_column():
    rows = [Stats(4, zeros=1, sum=2.0, sumsq=6.0, min=-2.0, max=1.0), Stats(2, nan=2), Stats()]
    columns = {name: [getattr(row, name) if row.finite else None for row in rows] for name in ("min", "max")}
    columns |= {name: [getattr(row, name) for row in rows] for name in NUMBERS if name not in (*columns, "sampled")}
    found = with_moments(pyarrow.table(columns)).to_pydict()
    for name in ("mean", "std", "rms", "absmax"):
        assert found[name] == [pytest.approx(getattr(rows[0], name)), None, None]
    assert len(with_moments(schemas()["stats"].empty_table())) == 0


ADDED = {
    "columns.py": (
        '"how many values are in the histogram"),\n',
        '    Column("pos", "int64", "sum", "finite", "how many are above 0"),\n'
        '    Column("cubes", "float64", "sum", "finite", "their sum", power=3),\n',
    ),
    "cpu.py": (
        '"max": lambda values: values,\n',
        '    "pos": lambda values: values > 0,\n    "cubes": lambda values: values**3,\n',
    ),
    "native.c": ("X(zeros, v == 0)", " X(pos, v > 0)"),
}
SCRIPT = """
import sys
import torch
from tenterhook import watch
from tenterhook.stats import Stats
from tenterhook.store.run import with_moments
from tenterhook.store.schemas import schemas

assert (Stats(pos=3, cubes=1.5) + Stats(pos=4)).pos == 7
names = schemas()["stats"].names
assert names[names.index("sampled") + 1 :][:2] == ["pos", "cubes"]
for dtype in (torch.float32, torch.float64):
    model = torch.nn.Sequential(torch.nn.Linear(50, 200), torch.nn.ReLU()).to(dtype)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters())
    batches = [torch.randn(500, 50, dtype=dtype), torch.randn(3, 50, dtype=dtype)]
    with torch.no_grad():
        pos = sum((model(x) > 0).sum().item() for x in batches)
        cubes = sum((model(x) ** 3).sum().item() for x in batches)
    with watch(model, to=f"{sys.argv[1]}/{dtype}", every=1) as run:
        for x in batches:
            scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    rows = {(row["site"], row["what"]): row for row in run.open().stats().to_pylist()}
    assert rows["1", "output"]["pos"] == pos
    assert rows["1", "output_grad"]["pos"] == rows["1", "output_grad"]["count"] == 503 * 200
    if dtype is torch.float64:  # compiled code measures the others
        assert abs(rows["1", "output"]["cubes"] / cubes - 1) < 1e-9
        assert rows["1", "output_grad"]["cubes"] == 503 * 200
"""


@pytest.mark.parametrize("compiler", [None, "0"], ids=["compiled", "NumPy"])
def test_a_new_statistic_is_a_row_and_an_expression_for_each_backend(compiler, tmp_path):
    if compiler is None and not native.is_native():
        pytest.skip("there is no C compiler here")
    package = tmp_path / "tenterhook"
    shutil.copytree(Path(tenterhook.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (after, added) in ADDED.items():
        file = package / "stats" / name
        text = file.read_text()
        assert text.count(after) == 1, f"{name} has another form now, which the recipe in columns.py should tell"
        file.write_text(text.replace(after, after + added))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)} | ({"TENTERHOOK_CC": compiler} if compiler else {})
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
