"""Which line of a module's forward makes the difference."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tenterhook.comparing.apart import Apart, apart
from tenterhook.comparing.following import Following, Found
from tenterhook.comparing.in_turn import Two, run
from tenterhook.comparing.source import Event, Key
from tenterhook.comparing.tolerance import is_rounding


class Line(NamedTuple):
    """A value inside a forward that a does not have, and where b makes it."""

    inner: str  # its name in the forward
    source: str
    text: str
    apart: Apart


class _Looking(Following):
    """Compares by name; what has another name in a, by what it is."""

    def came(self, event: Event) -> object:
        if "#" not in event.key.role:
            return super().came(event)
        many = len(self.only_b)
        super().came(event)
        if len(self.only_b) > many:  # a has no value of this name
            self.only_b.pop()
            is_known = isinstance(event.value, Tensor) and self._is_known(event, event.value)
            missing = "" if is_known else "b alone"
            self.found.append(Found(event.key, Apart(), event.key.name, "", spot=event.spot, missing=missing))
        return None

    def _is_known(self, event: Event, value: Tensor) -> bool:
        """Whether a has it under another name, perhaps in another shape."""
        for other in self._source.passed(event.around[-1]) if event.around else ():
            a = other.value
            if isinstance(a, Tensor) and a.numel() == value.numel():
                a = a.reshape(value.shape) if a.shape != value.shape else a
                if is_rounding(apart(a, value), 1):
                    return True
        return False


def line_in(two: Two, name: str, call: int, until: Key, length: int) -> Line | None:
    """The first line of a module's own code that makes something else in b, before `until` shows it."""
    outcome = run(two, force=True, inner=[name], listener=_Looking)
    own = _before(outcome.found, name, call, until)
    for found in own:
        if not found.missing and not is_rounding(found.apart, length):
            return _line(found)
    unknown = next((found for found in own if found.missing), None)
    return None if unknown is None else _line(unknown)


def _before(found: Sequence[Found], name: str, call: int, until: Key) -> list[Found]:
    """The values inside one call that come before another value."""
    own = []
    for one in found:
        if one.key == until:
            break
        if "#" in one.key.role and one.key.name == name and one.key.call == call:
            own.append(one)
    return own


def _line(found: Found) -> Line:
    spot = found.spot
    inner = found.key.role.removesuffix("#0")
    return Line(inner, str(spot.source) if spot else "", str(spot.text) if spot else "", found.apart)
