"""BatchNorm in the wrong mode while training."""

from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Step


class BatchNormMode(Checked):
    """In eval mode in a training step, where it was in training mode before: a train() is missing after validation."""

    name = "BatchNorm mode"
    needs = "no BatchNorm was called"

    def __init__(self) -> None:
        self._trained: set[tuple[str, str]] = set()
        self._found = False

    def look(self, step: Step) -> Iterator[Finding]:
        """Once; that it was never in training mode is a note, for it may be frozen on purpose."""
        if not step.training:
            return
        self.has_looked = True
        self._trained |= {site for site, training in step.training.items() if training}
        wrong = [site for site, training in step.training.items() if not training]
        if self._found or not wrong:
            return
        changed = [site for site in wrong if site in self._trained]
        first = (changed or wrong)[0]
        place = next((p for p in step.rows.places if (p.model, p.site) == first), None)
        trainable = any((p.model, p.site) == (first[0], f"{first[1]}.weight") and p.trainable for p in step.parameters)
        if changed:
            self._found = True
            text = f"{len(changed)} BatchNorm in eval mode in a training step, and in training mode before"
            why = "it normalises with old averages, and no longer updates them"
            yield Finding(self.name, "warn", step.number, text, place, why, "call model.train() after validation")
        elif trainable and not self._trained and step.number >= 8:
            self._found = True
            text = f"{len(wrong)} BatchNorm in eval mode since the start, with weights that are trained"
            then = "call model.train() before training; if they are frozen on purpose, freeze their weights too"
            yield Finding(self.name, "note", step.number, text, place, "its averages are never updated", then)
