"""Targets that a model is given among its inputs."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import Key, Labels
from tenterhook.record.step import Step
from tenterhook.record.terms import Term, best_guess


class TargetsInTheInputs(Checked):
    """One column of the inputs is the target, or the same within each class; or the words to be told are those given.

    Where that is not so, a loss that is near zero within 30 steps is a note: the task may be that easy.
    """

    name = "targets in the inputs"
    only_sampled = False
    needs = "no loss function of torch's was called with labels"

    def __init__(self) -> None:
        self._often: dict[Key, int] = {}  # samples in a row
        self._first: dict[Key, float] = {}  # of the losses, as a share of that of guessing
        self._labels = Labels()
        self._steps = 0
        self._told: set[Key] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each loss function once."""
        self._steps += step.loss is not None
        if not step.terms:
            return
        for key, term in self._labels.add(step):
            self.has_looked = True
            if key in self._told or step.target.moves:
                continue
            self._often[key] = self._often.get(key, 0) + 1 if term.leak >= t.LEAK_SHARE else 0
            if self._often[key] >= t.LEAK_SEEN:
                text = "one number of the inputs goes with the target without fail, in each of the batches looked at"
                then = "take the target out of the inputs; words to be told have to be those that follow"
                yield self._finding(step, key, "warn", text, then)
            elif self._is_at_once(key, term):
                text = f"{term.function} is {term.mean:.2g} after {self._steps} steps already"
                then = "see whether the inputs tell the targets, or come after them; some tasks are that easy"
                yield self._finding(step, key, "note", text, then)

    def _finding(self, step: Step, key: Key, severity: str, text: str, then: str) -> Finding:
        self._told.add(key)
        why = "the model learns to copy, and knows nothing where it is not told the target"
        return Finding(self.name, severity, step.number, text, None, why, then)

    def _is_at_once(self, key: Key, term: Term) -> bool:
        guess = best_guess(term, self._labels.all[key])
        late = self._steps > t.AT_ONCE_STEPS or term.many < t.AT_ONCE_LABELS
        if late or not guess or term.family == "values" or term.smoothing:
            return False
        share = term.mean / guess
        return self._first.setdefault(key, share) > 0.5 and 0 <= share < t.AT_ONCE_SHARE
