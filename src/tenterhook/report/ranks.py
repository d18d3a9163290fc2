"""Parameters that all ranks of a training should have alike."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tenterhook.store.arrays import array
from tenterhook.store.batches import Batch, spread
from tenterhook.store.run import Run
from tenterhook.store.schemas import arrow

RANKS = "ranks that disagree"
_STRETCHES = 16  # of a long run that are compared: what has parted once stays apart
_ROUNDING = 1e-6
_COLUMNS = ["step", "model", "site", "what", "sum", "sumsq", "count"]


def compare_ranks(run: Run) -> dict[str, Any] | str:
    """What differs first, as a finding; or `clean`, or why nothing was compared.

    Of a long run some batches are compared, spread evenly, the last one too; where ranks have parted between two of
    these, the first difference is looked for by halving what is between them.
    """
    batches: Sequence[Batch | None] = run.stream("stats", run.ranks[0]).index() or [None]
    compared, before = False, -1
    for i in spread(len(batches), _STRETCHES):
        found, both = _parted(run, batches[i])
        compared |= both
        if found is not None:
            return _first(run, batches, before, i) or found
        before = i
    return "clean" if compared else "no step was sampled by two ranks"


def _first(run: Run, batches: Sequence[Batch | None], good: int, bad: int) -> dict[str, Any] | None:
    """The first difference after a batch without one, in one with a difference at the latest."""
    first = None
    while bad - good > 1:
        middle = (good + bad) // 2
        found, _ = _parted(run, batches[middle])
        good, bad, first = (middle, bad, first) if found is None else (good, middle, found)
    return first


def _parted(run: Run, stretch: Batch | None) -> tuple[dict[str, Any] | None, bool]:
    """The first difference in the steps of a batch, and whether two ranks have any of these; None: all steps."""
    table = arrow().concat_tables([part for rank in run.ranks for part in _parameters(run, rank, stretch)])
    suspect, compared = _suspect(table)
    seen: dict[Any, tuple[int, Any]] = {}
    for row in sorted(suspect.to_pylist(), key=lambda r: (r["step"], r["rank"])):
        value = (row["sum"], row["sumsq"], row["count"])
        rank, first = seen.setdefault((row["step"], row["model"], row["site"]), (row["rank"], value))
        if first[2] == value[2] and not _alike(first, value):
            text = f"ranks {rank} and {row['rank']} have different values"
            why = "each rank trains a model of its own, and what is saved is only one of them"
            then = "wrap the model in DistributedDataParallel; seed all ranks alike before it is built"
            where = {"model": row["model"], "site": row["site"], "what": "parameter", "rank": row["rank"]}
            texts = {"rule": RANKS, "severity": "error", "text": text, "why": why, "then": then}
            return {"step": row["step"], "until": None, **texts, **where}, True
    return None, compared


def _parameters(run: Run, rank: int, stretch: Batch | None) -> Iterator[Any]:
    """Those of a rank in these steps, as tables; an empty one at least."""
    import pyarrow.compute as pc

    pa, stream = arrow(), run.stream("stats", rank)
    index = stream.index()
    if stretch is None or not index:
        batches = stream.batches(_COLUMNS)
    else:
        near = (batch for batch in index if batch.last >= stretch.first and batch.first <= stretch.last)
        batches = (found for batch in near if (found := stream.read(batch, _COLUMNS)) is not None)
    none = pa.table({name: array([], stream.schema.field(name).type) for name in _COLUMNS})
    for table in (none, *(pa.Table.from_batches([batch]).select(_COLUMNS) for batch in batches)):
        mine = table.filter(pc.equal(table["what"], "parameter"))
        if stretch is not None:
            steps = mine["step"].to_numpy()
            mine = mine.filter((steps >= stretch.first) & (steps <= stretch.last))
        yield mine.append_column("rank", array(np.full(len(mine), rank), pa.int64()))


def _suspect(table: Any) -> tuple[Any, bool]:
    """The rows of parameters whose sums are not alike in all ranks, and whether two ranks have any."""
    keys = ["step", "model", "site"]
    extremes = [(name, how) for name in ("sum", "sumsq") for how in ("min", "max")]
    each = table.group_by(keys, use_threads=False).aggregate([*extremes, ("rank", "count_distinct")])
    compared = bool((each["rank_count_distinct"].to_numpy() > 1).any())
    low, high = (np.stack([each[f"{name}_{how}"].to_numpy() for name in ("sum", "sumsq")]) for how in ("min", "max"))
    with np.errstate(all="ignore"):
        alike = ((low == high) | (np.abs(high - low) <= _ROUNDING * (np.abs(high) + np.abs(low)))).all(0)
    apart = each.select(keys).filter(~alike)
    return (table.join(apart, keys, join_type="inner") if len(apart) else table.slice(0, 0)), compared


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or abs(x - y) <= _ROUNDING * (abs(x) + abs(y)) for x, y in zip(a[:2], b[:2], strict=True))
