"""What both compute in float64: it tells rounding, which all but vanishes there, from everything else."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tenterhook.addresses.modules import own_tensors
from tenterhook.comparing.apart import Apart
from tenterhook.comparing.conditions import double, float64
from tenterhook.comparing.in_turn import Modules, Two, run
from tenterhook.comparing.source import Key
from tenterhook.values.tree import Path, leaves, rebuild_live

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
        """How far a and b are from float64, at most."""
        a, b = self._a.get(key), self._b.get(key)
        return None if a is None or b is None else (a.largest, b.largest)


def truth(two: Two, inner: Sequence[str]) -> Truth:
    """Run both in float64, and each beside its own."""
    assert two.a is not None
    a, b = _double(two.a), _double(two.b)
    _undo_casts(two.a, two.b, a, b)
    inputs_a, inputs_b = double(two.inputs_a), _inputs(two)
    both = replace(two, a=a, b=b, inputs_a=inputs_a, inputs_b=inputs_b)
    plain = replace(two.condition, view=None)
    beside_a = replace(two, b=two.a, a=a, inputs_a=inputs_a, inputs_b=two.inputs_a, condition=plain, layouts={})
    beside_b = replace(two, a=b, inputs_a=inputs_b, condition=plain, layouts={})
    found: list[dict[Key, Apart]] = []
    for one, force in ((both, True), (beside_a, False), (beside_b, False)):
        outcome = run(one, force=force, inner=inner)
        found.append({each.key: each.apart for each in outcome.found})
    return Truth(*found)


def _undo_casts(a: Modules, b: Modules, a64: Modules, b64: Modules) -> None:
    """What b has of a in another dtype counts as what a has: that it was rounded is rounding, too."""
    with torch.no_grad():
        for name, module in a.items():
            for kind in ("parameter", "buffer"):
                theirs, made = own_tensors(b[name], kind), own_tensors(b64[name], kind)
                for part, tensor in own_tensors(module, kind).items():
                    other = theirs.get(part)
                    if tensor is not None and other is not None and _is_cast(tensor, other):
                        made[part].copy_(own_tensors(a64[name], kind)[part])


def _inputs(two: Two) -> Any:
    mine = dict(leaves(two.inputs_a))

    def change(path: Path, tensor: Tensor) -> Tensor:
        return mine[path] if path in mine and _is_cast(mine[path], tensor) else tensor

    return double(rebuild_live(two.inputs_b, change))


def _is_cast(a: Tensor, b: Tensor) -> bool:
    return a.dtype != b.dtype and a.shape == b.shape and torch.equal(a.to(b.device, b.dtype), b)


def _double(modules: Modules) -> dict[str, Any]:
    """The modules of a copy in float64, by the same names."""
    whole = modules["."]
    places = {id(module): name for name, module in whole.named_modules()}
    copy = dict(float64(whole).named_modules())
    return {name: copy[places[id(module)]] for name, module in modules.items() if id(module) in places}
