"""Probabilities where a loss function expects logits."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import Labels
from tenterhook.record.step import Step
from tenterhook.record.terms import Term


class SoftmaxTwice(Checked):
    """The inputs of a cross entropy are rows that sum to one, and those of one with logits are all from 0 to 1."""

    name = "softmax twice"
    needs = "the loss is no cross_entropy, nor a binary_cross_entropy_with_logits"

    def __init__(self) -> None:
        self._often: dict[str, int] = {}  # by function: samples in a row
        self._labels: dict[str, float] = {}  # in these
        self._told: set[str] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each loss function once."""
        for (name, classes), term in Labels().add(step):
            if name in _EXPECTS and classes > 1:
                self.has_looked = True
                holds = _are_probabilities(term)
                self._often[name] = self._often.get(name, 0) + 1 if holds else 0
                self._labels[name] = self._labels.get(name, 0.0) + term.many if holds else 0.0
                samples, labels = _EXPECTS[name]
                if self._often[name] >= samples and self._labels[name] >= labels and name not in self._told:
                    self._told.add(name)
                    yield self._finding(step, term)

    def _finding(self, step: Step, term: Term) -> Finding:
        made = "a softmax" if term.family == "classes" else "a sigmoid"
        text = f"what {term.function} was given are probabilities, from {term.least:.2g} to {term.most:.2g}"
        why = f"it applies {made} by itself: after two of them gradients are small, and the loss stays far above zero"
        then = f"leave {made} out of the model, and give the loss function the logits"
        return Finding(self.name, "warn", step.number, text, None, why, then)


# Samples in which that has to hold, and with how many labels.
_EXPECTS = {
    "cross_entropy": (t.ROWS_SEEN, 0),
    "binary_cross_entropy_with_logits": (t.LOGITS_SEEN, t.LOGITS_VALUES),
}


def _are_probabilities(term: Term) -> bool:
    sums_to_one = term.family == "binary" or term.off_one < t.PROBABILITIES_OFF
    return sums_to_one and term.least >= 0 and term.most <= 1 + t.PROBABILITIES_OFF
