"""Dropout that leaves next to nothing."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules.thresholds import DROPOUT_HIGH
from tenterhook.record.step import Step


class DropoutNearOne(Checked):
    """Dropout is called with a probability of 0.85 or more: it may be meant as that of keeping a value."""

    name = "dropout near 1"
    needs = "no dropout was called"

    def __init__(self) -> None:
        self._found = False

    def look(self, step: Step) -> Iterator[Finding]:
        """Once, with the first of them."""
        self.has_looked |= bool(step.dropouts)
        high = [(p, site) for site, p in step.dropouts.items() if p >= DROPOUT_HIGH]
        if not high or self._found:
            return
        self._found = True
        p, site = high[0]
        place = next((one for one in step.of("output").places if one.site == site), None)
        text = f"dropout with p={p:g}" + (f" behind {site}" if site else "") + f" leaves {1 - p:.1%} of the values"
        why = "p is the probability of dropping a value, and not that of keeping it"
        then = f"if you want to keep {p:.0%}, say p={1 - p:.2g}"
        yield Finding(self.name, "warn", step.number, text, place, why, then)
