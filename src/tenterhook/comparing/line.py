"""Which line of a module's forward makes the difference."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from tenterhook.comparing.align import is_below
from tenterhook.comparing.apart import SAME, Apart, apart
from tenterhook.comparing.following import Following, Found
from tenterhook.comparing.in_turn import Modules, Two, run
from tenterhook.comparing.source import Event, Key, Source, Stopped
from tenterhook.comparing.tolerance import is_rounding
from tenterhook.values.tree import leaves


class Line(NamedTuple):
    """A value inside a forward that a does not have, and where b makes it."""

    name: str  # of the module, in a; of one without a partner, as `extra` has it
    inner: str  # its name in the forward
    source: str
    text: str
    apart: Apart


class _Looking(Following):
    """Compares by name; what has another name in a, by what it is."""

    def __init__(self, source: Source, target: Key, until: Key, length: int, **options: Any) -> None:
        super().__init__(source, **options)
        self._target = target  # the output of the call that is looked into
        self._until = until
        self._length = length
        self._known: list[Tensor] = []  # what both have at the modules in that call

    def came(self, event: Event) -> Any:
        """A value of b came."""
        if "#" not in event.key.role:
            new = super().came(event)
            if event.key == self._until:
                raise Stopped  # all that is asked for is there
            if self._target in event.around or event.key == self._target._replace(role="in"):
                value = event.value if new is None else new
                self._known += [tensor.detach().clone() for _, tensor in leaves(value)]
            return new
        many = len(self.only_b)
        super().came(event)
        if len(self.only_b) > many:  # a has no value of this name
            self.only_b.pop()
            missing = "" if self._is_known(event.value) else "b alone"
            own = Found(event.key, SAME, event.key.name, around=event.around, spot=event.spot, missing=missing)
            self.found.append(own)
        return None

    def _is_known(self, value: Any) -> bool:
        """Whether a has it under another name, perhaps in another shape."""
        if not isinstance(value, Tensor):
            return True
        passed = [tensor for event in self._source.passed(self._target) for _, tensor in leaves(event.value)]
        alike = (a.reshape(value.shape) for a in (*passed, *self._known) if a.numel() == value.numel())
        return any(is_rounding(apart(a, value), self._length) for a in alike)


def line_in(two: Two, extra: tuple[Modules, Modules], target: Key, until: Key, length: int) -> Line | None:
    """The first line of a module's own code that makes something else in b, before `until` shows it.

    Modules outside of it are not listened to: it is given the inputs of a, whatever came before. `extra`: the modules
    inside it that have no partner, of a and of b; their code counts as its own.
    """
    assert two.a is not None
    inside = [name for name in two.a if name in (".", target.name) or is_below(name, target.name)]
    a, b = ({name: modules[name] for name in inside} for modules in (two.a, two.b))
    within = replace(two, a={**a, **extra[0]}, b={**b, **extra[1]})
    names = [target.name, *extra[0], *extra[1]]
    looking = partial(_Looking, target=target, until=until, length=length)
    outcome = run(within, force=True, inner=names, listener=looking)
    own = _before(outcome.found, target, until)
    for found in own:
        if not found.missing and not is_rounding(found.apart, length):
            return _line(found)
    unknown = next((found for found in own if found.missing), None)
    return None if unknown is None else _line(unknown)


def _before(found: Sequence[Found], target: Key, until: Key) -> list[Found]:
    """The values inside one call that come before another value."""
    own = []
    for one in found:
        if one.key == until:
            break
        if "#" in one.key.role and target in one.around:
            own.append(one)
    return own


def _line(found: Found) -> Line:
    spot = found.spot
    inner = found.key.role.removesuffix("#0")
    return Line(found.key.name, inner, str(spot.source) if spot else "", str(spot.text) if spot else "", found.apart)
