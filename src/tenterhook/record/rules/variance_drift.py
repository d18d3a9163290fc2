"""Activations that shrink or grow from layer to layer, at the start."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import by_model, steepest
from tenterhook.record.step import Rows, Step

_FACTOR = 100.0


class VarianceDrift(Checked):
    """At the first step: the std of what layers with weights give differs by 100 from the first ones to the last.

    The first one is left out, for it has the scale of the data, and so is the very last, which is often made small on
    purpose; layers that start at zero are too.
    """

    name = "activation variance drifts with depth"
    needs = "no model with five or more layers of weights was sampled at its first step"

    def __init__(self) -> None:
        self._models: set[str] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each model at its first sample; each way to an output by itself."""
        new = [chain for chain in by_model(step.chains) if chain[0][0] not in self._models]
        if not new:
            return
        outputs = step.of("output")
        at = {(p.model, p.site): i for i, p in enumerate(outputs.places) if p.kind.startswith(("Linear", "Conv"))}
        for which in dict.fromkeys(tuple(at[layer] for layer in chain if layer in at) for chain in new):
            yield from self._compare(step, outputs.where(np.array(which[:-1], np.int64)))
        self._models |= {chain[0][0] for chain in new}

    def _compare(self, step: Step, rows: Rows) -> Iterator[Finding]:
        rows = rows.where((rows.std > 0) & (rows.infinite == 0))
        if len(rows) < 4:
            return
        self.has_looked = True
        std = rows.std
        quarter = max(1, (len(std) - 1) // 4)
        first, last = (float(np.exp(np.log(some).mean())) for some in (std[1 : 1 + quarter], std[-quarter:]))
        if max(last / first, first / last) > _FACTOR:
            way = "grows" if last > first else "shrinks"
            most = steepest(std[1:] if last > first else 1 / std[1:])
            text = f"the std of outputs {way} from {first:.1e} in the first layers to {last:.1e} in the last; most here"
            why = "gradients will vanish or explode on the way back"
            then = "initialise for the activation that is used (kaiming_normal_), or add normalisation"
            yield Finding(self.name, "warn", step.number, text, rows.places[most + 2], why, then)
