"""What both compute in float64: it tells rounding, which all but vanishes there, from everything else."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tenterhook.comparing.apart import Apart
from tenterhook.comparing.conditions import double, float64
from tenterhook.comparing.in_turn import Modules, Two, run
from tenterhook.comparing.source import Key

_VANISHES = 1e-9  # of the largest value: float32 leaves 1e-7, float64 1e-16


class Truth:
    """How far apart they are in float64, and how far each is from its own float64."""

    def __init__(self, apart: dict[Key, Apart], a: dict[Key, Apart], b: dict[Key, Apart]) -> None:
        self._apart, self._a, self._b = apart, a, b

    def is_rounding(self, key: Key) -> bool | None:
        """Whether a difference is rounding alone; None where it is not known."""
        found = self._apart.get(key)
        if found is None or found.what:
            return None
        return found.largest <= _VANISHES * max(found.scale, 1e-30)

    def wrong(self, key: Key) -> tuple[float, float] | None:
        """How far a and b are from float64, in units of their own precision."""
        a, b = self._a.get(key), self._b.get(key)
        return None if a is None or b is None else (a.units, b.units)


def truth(two: Two, inner: Sequence[str]) -> Truth:
    """Run both in float64, and each beside its own."""
    assert two.a is not None
    a, b = _double(two.a), _double(two.b)
    inputs_a, inputs_b = double(two.inputs_a), double(two.inputs_b)
    both = replace(two, a=a, b=b, inputs_a=inputs_a, inputs_b=inputs_b)
    plain = replace(two.condition, view=None)
    beside_a = replace(two, b=two.a, a=a, inputs_a=inputs_a, inputs_b=two.inputs_a, condition=plain, layouts={})
    beside_b = replace(two, a=b, inputs_a=inputs_b, condition=plain, layouts={})
    found: list[dict[Key, Apart]] = []
    for one, force in ((both, True), (beside_a, False), (beside_b, False)):
        outcome = run(one, force=force, inner=inner)
        found.append({each.key: each.apart for each in outcome.found})
    return Truth(*found)


def _double(modules: Modules) -> dict[str, Any]:
    """The modules of a copy in float64, by the same names."""
    whole = modules["."]
    places = {id(module): name for name, module in whole.named_modules()}
    copy = dict(float64(whole).named_modules())
    return {name: copy[places[id(module)]] for name, module in modules.items() if id(module) in places}
