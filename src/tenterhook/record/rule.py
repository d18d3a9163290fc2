"""What a rule is. One that you write needs a name and `look`; ten lines will do:

    class Cold:
        name = "cold layer"

        def look(self, step):
            outputs = step.of("output")
            for place, rms in zip(outputs.places, outputs.rms):
                if rms < 1e-3:
                    yield Finding(self.name, "warn", step.number, f"rms {rms:.1e}", place)

`watch(model, rules=[*all_rules(), Cold()])`, or `tenterhook run --rules FILE.py:Cold train.py`.

A rule of our own is a file in rules/, derived from one of the bases below. It is listed in `rules/__init__.py` and, by
when a fault of its kind shows, in `report/causes.py`; its numbers stand in `rules/thresholds.py`, its row in
docs/watching.md, and trainings that it is to find, and to leave alone, in tests/zoo.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.places import Place
from tenterhook.record.step import Step


@dataclass(frozen=True)
class Finding:
    """What a rule says about one place, at the step where it first held."""

    rule: str
    severity: str  # one of SEVERITIES
    step: int
    text: str  # what was found, in a line
    place: Place | None = None
    why: str = ""  # why it matters
    then: str = ""  # what to do
    until: int | None = None  # the last step at which it held, once later steps have refuted it

    def is_of(self, other: "Finding") -> bool:
        """Whether the other one says the same, and until when."""
        return (self.rule, self.step, self.place, self.text) == (other.rule, other.step, other.place, other.text)


class Rule(Protocol):
    """Looks at every step, sampled or not, and yields what it finds. It may keep state."""

    name: str

    def look(self, step: Step) -> Iterable[Finding]:
        """Findings that this step adds; a place that was reported once need not be again.

        One that this step refutes is yielded again with `until`: `replace(finding, until=step.number - 1)`.
        """
        ...


class Checked:
    """A base for rules that can tell why they had nothing to check."""

    name: ClassVar[str]
    needs: ClassVar[str] = "nothing was sampled"  # what is said where `has_looked` was never set
    only_sampled: ClassVar[bool] = True  # `look` is not called with steps that were not sampled, which have no rows
    has_looked = False

    @property
    def unchecked(self) -> str | None:
        """Why nothing was checked, or None."""
        return None if self.has_looked else self.needs


class OfLosses(Checked):
    """A base for rules that look at the loss of every step: they have not checked it where many were not seen.

    `look` has to begin with `self.count(step)`.
    """

    only_sampled = False
    steps = unseen = 0

    def count(self, step: Step) -> None:
        """Note whether the loss of a step was seen."""
        self.steps += bool(step.optimizers)
        self.unseen += bool(step.optimizers) and step.loss is None

    @property
    def unchecked(self) -> str | None:
        """Why not all was checked, or None."""
        if self.has_looked and self.unseen > 0.05 * self.steps:
            return f"the loss of {self.unseen:,} of {self.steps:,} steps was not seen"
        return super().unchecked


class Persistent:
    """Counts how often something held in the last few looks: `so(key, holds)` is true from `many` of `of` on."""

    def __init__(self, many: int = 5, of: int = 8) -> None:
        self._many, self._of = many, of
        self._seen: dict[Hashable, deque[bool]] = {}
        self._done: set[Hashable] = set()

    def so(self, key: Hashable, holds: bool) -> bool:
        """Whether it is to be reported now; once for each key."""
        seen = self._seen.setdefault(key, deque(maxlen=self._of))
        seen.append(holds)
        if sum(seen) >= self._many and key not in self._done:
            self._done.add(key)
            return True
        return False


class PersistentRows:
    """`Persistent` for many rows at once; places that a step has no row for stay as they are."""

    def __init__(self, many: int = 5, of: int = 8) -> None:
        self._many, self._of = many, of
        self._seen = np.zeros((0, of), bool)  # by number of place: a ring
        self._next = np.zeros(0, np.int64)
        self._done = np.zeros(0, bool)

    def so(self, which: NDArray[np.int64], holds: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Those rows that are to be reported now; each place once."""
        if not len(which):
            return which
        self._grow(int(which.max()) + 1)
        self._seen[which, self._next[which]] = holds
        self._next[which] = (self._next[which] + 1) % self._of
        if not holds.any():
            return which[:0]
        new = (self._seen[which].sum(1) >= self._many) & ~self._done[which]
        self._done[which[new]] = True
        return np.flatnonzero(new)

    def _grow(self, size: int) -> None:
        more = size - len(self._done)
        if more > 0:
            self._seen = np.concatenate([self._seen, np.zeros((more, self._of), bool)])
            self._next = np.concatenate([self._next, np.zeros(more, np.int64)])
            self._done = np.concatenate([self._done, np.zeros(more, bool)])
