"""BatchNorm in the wrong mode while training."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import place_of
from tenterhook.record.step import Step

_SAMPLES = 8


class BatchNormMode(Checked):
    """In eval mode in a training step, where it was in training mode before: a train() is missing after validation.

    Only where a gradient comes by, its model is trained, and its weights are not frozen: a teacher may have been
    trained before, and is not now.
    """

    name = "BatchNorm mode"
    needs = "no BatchNorm was called"

    def __init__(self) -> None:
        self._trained: set[tuple[str, str]] = set()
        self._samples = 0
        self._found = False

    def look(self, step: Step) -> Iterator[Finding]:
        """Once; that it was never in training mode is a note, for it may be frozen on purpose."""
        if not step.training or self._found:
            return
        self.has_looked = True
        self._samples += 1
        self._trained.update(site for site, training in step.training.items() if training)
        wrong = _in_eval_mode(step)
        changed = [site for site in wrong if site in self._trained]
        if changed:
            yield self._changed(step, changed)
        elif not self._trained and self._samples >= _SAMPLES and self._is_trainable(step, wrong):
            yield self._never_on(step, wrong)

    def _changed(self, step: Step, sites: list[tuple[str, str]]) -> Finding:
        self._found = True
        text = f"{len(sites)} BatchNorm in eval mode in a training step, and in training mode before"
        why = "it normalises with old averages, and no longer updates them"
        then = "call model.train() after validation; if you froze them on purpose, all is well"
        return Finding(self.name, "warn", step.number, text, place_of(*sites[0], step), why, then)

    def _never_on(self, step: Step, sites: list[tuple[str, str]]) -> Finding:
        self._found = True
        text = f"{len(sites)} BatchNorm in eval mode since the start, with weights that are trained"
        then = "call model.train() before training; if they are frozen on purpose, freeze their weights too"
        why = "its averages are never updated"
        return Finding(self.name, "note", step.number, text, place_of(*sites[0], step), why, then)

    def _is_trainable(self, step: Step, sites: list[tuple[str, str]]) -> bool:
        return any(step.rate.get((model, f"{site}.weight")) for model, site in sites)


def _in_eval_mode(step: Step) -> list[tuple[str, str]]:
    """Those that a gradient comes by, of models whose parameters get some; all, where no gradients were recorded."""
    sites = [site for site, training in step.training.items() if not training and site not in step.frozen]
    reached = {(place.model, place.site) for place in step.of("output_grad").places} or set(sites)
    trained = {place.model for place in step.of("parameter_grad").places} or {model for model, _ in sites}
    return [site for site in sites if site in reached and site[0] in trained]
