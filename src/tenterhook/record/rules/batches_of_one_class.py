"""Batches whose labels are all the same, as sorted data gives."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import Key, Labels
from tenterhook.record.step import Step
from tenterhook.record.terms import entropy


class BatchesOfOneClass(Checked):
    """The entropy of a batch's labels is below a quarter of that of all labels so far, on average."""

    name = "batches of one class"
    needs = f"fewer than {t.ONE_CLASS_BATCHES} batches of labels of several classes were sampled"

    def __init__(self) -> None:
        self._labels = Labels()
        self._entropies: dict[Key, list[float]] = defaultdict(list)
        self._told: set[Key] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each loss function once."""
        for key, term in self._labels.add(step):
            total = float(term.labels.sum())
            if term.classes < 2 or term.many < t.ONE_CLASS_LABELS or total <= 0 or step.target.moves:
                continue
            entropies, labels = self._entropies[key], self._labels.all[key]
            entropies.append(entropy(term.labels / total))
            whole = entropy(labels / labels.sum())
            if len(entropies) < t.ONE_CLASS_BATCHES or whole < t.ONE_CLASS_ENTROPY:
                continue
            self.has_looked = True
            mean = fmean(entropies)
            if mean < t.ONE_CLASS_RATIO * whole and key not in self._told:
                self._told.add(key)
                text = f"the entropy of a batch's labels is {mean:.2g} on average, that of all labels {whole:.2g}"
                why = "each step teaches the model to forget the other classes"
                then = "shuffle: DataLoader(…, shuffle=True), or shuffle the list of examples before it is cut up"
                yield Finding(self.name, "warn", step.number, text, None, why, then)
