"""Statistics of tensors that add up over calls, steps and ranks: counts, sums, extrema, a signed log2 histogram.

columns.py declares them, the rest follows:

cpu, native, cuda       measure tensors: a row of numbers and a histogram for each, without waiting for a device
arithmetic, histograms  what can be done with many such rows
Stats.of(row, bins)     one of them on the host; a + b is what measuring both at once would have given
"""

from tenterhook.stats.columns import BINS, INDEX, NUMBERS
from tenterhook.stats.summary import Stats

__all__ = ["BINS", "INDEX", "NUMBERS", "Stats"]
