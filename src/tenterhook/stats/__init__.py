"""Statistics of tensors that add up over calls, steps and ranks: counts, sums, extrema, a signed log2 histogram.

measure([a, b])         numbers and histogram, a row each, on the device of the tensors, without waiting for it
Stats.of(row, bins)     one such row on the host; a + b is what measuring both at once would have given
"""

from tenterhook.stats.columns import BINS, NUMBERS
from tenterhook.stats.summary import Stats

__all__ = ["BINS", "NUMBERS", "Stats"]
