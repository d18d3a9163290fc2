"""Histograms of many tensors, without the zeros that most of their bins are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tenterhook.stats.columns import BINS


class Histograms:
    """The histograms of some rows: the bins in use of row i, and their counts, are at starts[i] … starts[i + 1]."""

    def __init__(self, starts: NDArray[np.int64], bins: NDArray[np.int64], counts: NDArray[np.int32]) -> None:
        self.starts, self.bins, self.counts = starts, bins, counts

    @classmethod
    def of(cls, dense: NDArray[np.int32]) -> "Histograms":
        """From an array with BINS columns."""
        used = np.flatnonzero(dense != 0)
        starts = np.searchsorted(used, np.arange(len(dense) + 1) * BINS)
        return cls(starts, used & BINS - 1, dense.ravel()[used])

    @classmethod
    def joined(cls, some: Sequence["Histograms"]) -> "Histograms":
        """The rows of several, one after another."""
        if len(some) == 1:
            return some[0]
        before = np.cumsum([0, *(len(one.bins) for one in some)])
        starts = [one.starts[:-1] + start for one, start in zip(some, before, strict=False)]
        bins, counts = (np.concatenate([getattr(one, name) for one in some]) for name in ("bins", "counts"))
        return cls(np.concatenate([*starts, before[-1:]]), bins, counts)

    def in_order(self, order: NDArray[np.int64]) -> "Histograms":
        """These rows, by their indices: some can be left out, some come more than once."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        at = np.repeat(self.starts[:-1][order] - starts[:-1], sizes) + np.arange(starts[-1])
        return Histograms(starts, self.bins[at], self.counts[at])

    def dense(self) -> NDArray[np.int32]:
        """As an array with BINS columns again."""
        found = np.zeros((len(self.starts) - 1, BINS), np.int32)
        found[np.repeat(np.arange(len(found)), np.diff(self.starts)), self.bins] = self.counts
        return found
