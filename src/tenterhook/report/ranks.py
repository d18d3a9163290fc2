"""Parameters that all ranks of a training should have alike."""

from collections.abc import Sequence
from typing import Any

from tenterhook.store.run import Run

RANKS = "ranks that disagree"


def compare_ranks(run: Run) -> dict[str, Any] | str:
    """What differs first, as a finding; or `clean`, or why nothing was compared."""
    import pyarrow.compute as pc

    columns = ("step", "model", "site", "what", "sum", "sumsq", "count")
    rows = [
        {**row, "rank": rank}
        for rank in run.ranks
        for batch in run.stream("stats", rank).batches(columns)  # never all of a large run at once
        for row in batch.filter(pc.equal(batch["what"], "parameter")).to_pylist()
    ]
    seen: dict[Any, tuple[int, Any]] = {}
    compared = False
    for row in sorted(rows, key=lambda r: (r["step"], r["rank"])):
        value = (row["sum"], row["sumsq"], row["count"])
        rank, first = seen.setdefault((row["step"], row["model"], row["site"]), (row["rank"], value))
        compared |= rank != row["rank"]
        if first[2] == value[2] and not _alike(first, value):
            text = f"ranks {rank} and {row['rank']} have different values"
            why = "each rank trains a model of its own, and what is saved is only one of them"
            then = "wrap the model in DistributedDataParallel; seed all ranks alike before it is built"
            where = {"model": row["model"], "site": row["site"], "what": "parameter", "rank": row["rank"]}
            texts = {"rule": RANKS, "severity": "error", "text": text, "why": why, "then": then}
            return {"step": row["step"], "until": None, **texts, **where}
    return "clean" if compared else "no step was sampled by two ranks"


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or abs(x - y) <= 1e-6 * (abs(x) + abs(y)) for x, y in zip(a[:2], b[:2], strict=True))
