"""A loss that can fall for ever: a wrong sign, or labels that a cross entropy is not made for."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import together
from tenterhook.record.step import Step
from tenterhook.record.terms import Term


class LossWithoutAFloor(Checked):
    """A cross entropy below zero; a loss function that is taken with a minus; or a loss that falls faster and faster.

    Not where several optimizers work against one another, nor where only an input is trained, as for an attack.
    """

    name = "loss without a floor"
    only_sampled = False
    needs = "no loss was seen: no backward() on a scalar"

    def __init__(self) -> None:
        self._below = self._minus = 0  # samples in a row
        self._first: float | None = None
        self._sum = 0.0  # of the losses of a window
        self._many = 0
        self._means: list[float] = []  # of the last windows
        self._told: set[str] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each of the three once."""
        loss = step.finite_loss
        if loss is None or step.target.is_contested:
            return
        self.has_looked = True
        if step.terms:
            yield from self._tell_once(step, "below zero", self._is_below(step.terms))
            yield from self._tell_once(step, "wrong sign", self._has_wrong_sign(step, loss))
        yield from self._tell_once(step, "without bound", self._is_unbound(loss))

    def _tell_once(self, step: Step, what: str, text: str) -> Iterator[Finding]:
        if text and not self._told:
            self._told.add(what)
            why = "the lower it is, the worse is the model"
            yield Finding(self.name, "warn", step.number, text, None, why, _THEN[what])

    def _is_below(self, terms: Sequence[Term]) -> str:
        low = next((one for one in terms if _is_entropy(one) and one.mean < t.FLOOR), None)
        self._below = self._below + 1 if low else 0
        return f"{low.function} {low.mean:.3g}, and it cannot be below zero" if low and self._below >= 3 else ""

    def _has_wrong_sign(self, step: Step, loss: float) -> str:
        """The loss is one loss function and nothing else, with a minus, and a model is trained by it."""
        names = {term.function for term in step.terms}
        term = together(step.terms) if len(names) == 1 and step.terms[0].plain else None
        if term is None or step.has_more or term.family == "binary" or not _trains_a_model(step):
            return ""
        self._minus = self._minus + 1 if term.mean * loss < 0 < abs(term.mean) else 0
        if self._minus < t.SIGN_SEEN or step.target.moves:
            return ""
        return f"loss {loss:.3g} where {term.function} is {term.mean:.3g}: it is taken with a minus"

    def _is_unbound(self, loss: float) -> str:
        """Windows of steps, each lower than the one before, and by more."""
        self._first = loss if self._first is None else self._first
        self._sum += loss
        self._many += 1
        if self._many < t.UNBOUND_WINDOW:
            return ""
        self._means = [*self._means[-3:], self._sum / self._many]
        self._sum, self._many = 0.0, 0
        falls = [before - after for before, after in pairwise(self._means)]
        faster = all(later > t.UNBOUND_GROWTH * earlier > 0 for earlier, later in pairwise(falls))
        low = self._means[-1] < -t.UNBOUND_TIMES * max(1.0, abs(self._first))
        if len(falls) < 3 or not faster or not low:
            return ""
        means = ", ".join(f"{mean:.3g}" for mean in self._means)
        return f"it falls faster and faster: {means}, each the mean of {t.UNBOUND_WINDOW} steps"


_THEN = {
    "below zero": "look at the targets: class numbers, or probabilities that are from 0 to 1 and sum to one",
    "wrong sign": "take the loss as it is: a loss function has its minus in it already",
    "without bound": "look for a wrong sign in the loss, or for a term that nothing holds back",
}


def _is_entropy(term: Term) -> bool:
    """Whether a term is a cross entropy; with scores that are no log-probabilities it is none."""
    return term.plain and term.classes > 1 and (term.function != "nll_loss" or term.off_log < t.LOG_PROBABILITIES_OFF)


def _trains_a_model(step: Step) -> bool:
    return not step.rate or any(rate for rate in step.rate.values())
