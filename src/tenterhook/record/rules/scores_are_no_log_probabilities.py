"""Scores where nll_loss expects logarithms of probabilities."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules._loss import Labels
from tenterhook.record.rules.thresholds import LOG_PROBABILITIES_OFF, ROWS_SEEN
from tenterhook.record.step import Step


class NoLogProbabilities(Checked):
    """The exponentials of the rows that nll_loss gets do not sum to one."""

    name = "scores are no log-probabilities"
    needs = "the loss is no nll_loss"

    def __init__(self) -> None:
        self._often = Persistent(ROWS_SEEN, ROWS_SEEN)

    def look(self, step: Step) -> Iterator[Finding]:
        """Once."""
        for (name, classes), term in Labels().add(step):
            if name != "nll_loss" or classes < 2:
                continue
            self.has_looked = True
            off = term.off_log > LOG_PROBABILITIES_OFF and not step.target.moves  # a policy's may have weights
            if self._often.so(name, off):
                text = f"the exponentials of a row sum to 1 × e^{term.off_log:.2g}, not to 1"
                if term.least >= 0 and term.most <= 1 and term.off_one < LOG_PROBABILITIES_OFF:
                    text = "it was given probabilities, not their logarithms"
                why = "nll_loss only picks the number of the right class, so the loss falls by making all scores larger"
                then = "use cross_entropy, or put log_softmax before it"
                yield Finding(self.name, "warn", step.number, text, None, why, then)
