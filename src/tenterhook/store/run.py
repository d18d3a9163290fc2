"""Reading a run, also one that is still being written or whose process was killed. torch is not needed."""

import json
import os
from pathlib import Path
from typing import Any

from tenterhook.errors import RunError
from tenterhook.stats.columns import INDEX, START
from tenterhook.store.schemas import FILES, VERSION, arrow, schemas


def open_run(path: str | os.PathLike[str] = ".tenterhook/latest") -> "Run":
    """Open a run that `tenterhook run` or `watch` has recorded.

        run = open_run("runs/x")
        run.stats().to_pandas()       a row per step, site and kind of value: counts, mean, std, rms, histogram …
        run.steps().to_pandas()       loss, learning rates, time
        run.findings().to_pylist()

    The tables are pyarrow's. A folder of runs means its newest one.
    """
    folder = Path(path)
    if not (folder / "run.json").is_file():
        inside = sorted(file.parent for file in folder.glob("*/run.json") if not file.parent.is_symlink())
        if not inside:
            what = "it is not there" if not folder.exists() else "there is no run.json in it"
            raise RunError(f"{folder} is not a run: {what}; record one with `tenterhook run train.py`")
        folder = inside[-1]
    return Run(folder)


class Run:
    """A run on disk: `info` is what run.json says, the tables are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.info: dict[str, Any] = json.loads((folder / "run.json").read_text())
        except ValueError as error:
            raise RunError(f"{folder / 'run.json'} cannot be read: {error}") from error
        if self.info.get("format", 0) > VERSION:
            raise RunError(f"{folder} has format {self.info['format']}; this tenterhook reads up to {VERSION}")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, ranks={len(self.ranks)}, models={[m['name'] for m in self.models]})"

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written something."""
        return sorted(int(path.name.removeprefix("rank-")) for path in self.folder.glob("rank-*"))

    @property
    def models(self) -> list[dict[str, Any]]:
        """The models that were seen: name, class, parameters, and the tree of their modules with source lines."""
        return self.rank_info(0).get("models", [])

    def rank_info(self, rank: int = 0) -> dict[str, Any]:
        """What rank.json of one rank says: its models, how it ended, what was checked."""
        path = self.folder / f"rank-{rank}" / "rank.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def stats(self, rank: int | None = None) -> Any:
        """Statistics per step, site and kind of value, with mean, std, rms and absmax worked out."""
        return with_moments(self.table("stats", rank))

    def steps(self, rank: int | None = None) -> Any:
        """Loss, learning rates and times per step."""
        return self.table("steps", rank)

    def findings(self, rank: int | None = None) -> Any:
        """What the rules have found; `until` is the last step at which it held, null where it still did at the end."""
        table = self.table("findings", rank)
        if "until" not in table.column_names:  # an older run
            return table
        from tenterhook.store.arrays import array

        names = ("rank", "rule", "step", "model", "site", "text")
        last = {tuple(row.get(name) for name in names): i for i, row in enumerate(table.to_pylist())}
        if len(last) == len(table):
            return table
        return table.take(array(sorted(last.values()), arrow().int64()))

    def table(self, name: str, rank: int | None = None) -> Any:
        """A table as it is in the files, of one rank, or of all with a column `rank`."""
        from tenterhook.store.arrays import array

        pa = arrow()
        if name not in FILES:
            raise RunError(f"there is no table {name!r}; there are {', '.join(FILES)}")
        parts = []
        for k in self.ranks if rank is None else [rank]:
            part = read_stream(self.folder / f"rank-{k}" / f"{name}.arrows", schemas()[name])
            parts.append(part.append_column("rank", array([k] * len(part), pa.int32())))
        return pa.concat_tables(parts) if parts else schemas()[name].empty_table()


def read_stream(path: Path, schema: Any) -> Any:
    """The whole batches of a stream; a last one that was cut off is left out."""
    pa = arrow()
    batches: list[Any] = []
    if path.is_file() and path.stat().st_size:
        with pa.memory_map(str(path)) as file:
            try:
                reader = pa.ipc.open_stream(file)
                schema = reader.schema
                while True:
                    batches.append(reader.read_next_batch())
            except (StopIteration, pa.ArrowInvalid, OSError):
                pass
    return pa.Table.from_batches(batches, schema)


def with_moments(table: Any) -> Any:
    """The statistics with the columns that follow from others; null where no value is finite."""
    import numpy as np

    from tenterhook.stats.arithmetic import Numbers
    from tenterhook.store.arrays import array

    numbers = np.tile(START, (len(table), 1))
    for name, i in INDEX.items():
        if name in table.column_names:  # not in a run that is older than the column
            numbers[:, i] = table[name].to_numpy()
    rows = Numbers(numbers)
    none = rows.finite == 0
    with np.errstate(all="ignore"):  # sums that are infinite
        moments = {name: getattr(rows, name) for name in ("mean", "std", "rms", "absmax")}
    for name, values in moments.items():
        table = table.append_column(name, array(np.ma.array(values, mask=none), arrow().float64()))
    return table
