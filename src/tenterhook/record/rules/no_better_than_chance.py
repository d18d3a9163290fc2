"""A model that has learnt how often each label is, and nothing else."""

from collections import deque
from collections.abc import Iterator
from statistics import fmean

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules import thresholds as t
from tenterhook.record.rules._loss import Key, Labels, Target
from tenterhook.record.step import Step
from tenterhook.record.terms import Term, best_guess


class NoBetterThanChance(Checked):
    """After 300 steps (1,000 for a language model) the loss is still what the labels alone allow, and does not fall.

    That is their entropy for classes, as their labels were counted so far; for a mean squared error their variance,
    of which it is not known whether there is more to learn.
    """

    name = "no better than chance"
    only_sampled = False
    needs = f"no loss function of torch's had labels in {t.CHANCE_STEPS} steps with a loss"

    def __init__(self) -> None:
        self._labels, self._target = Labels(), Target()
        self._means: dict[Key, deque[float]] = {}
        self._steps = 0
        self._rate = 0.0  # the highest
        self._since_higher = 0  # steps
        self._told: set[Key] = set()

    @property
    def unchecked(self) -> str | None:
        """Why nothing was checked, or None."""
        return self._target.moves or super().unchecked

    def look(self, step: Step) -> Iterator[Finding]:
        """Each loss function once."""
        self._target = step.target
        self._steps += step.loss is not None
        self._follow_rate(step)
        if not step.terms:
            return
        for key, term in self._labels.add(step):
            means = self._means.setdefault(key, deque(maxlen=2 * t.CHANCE_SAMPLES))
            if self._steps > t.CHANCE_FROM:
                means.append(term.mean)
            enough = t.CHANCE_STEPS if term.classes < t.CHANCE_WORDS else t.CHANCE_STEPS_OF_WORDS
            warm = self._since_higher > t.CHANCE_FROM
            if self._steps >= enough and len(means) == means.maxlen and warm and not self._target.moves:
                self.has_looked = True
                if key not in self._told:
                    yield from self._judge(step, key, term)

    def _follow_rate(self, step: Step) -> None:
        """While the learning rate rises, a model need not have learnt much."""
        highest = max(step.rates, default=0.0)
        self._since_higher += 1
        if highest > self._rate:
            self._since_higher, self._rate = 0, highest

    def _judge(self, step: Step, key: Key, term: Term) -> Iterator[Finding]:
        guess = best_guess(term, self._labels.all[key])
        means = [*self._means[key]]
        before, last = fmean(means[: t.CHANCE_SAMPLES]), fmean(means[t.CHANCE_SAMPLES :])
        near = guess is not None and t.CHANCE_SHARE * guess <= last <= t.CHANCE_ABOVE * guess
        if not guess or not near or last < (1 - t.CHANCE_FALL) * before:
            return
        self._told.add(key)
        what = "variance" if term.family == "values" else "entropy"
        text = f"{term.function} {last:.3g} after {self._steps} steps, where the {what} of the labels is {guess:.3g}"
        why = "to always guess how often each label comes would do as well: the inputs tell the model nothing"
        then = "see whether inputs and labels belong together (shuffled apart?), and whether the inputs reach the model"
        yield Finding(self.name, "note" if what == "variance" else "warn", step.number, text, None, why, then)
