"""Batches that are too small for BatchNorm."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules._depth import place_of
from tenterhook.record.rules.thresholds import NORM_BATCH, NORM_OF, NORM_OFTEN, NORM_VALUES
from tenterhook.record.step import Step


class BatchTooSmall(Checked):
    """BatchNorm gets one or two samples in training mode, most of the time; a note where these are large pictures."""

    name = "batch too small for BatchNorm"
    needs = "no BatchNorm was called in training mode"

    def __init__(self) -> None:
        self._often = Persistent(NORM_OFTEN, NORM_OF)

    def look(self, step: Step) -> Iterator[Finding]:
        """Once, with the first of them."""
        if not step.batches:
            return
        self.has_looked = True
        (model, site), (rows, values) = min(step.batches.items(), key=lambda one: one[1])
        if self._often.so("any", rows <= NORM_BATCH):
            severity = "warn" if values < NORM_VALUES else "note"
            text = f"it normalises by {rows} sample{'s' * (rows > 1)}, {values:,} values of each channel"
            why = "each sample is changed by what it happens to be with, and the averages for eval() are of little use"
            then = "use larger batches, or GroupNorm; or freeze its averages with eval()"
            yield Finding(self.name, severity, step.number, text, place_of(model, site, step), why, then)
