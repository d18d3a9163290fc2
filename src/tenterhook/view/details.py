"""One site over time: its numbers and its histograms, for the inspector."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tenterhook.stats.arithmetic import Numbers, merged
from tenterhook.stats.columns import BINS, INDEX, START
from tenterhook.store.batches import Batch

if TYPE_CHECKING:
    from tenterhook.view.answers import Answers

_MOST_BATCHES = 64  # of a long run; each holds many steps
_HALF = BINS // 2


def of_site(answers: "Answers", model: str, site: str, first: float, last: float, columns: int) -> dict[str, Any]:
    """Its kinds of values, each with series and a histogram for each of some stretches of time.

    Of a run with more batches than a chart has columns, some of these are read, spread evenly: `share` says how many.
    """
    batches, share = _spread(answers, first, last)
    kinds: dict[str, list[Any]] = {}
    for batch in batches:
        for what, rows in _rows_of(batch, model, site, first, last):
            kinds.setdefault(what, []).append(rows)
    found = {what: _told(_joined(parts), columns) for what, parts in kinds.items()}
    return {"model": model, "site": site, "share": share, "kinds": found}


def _spread(answers: "Answers", first: float, last: float) -> tuple[Any, float]:
    stream = answers.run.stream("stats", answers.rank)
    index: Sequence[Batch] = [b for b in stream.index() if b.last >= first and b.first <= last]
    if not stream.index():
        return stream.batches(), 1.0
    chosen: Any = (
        np.unique(np.linspace(0, len(index) - 1, min(len(index), _MOST_BATCHES)).round().astype(int)) if index else []
    )
    found = (stream.read(index[i]) for i in chosen)
    return (batch for batch in found if batch is not None), len(chosen) / max(1, len(index))


def _rows_of(batch: Any, model: str, site: str, first: float, last: float) -> Any:
    """The rows of a site in a batch, by kind of value."""
    import pyarrow.compute as pc

    mask = pc.equal(batch["site"], site)
    if not pc.any(mask).as_py():
        return
    rows = batch.filter(pc.and_(mask, pc.equal(batch["model"], model)))
    steps = rows["step"].to_numpy()
    rows = rows.filter(np.logical_and(steps >= first, steps <= last))
    for what in rows["what"].unique().to_pylist():
        yield what, rows.filter(pc.equal(rows["what"], what))


def _joined(parts: list[Any]) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches(parts).combine_chunks()


def _told(rows: Any, columns: int) -> dict[str, Any]:
    """The rows merged into some stretches of time."""
    steps = rows["step"].to_numpy()
    starts = np.unique(np.linspace(0, len(steps), min(columns, len(steps)) + 1)[:-1].astype(int))
    numbers = np.tile(np.array(START), (len(steps), 1))
    for name, i in INDEX.items():
        if name in rows.column_names:
            values = rows[name].to_numpy()
            numbers[:, i] = np.where(np.isnan(values), START[i], values)
    together = Numbers(merged(numbers, starts.astype(np.int64)))
    with np.errstate(all="ignore"):
        finite = together.finite > 0
        told = {name: getattr(together, name) for name in ("mean", "std", "rms", "min", "max", "absmax")}
        told = {
            name: [_short(v) if ok else None for v, ok in zip(values, finite, strict=True)]
            for name, values in told.items()
        }
        zeros = together.zeros / np.maximum(together.count, 1)
    for name in ("dead", "saturated"):
        if name in rows.column_names and rows[name].null_count < len(rows):
            told[name] = _last_known(rows[name].to_pylist(), starts)
    last = {"count": int(numbers[-1, INDEX["count"]]), "calls": rows["calls"][-1].as_py()}
    bad = [[int(v) for v in getattr(together, name)] for name in ("nan", "pos_inf", "neg_inf")]
    counts = {"zeros": [_short(v) for v in zeros], "nan": bad[0], "pos_inf": bad[1], "neg_inf": bad[2]}
    return {
        "step": steps[starts].tolist(),
        "end": int(steps[-1]) + 1,
        **told,
        **counts,
        **last,
        **_histograms(rows, starts),
    }


def _histograms(rows: Any, starts: NDArray[np.int64]) -> dict[str, Any]:
    """Shares of 0 … 255 in the bins of each stretch: those of negative values, zero, those of positive ones."""
    offsets = np.concatenate([[0], np.cumsum(rows["bins"].combine_chunks().value_lengths().fill_null(0).to_numpy())])
    bins = rows["bins"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    counts = rows["counts"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    many = min(len(bins), len(counts))
    at = np.searchsorted(starts, np.searchsorted(offsets, np.arange(many), side="right") - 1, side="right") - 1
    bins, counts = bins[:many].astype(np.int64), counts[:many]
    fine = (bins >= 0) & (bins < BINS)
    dense = np.zeros((len(starts), BINS))
    np.add.at(dense, (at[fine], bins[fine]), counts[fine])
    exponents = np.flatnonzero((dense[:, 1 : _HALF - 1] + dense[:, _HALF + 1 : -1]).any(0)) + 1
    if not len(exponents):
        return {"low": 0, "high": -1, "shares": []}
    low, high = int(exponents[0]), int(exponents[-1])
    signed = [
        dense[:, _HALF + high : _HALF + low - 1 : -1],
        dense[:, [0]] + dense[:, [_HALF]],
        dense[:, low : high + 1],
    ]
    picture = np.concatenate(signed, axis=1)
    shares = np.ceil(255 * picture / np.maximum(picture.sum(1, keepdims=True), 1))
    return {"low": low - 127, "high": high - 127, "shares": shares.astype(int).tolist()}


def _last_known(values: list[float | None], starts: NDArray[np.int64]) -> list[float | None]:
    found, known = [], None
    ends = [*starts[1:].tolist(), len(values)]
    for begin, end in zip(starts.tolist(), ends, strict=True):
        known = next((v for v in reversed(values[begin:end]) if v is not None), known)
        found.append(None if known is None else _short(known))
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")
