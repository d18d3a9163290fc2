"""What an optimizer steps with: gradients of a new backward pass, or some that it or another one has used before."""

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from tenterhook.platform.modes import unrecorded
from tenterhook.record.gather import has_values
from tenterhook.record.models import Models
from tenterhook.record.numbers import Scalars
from tenterhook.record.optimizers import KnownOptimizer, parameters_of
from tenterhook.record.step import Turn
from tenterhook.values.tree import version_of

_VALUES = 256  # of a gradient that are looked at
BY_HAND = 0  # instead of the order of an optimizer, where there is none


class Kept:
    """A gradient that was stepped with, and whether backward passes add to it.

    Set to zero or to None, exchanged or written into between them, it is no longer that gradient.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._mark, self.is_there = self._look(), True
        self.has_grown = False
        self.size: Tensor | None = None  # of some of its values, when the first of the passes began

    def gradient(self) -> Tensor | None:
        """The first there is now."""
        return next((p.grad for p in self._parameters() if p.grad is not None), None)

    @property
    def is_old(self) -> bool:
        """Whether passes have added to it as it was."""
        return self.is_there and self.has_grown

    def is_same(self) -> bool:
        """Whether it is the same tensor, whatever was written into it."""
        return self._mark is not None and self._mark[0] == self._look()[0]

    def begins(self) -> None:
        """A backward pass begins."""
        grad = self.gradient()
        self.is_there = self.is_there and grad is not None and self._look() == self._mark
        if self.is_there and grad is not None and self.size is None:
            with torch.no_grad(), unrecorded():  # `p.grad.data.zero_()` leaves no other trace
                self.size = grad.detach().reshape(-1)[:_VALUES].double().abs().sum()

    def ended(self) -> None:
        """It is over."""
        if self.is_there:
            now = self._look()
            self.has_grown |= now != self._mark
            self._mark = now

    def _look(self) -> tuple[int, int]:
        grad = self.gradient()
        return (0, 0) if grad is None else (id(grad), version_of(grad))


class Turns:
    """Told of backward passes and of steps, in this order."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._passes = 0
        self._since: list[KnownOptimizer] = []  # those that have stepped since a pass began
        self._kept: dict[int, Kept] = {}  # by optimizer
        self._versions: list[int] = []  # of all parameters, after the last pass of a training by hand

    def pass_begins(self) -> None:
        """A backward pass that reaches what is trained."""
        self._passes += 1
        self._since.clear()
        for kept in self._kept.values():
            kept.begins()

    def pass_ended(self) -> None:
        """It is over."""
        for kept in self._kept.values():
            kept.ended()

    def before_step(self, optimizer: Optimizer, known: KnownOptimizer, scalars: Scalars, sampled: bool) -> list[Turn]:
        """An optimizer is about to step; what is to be told of it, in a sampled step."""
        is_new = known.passes != self._passes
        kept = self._kept.pop(known.order, None)
        repeats = kept is not None and known.had_pass and not is_new and kept.is_same()
        known.passes, known.had_pass = self._passes, is_new
        if kept is not None and is_new:
            _tell(scalars, known.order, kept)
        return [Turn(known.order, repeats, self._stepped_twice(optimizer, known))] if sampled else []

    def after_step(self, optimizer: Optimizer, known: KnownOptimizer, sampled: bool) -> None:
        """It has stepped."""
        if known not in self._since:
            self._since.append(known)
        if sampled:
            reference = weakref.ref(optimizer)
            self._keep(known.order, lambda: () if (one := reference()) is None else parameters_of(one))

    def after_pass_by_hand(self, scalars: Scalars) -> None:
        """Where parameters are changed without an optimizer, a pass is a step's end if they have changed before it."""
        kept, versions = self._kept.pop(BY_HAND, None), [version_of(p) for p in self._all_parameters()]
        if kept is not None and versions != self._versions:
            _tell(scalars, BY_HAND, kept)
        self._versions = versions
        self._keep(BY_HAND, self._all_parameters)

    def _all_parameters(self) -> Iterator[Tensor]:
        return (p for model in self._models.all for _, p in model.each_parameter())

    def _keep(self, number: int, parameters: Callable[[], Iterable[Tensor]]) -> None:
        grad = next((p.grad for p in parameters() if p.grad is not None), None)
        if type(grad) is Tensor and grad.layout is torch.strided and has_values(grad):
            self._kept[number] = Kept(parameters)

    def _stepped_twice(self, optimizer: Optimizer, known: KnownOptimizer) -> tuple[str, str] | None:
        """A parameter that another optimizer has stepped since the last pass, or that this one has twice."""
        mine = [p for p in parameters_of(optimizer) if p.grad is not None]
        others = [one.parameters for one in self._since if one is not known and not one.wraps]
        seen: set[int] = set()
        for p in mine:
            if id(p) in seen or any(id(p) in one for one in others):
                return self._named(p)
            seen.add(id(p))
        return None

    def _named(self, parameter: Tensor) -> tuple[str, str]:
        known = self._models.parameter(parameter)
        return ("optimizer", "") if known is None else known[:2]


def _tell(scalars: Scalars, number: int, kept: Kept) -> None:
    nothing = torch.zeros((), dtype=torch.float32, device="cpu")
    scalars.add(("old gradient", number), kept.size if kept.size is not None and kept.is_old else nothing)
