"""Reading a run, also one that is still being written or whose process was killed. torch is not needed."""

import json
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tenterhook.errors import RunError, TenterhookWarning
from tenterhook.stats.columns import INDEX, START
from tenterhook.store.batches import Dropped, Stream
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
        self.dropped: dict[tuple[str, int], Dropped] = {}
        self.info = _read_json(folder / "run.json", "without it the run cannot be read")
        version = self.info.get("format", 0)
        if not isinstance(version, int) or version > VERSION:
            what = f"{folder} has format {version!r}; this tenterhook reads up to {VERSION}"
            raise RunError(f"{what}; it was made by a newer one: pip install --upgrade tenterhook")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, ranks={len(self.ranks)}, models={[m['name'] for m in self.models]})"

    def report(
        self, path: str | os.PathLike[str] = "report.html", *others: "Run", ranks: Collection[int] | None = None
    ) -> Path:
        """Write the run as one HTML file, which opens anywhere and needs no network; its path is given back.

        Other runs are put beside it, to be compared. Of more than eight ranks it has eight, unless `ranks` says which.
        """
        from tenterhook.view.report import write_report

        return write_report(self, path, *others, ranks=ranks)

    def _repr_html_(self) -> str:
        """In a notebook: the page."""
        from tenterhook.view.report import framed

        return framed(self)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written something."""
        names = (path.name.removeprefix("rank-") for path in self.folder.glob("rank-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def models(self) -> list[dict[str, Any]]:
        """The models that were seen: name, class, parameters, and the tree of their modules with source lines."""
        return self.rank_info(0).get("models", [])

    def rank_info(self, rank: int = 0) -> dict[str, Any]:
        """What rank.json of one rank says: its models, how it ended, what was checked."""
        path = self.folder / f"rank-{rank}" / "rank.json"
        what = "the tables beside it can be read: stats(), steps() and findings()"
        return _read_json(path, what) if path.is_file() else {}

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
            part = self._read(self.stream(name, k))
            parts.append(part.append_column("rank", array([k] * len(part), pa.int32())))
        return pa.concat_tables(parts) if parts else schemas()[name].empty_table()

    def stream(self, name: str, rank: int) -> Stream:
        """A table of one rank by its batches, for runs that are too large for the memory."""
        return Stream(self.folder / f"rank-{rank}" / f"{name}.arrows", schemas()[name])

    def _read(self, stream: Stream) -> Any:
        batches = list(stream.batches())
        for offset, dropped in stream.dropped.items():
            if (stream.name, offset) not in self.dropped:  # said once
                self.dropped[stream.name, offset] = dropped
                warnings.warn(str(dropped), TenterhookWarning, stacklevel=4)
        return arrow().Table.from_batches(batches, batches[0].schema if batches else stream.schema)


def _read_json(path: Path, still: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error}); {still}") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds a {type(found).__name__} where an object is needed; {still}")
    return found


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
