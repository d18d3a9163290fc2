"""Activations that shrink or grow from layer to layer, at the start."""

from collections.abc import Iterator

import numpy as np

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step
from tenterhook.record.rules._depth import by_model, steepest

_FACTOR = 100.0


class VarianceDrift(Checked):
    """At the first step: the std of what layers with weights give differs by 100 from the first to the last but one."""

    name = "activation variance drifts with depth"
    needs = "no model with five or more layers of weights was sampled at its first step"

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each model at its first sample."""
        outputs = step.of("output")
        mask = np.array([p.kind.startswith(("Linear", "Conv")) for p in outputs.places], bool)
        for rows in by_model(outputs.where(mask)):
            model = rows.places[0].model
            if model in self._seen:
                continue
            self._seen.add(model)
            rows = rows.where(np.arange(len(rows)) < len(rows) - 1)  # the last one is made small on purpose
            if len(rows) < 4 or rows.infinite.any():
                continue
            self.has_looked = True
            std = rows.std
            factor = float(np.median(std[-2:]) / max(float(np.median(std[:2])), 1e-45))
            if factor > _FACTOR or factor < 1 / _FACTOR:
                how = f"grows {factor:.1e} times" if factor > 1 else f"shrinks to {factor:.1e}"
                text = f"std {how} from the first to the last layers; most after here"
                why = "gradients will vanish or explode on the way back"
                then = "initialise for the activation that is used (kaiming_normal_), or add normalisation"
                yield Finding(self.name, "warn", step.number, text, rows.places[steepest(std)], why, then)
