"""What a loss is measured against, and how often each label came: for rules about losses."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.rules.thresholds import MOVING_CALLS, MOVING_SHARE
from tenterhook.record.step import Step
from tenterhook.record.terms import Term

Key = tuple[str, int]  # a loss function, and over how many classes


class Target:
    """Says whether a loss has a target that moves while the model learns, so that it may rise where all is well.

    Labels of a data set stay as they are. What a network gives, the returns of a policy and an opponent that learns do
    not. That cannot be seen, but what goes with it can: models called without gradients beside those of a policy or of
    values, several losses, several optimizers.
    """

    def __init__(self) -> None:
        self._steps = self._silent = self._calls_without = self._calls = self._backwards = 0
        self._against = 0  # steps in which several optimizers had a loss of their own
        self._has_values = self._has_more = False
        self._weighted = _Spread()

    def see(self, step: Step) -> None:
        """To be called with every step, once: the judge does."""
        if not step.backwards:
            return
        without, calls = step.forwards
        self._steps += 1
        self._silent += without > 0
        self._calls_without += without
        self._calls += calls
        self._backwards += step.backwards
        self._against += len(step.losses) > 1
        self._has_values |= any(term.family == "values" for term in step.terms)
        self._has_more |= step.has_more
        if len(step.terms) == 1 and not step.has_more and step.loss is not None:
            self._weighted.add(step.loss, step.terms[0])

    @property
    def is_contested(self) -> bool:
        """Whether optimizers work against one another, as those of a GAN do."""
        return self._against > MOVING_SHARE * self._steps

    @property
    def moves(self) -> str:
        """Why it is thought to move; empty where it does not."""
        if self.is_contested:
            return "several optimizers, each with a loss of its own"
        if not (self._has_values or self._has_more or self._weighted.is_wide):
            return ""
        if self._silent > MOVING_SHARE * self._steps or self._calls_without > 0.5 * self._steps:
            return "models are called without gradients between the steps, so its target seems to move"
        if self._has_values and self._has_more:
            return "several losses are added up, and not all have labels for targets"
        if self._has_more and self._calls >= MOVING_CALLS * self._backwards:
            return "a model is called many times for each loss, as to play, so its target seems to move"
        return ""


class _Spread:
    """Whether a loss is more than a fixed multiple of its term, or of the sum of that: each label has a weight."""

    def __init__(self) -> None:
        self._ratios: list[tuple[float, float]] = []

    def add(self, loss: float, term: Term) -> None:
        if term.mean and term.many and math.isfinite(loss / term.mean) and len(self._ratios) < 32:
            self._ratios.append((loss / term.mean, loss / (term.mean * term.many)))

    @property
    def is_wide(self) -> bool:
        return all(max(one) - min(one) > 0.1 * max(map(abs, one)) for one in zip(*self._ratios, strict=True)) and bool(
            self._ratios
        )


class Labels:
    """How often each label came in all samples so far, for each loss function."""

    def __init__(self) -> None:
        self.all: dict[Key, NDArray[np.float64]] = {}

    def add(self, step: Step) -> Iterator[tuple[Key, Term]]:
        """Count those of a step; of the calls of one function their sum is one term."""
        for key in dict.fromkeys((term.function, term.classes) for term in step.terms if term.plain):
            term = together([term for term in step.terms if (term.function, term.classes) == key and term.plain])
            known = self.all.get(key)
            self.all[key] = term.labels if known is None else known + term.labels
            yield key, term


def together(terms: Sequence[Term]) -> Term:
    """Several calls of one function as one."""
    if len(terms) == 1:
        return terms[0]
    counts = np.array([term.many for term in terms])
    mean = float((counts * [term.mean for term in terms]).sum() / max(counts.sum(), 1e-12))
    worst = {name: max(getattr(term, name) for term in terms) for name in ("most", "off_one", "off_log")}
    least = {name: min(getattr(term, name) for term in terms) for name in ("least", "leak")}
    labels = np.sum([term.labels for term in terms], 0)
    return terms[0]._replace(mean=mean, many=float(counts.sum()), labels=labels, **worst, **least)
