"""The optimizers of a training: which of them count, which take turns, and which only have another one step."""

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tenterhook.platform.optimizers import all_optimizers, is_stepping
from tenterhook.record.events import Joined
from tenterhook.record.models import Models
from tenterhook.record.weights import Weights
from tenterhook.values.tree import version_of


class KnownOptimizer:
    """What is known of one optimizer."""

    def __init__(self, number: int) -> None:
        self.number = number  # in events: by when it was first seen
        self.wraps = False  # whether it only has another optimizer step
        self.at_begin: tuple[int, list[int]] = (-1, [])  # if so, of its last step: a count of all, and its versions
        self.weights: Weights | None = None  # once it has stepped
        self.order = 0  # in a Step: 1 for the first that has stepped, then 2 and so on
        self.parameters: frozenset[int] = frozenset()  # the ids of those that it trains
        self.samples = 0  # how many of its steps were sampled
        self.passes = 0  # backward passes until its last step
        self.had_pass = False  # whether any came between its last step and the one before


class Optimizers:
    """All that were seen; those that step now and then are active, until another one takes their parameters."""

    def __init__(self, models: Models) -> None:
        self.only: Optimizer | None = None
        self.everything = False  # whether those of unknown parameters count, too
        self._models = models
        self._known: weakref.WeakKeyDictionary[Optimizer, KnownOptimizer] = weakref.WeakKeyDictionary()
        self._active: dict[int, weakref.ref[Optimizer]] = {}  # by number
        self.stepped = 0  # how many have
        self._numbers = itertools.count(1)
        self._there: dict[bool, bool] = {}  # whether there was one, before the training and when it had begun
        self._others: list[weakref.ref[Optimizer]] = []

    def known(self, optimizer: Optimizer) -> KnownOptimizer | None:
        """What is known of an optimizer."""
        return self._known.get(optimizer)

    def add(self, optimizer: Optimizer) -> KnownOptimizer:
        """What is known of an optimizer, which has a number from now on."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = KnownOptimizer(next(self._numbers))
        return known

    def counts(self, optimizer: Optimizer, known: KnownOptimizer | None) -> bool:
        """Whether the steps of an optimizer count, of which this is known."""
        if known is not None and (known.wraps or known.number in self._active):
            return not known.wraps
        if self.only is not None:
            return optimizer is self.only
        if self.everything or not self._models.all:
            return True
        return any(self._models.parameter(p) for p in parameters_of(optimizer))

    def join(self, optimizer: Optimizer, known: KnownOptimizer) -> Joined | None:
        """Make an optimizer active: None if it was."""
        if known.number in self._active:
            return None
        others: frozenset[int] = frozenset()
        if not self._active:  # those that step in turn with it, as a GAN's do
            others = frozenset(
                self.add(other).number for other in all_optimizers() if self.counts(other, self.known(other))
            )
        known.parameters = frozenset(map(id, parameters_of(optimizer)))
        replaces = tuple(number for number, one in self._active.items() if self._is_replaced(one(), known))
        for number in replaces:
            del self._active[number]
        self._active[known.number] = weakref.ref(optimizer)
        return Joined(known.number, others, replaces)

    def note_wrappers(self, optimizer: Optimizer, stepping: Iterable[int], frame: FrameType) -> None:
        """Others that are stepping, with the same parameters, only wrap this one: they do not count from now on."""
        first, mine = next(parameters_of(optimizer), None), self._known[optimizer].number
        for number in [number for number in stepping if number != mine and number in self._active]:
            other = self._active[number]()
            if other is not None and any(p is first for p in parameters_of(other)) and is_stepping(frame, other):
                self._known[other].wraps = True

    def _is_replaced(self, optimizer: Optimizer | None, by: KnownOptimizer) -> bool:
        """Whether an optimizer is gone, or another one has all of its parameters and no more, or is what it wraps."""
        if optimizer is None:
            return True
        known = self._known[optimizer]
        return known.wraps or by.parameters == set(map(id, parameters_of(optimizer)))

    def train(self, parameter: Tensor) -> bool:
        """Whether an active optimizer has this parameter."""
        return any(id(parameter) in parameters for parameters in self._parameters_of_active())

    def trained(self) -> set[int]:
        """The ids of all parameters that active optimizers have."""
        return {key for parameters in self._parameters_of_active() for key in parameters}

    def _parameters_of_active(self) -> Iterator[frozenset[int]]:
        alive = (one for reference in self._active.values() if (one := reference()) is not None)
        return (self._known[one].parameters for one in alive)

    def are_there(self, trains: bool) -> bool:
        """Whether there is an optimizer at all, which may not have stepped yet: looked for once before the training
        and once when it has begun.
        """
        if trains not in self._there:
            self._there[trains] = any(True for _ in all_optimizers())
        return self._there[trains]

    def rates(self, *, look: bool) -> dict[int, float]:
        """The learning rate of every parameter that an optimizer has, by id.

        Those that have not stepped yet, and may never, are looked for when asked, which takes a while.
        """
        if look:
            self._others = [weakref.ref(optimizer) for optimizer in all_optimizers()]
        references = (*self._others, *self._active.values())
        groups = [group for one in references if (found := one()) is not None for group in found.param_groups]
        return {id(p): rate for group in groups for rate in (rate_of(group),) for p in group["params"]}


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all its groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def versions_of(optimizer: Optimizer) -> list[int]:
    """The versions of its parameters."""
    return [version_of(p) for p in parameters_of(optimizer)]


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group; some optimizers find their own."""
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    rate = rate.detach() if isinstance(rate, Tensor) else rate
    return math.nan if rate is None else float(rate)
