"""Loss and learning rate over time, in as many points as a chart can show."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenterhook.store.batches import Stream


class Steps:
    """The table of steps of one rank, four numbers for each, read as it grows."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parts: list[NDArray[np.float64]] = []
        self._rates: list[NDArray[np.float64]] = []
        self._all = np.zeros((3, 0))

    @property
    def many(self) -> int:
        """How many steps there are."""
        return int(self._read().shape[1])

    @property
    def last(self) -> int:
        """The number of the last one, -1 before the first."""
        steps = self._read()[0]
        return int(steps[-1]) if len(steps) else -1

    @property
    def losses(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """All steps, and their losses."""
        steps, loss, _ = self._read()
        return steps, loss

    def table(self, first: float, last: float, columns: int) -> dict[str, Any]:
        """The steps in this window: of each stretch the mean loss, the lowest, the highest, and the last rate."""
        steps, loss, rate = self._read()
        low, high = np.searchsorted(steps, [first, last + 1])
        steps, loss, rate = steps[low:high], loss[low:high], rate[low:high]
        if not len(steps):
            return {name: [] for name in ("step", "loss", "low", "high", "rate", "bad")}
        starts = np.unique(np.linspace(0, len(steps), min(columns, len(steps)) + 1)[:-1].astype(int))
        finite = np.isfinite(loss)
        many = np.add.reduceat(finite, starts, dtype=np.int64)
        with np.errstate(all="ignore"):
            mean = np.add.reduceat(np.where(finite, loss, 0), starts) / many
            least = np.minimum.reduceat(np.where(finite, loss, np.inf), starts)
            most = np.maximum.reduceat(np.where(finite, loss, -np.inf), starts)
        found = {"loss": mean, "low": least, "high": most, "rate": rate[[*(starts[1:] - 1), len(rate) - 1]]}
        table: dict[str, Any] = {name: _or_none(values) for name, values in found.items()}
        bad = np.logical_or.reduceat(np.isinf(loss) | (loss != loss) & ~np.isnan(rate), starts)
        return {"step": steps[starts].astype(int).tolist(), **table, "bad": bad.tolist()}

    def _read(self) -> NDArray[np.float64]:
        new = []
        for batch in self._stream.news(("step", "loss", "rates")):
            loss = batch["loss"].to_numpy(zero_copy_only=False)
            new.append(np.stack([batch["step"].to_numpy(zero_copy_only=False), loss, _largest(batch["rates"])]))
        if new:
            self._all = np.concatenate([self._all, *new], axis=1)
        return self._all


def _largest(lists: Any) -> NDArray[np.float64]:
    """Of each list; NaN where there is none."""
    sizes = lists.value_lengths().fill_null(0).to_numpy()
    found, some = np.full(len(sizes), math.nan), sizes > 0
    if some.any():
        starts = (np.cumsum(sizes) - sizes)[some]
        found[some] = np.maximum.reduceat(lists.flatten().to_numpy(zero_copy_only=False), starts)
    return found


def _or_none(values: NDArray[np.float64]) -> list[float | None]:
    return [None if not math.isfinite(value) else value for value in values.tolist()]
