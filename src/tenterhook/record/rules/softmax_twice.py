"""Probabilities where a loss function expects logits."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules._loss import Labels
from tenterhook.record.rules.thresholds import PROBABILITIES_OFF, ROWS_SEEN
from tenterhook.record.step import Step
from tenterhook.record.terms import Term


class SoftmaxTwice(Checked):
    """The inputs of a cross entropy are rows that sum to one, or those of a binary one come from a sigmoid."""

    name = "softmax twice"
    needs = "the loss is no cross_entropy, nor a binary_cross_entropy_with_logits"

    def __init__(self) -> None:
        self._often = Persistent(ROWS_SEEN, ROWS_SEEN)

    def look(self, step: Step) -> Iterator[Finding]:
        """Each loss function once."""
        for key, term in Labels().add(step):
            if term.function in _EXPECT_LOGITS and term.classes > 1:
                self.has_looked = True
                if self._often.so(key, _are_probabilities(term)):
                    yield self._finding(step, term)

    def _finding(self, step: Step, term: Term) -> Finding:
        made = "a softmax" if term.family == "classes" else "a sigmoid"
        text = f"what {term.function} was given are probabilities, from {term.least:.2g} to {term.most:.2g}"
        why = f"it applies {made} by itself: after two of them gradients are small, and the loss stays far above zero"
        then = f"leave {made} out of the model, and give the loss function the logits"
        return Finding(self.name, "warn", step.number, text, None, why, then)


_EXPECT_LOGITS = ("cross_entropy", "binary_cross_entropy_with_logits")


def _are_probabilities(term: Term) -> bool:
    """Small logits may all be from 0 to 1, too; they do not sum to one, and no sigmoid has made them."""
    known = term.made_by.startswith("Sigmoid") if term.family == "binary" else term.off_one < PROBABILITIES_OFF
    return known and term.least >= 0 and term.most <= 1 + PROBABILITIES_OFF
