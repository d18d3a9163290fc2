"""A site over time: its numbers and its histograms, for the inspector."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tenterhook.stats.arithmetic import Numbers
from tenterhook.stats.columns import BINS
from tenterhook.store.batches import Batch, spread
from tenterhook.view.parts import Parts, PlaceNumbers, parts_of

if TYPE_CHECKING:
    from tenterhook.view.answers import Answers

_MOST_BATCHES = 64  # of a long run; each holds many steps
_HALF = BINS // 2


def of_site(answers: "Answers", model: str, site: str, first: float, last: float, columns: int) -> dict[str, Any]:
    """Its kinds of values, each with series and a histogram for each of some stretches of time.

    Of a run with more batches than a chart has columns, some of these are read, spread evenly: `share` says how many.
    """
    batches, _, share = _spread(answers, first, last, _MOST_BATCHES)
    found = _by_site((_rows_of(batch, model, site, first, last) for batch in batches), columns, share)
    return next(found, {"model": model, "site": site, "share": share, "kinds": {}})


def of_sites(answers: "Answers", columns: int) -> Iterator[dict[str, Any]]:
    """All that were measured, each as `of_site` tells it. Every batch is read once, and at most `columns` are."""
    batches, many, share = _spread(answers, -np.inf, np.inf, columns)
    return _by_site(batches, columns, share, enough=math.ceil(columns / max(1, many)))


def _by_site(batches: Iterator[Any], columns: int, share: float, enough: int = 0) -> Iterator[dict[str, Any]]:
    """Of the rows in these batches; of each batch and place, at most `enough` parts are kept, 0: all rows."""
    numbers = PlaceNumbers()
    parts = Parts.joined([parts_of(batch, numbers, enough) for batch in batches if len(batch)])
    sites: dict[tuple[str, str], dict[str, Parts]] = {}
    for number, own in parts.by_place():
        model, site, what = numbers.places[number]
        sites.setdefault((model, site), {})[what] = own
    for (model, site), kinds in sites.items():
        told = {what: _told(own, columns) for what, own in kinds.items()}
        yield {"model": model, "site": site, "share": share, "kinds": told}


def _spread(answers: "Answers", first: float, last: float, most: int) -> tuple[Iterator[Any], int, float]:
    """At most so many of the batches in this window, how many these are, and their share of all that are in it."""
    stream = answers.run.stream("stats", answers.rank)
    index: Sequence[Batch] = stream.index()
    if not index:
        return stream.batches(), 1, 1.0
    index = [batch for batch in index if batch.last >= first and batch.first <= last]
    chosen = spread(len(index), most)
    found = (stream.read(index[i]) for i in chosen)
    return (batch for batch in found if batch is not None), len(chosen), len(chosen) / max(1, len(index))


def _rows_of(batch: Any, model: str, site: str, first: float, last: float) -> Any:
    """The rows of a site in a batch, in this window."""
    import pyarrow.compute as pc

    rows = batch.filter(pc.and_(pc.equal(batch["site"], site), pc.equal(batch["model"], model)))
    steps = rows["step"].to_numpy()
    return rows.filter(np.logical_and(steps >= first, steps <= last))


def _told(parts: Parts, columns: int) -> dict[str, Any]:
    """The parts merged into some stretches of time."""
    many = len(parts.step)
    starts = np.unique(np.linspace(0, many, min(columns, many) + 1)[:-1].astype(np.int64))
    together = Numbers(parts.merged(starts))
    with np.errstate(all="ignore"):
        finite = together.finite > 0
        told = {name: getattr(together, name) for name in ("mean", "std", "rms", "min", "max", "absmax")}
        told = {
            name: [_short(v) if ok else None for v, ok in zip(values, finite, strict=True)]
            for name, values in told.items()
        }
        zeros = together.zeros / np.maximum(together.count, 1)
    for name, values in (("dead", parts.dead), ("saturated", parts.saturated)):
        if not np.isnan(values).all():
            told[name] = _last_known(values.tolist(), starts)
    last = {"count": int(parts.count[-1]), "calls": int(parts.calls[-1])}
    bad = [[int(v) for v in getattr(together, name)] for name in ("nan", "pos_inf", "neg_inf")]
    counts = {"zeros": [_short(v) for v in zeros], "nan": bad[0], "pos_inf": bad[1], "neg_inf": bad[2]}
    return {
        "step": parts.step[starts].tolist(),
        "end": int(parts.last[-1]) + 1,
        **told,
        **counts,
        **last,
        **_histograms(parts, starts),
    }


def _histograms(parts: Parts, starts: NDArray[np.int64]) -> dict[str, Any]:
    """Shares of 0 … 255 in the bins of each stretch: those of negative values, zero, those of positive ones."""
    at = np.searchsorted(starts, np.repeat(np.arange(len(parts.sizes)), parts.sizes), side="right") - 1
    dense = np.zeros((len(starts), BINS))
    np.add.at(dense, (at, parts.bins), parts.counts)
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


def _last_known(values: list[float], starts: NDArray[np.int64]) -> list[float | None]:
    found: list[float | None] = []
    known: float | None = None
    ends = [*starts[1:].tolist(), len(values)]
    for begin, end in zip(starts.tolist(), ends, strict=True):
        known = next((v for v in reversed(values[begin:end]) if v == v), known)
        found.append(None if known is None else _short(known))
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")
