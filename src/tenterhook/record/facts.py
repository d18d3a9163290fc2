"""What is known of every parameter beside its numbers: whether it gets gradients, and from whom its changes come.

Of all models that an optimizer trains, or that get gradients. A mark is a number that changes with the values.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tenterhook.platform.modes import unrecorded
from tenterhook.record.gather import some_values
from tenterhook.record.model import Model
from tenterhook.record.models import Models
from tenterhook.record.numbers import Scalars
from tenterhook.record.optimizers import KnownOptimizer, Optimizers
from tenterhook.record.step import Parameter

_OFTEN, _SELDOM = 32, 10  # they are asked for at the first samples of an optimizer, then at every tenth
_VALUES = 64  # of a parameter that are in its mark


class Facts:
    """Asked for just before an optimizer steps, while its step is sampled."""

    def __init__(self, models: Models, optimizers: Optimizers) -> None:
        self._models, self._optimizers = models, optimizers
        self._known: list[Parameter] = []

    def look(self, known: KnownOptimizer, step: int, scalars: Scalars) -> list[Parameter]:
        """What is known of the parameters now; the marks of those that nothing seems to train go to the scalars."""
        known.samples += 1
        if known.samples > _OFTEN and known.samples % _SELDOM:
            return []
        rates, trained = self._optimizers.rates(look=step in (1, 10)), self._optimizers.trained()
        found = []
        for model, site, p in self._concerned(known):
            fact = _fact(model, site, p, rates.get(id(p)), trained)
            found.append(fact)
            if fact.trainable and not (fact.has_gradient and fact.steps and fact.rate):
                _add_mark(scalars, (model.name, site), p)
        if found != self._known:  # else the former ones are kept: Python's garbage collection looks through new ones
            self._known = found
        return self._known

    def _concerned(self, known: KnownOptimizer) -> Iterator[tuple[Model, str, Tensor]]:
        """All parameters of the models that this optimizer trains, or that get gradients."""
        for model in self._models.all:
            each = [*model.each_parameter()]
            if any(p.grad is not None or id(p) in known.parameters for _, p in each):
                yield from ((model, site, p) for site, p in each)


def _fact(model: Model, site: str, p: Tensor, rate: float | None, trained: set[int]) -> Parameter:
    module = model.module()
    is_training = module is None or module.training
    graded = p.grad is not None
    return Parameter(
        model.name, site, p.requires_grad, graded, rate, p.numel(), id(p) in trained, is_training, identity=id(p)
    )


def _add_mark(scalars: Scalars, key: tuple[str, str], parameter: Tensor) -> None:
    """Have a number on the host that tells of changes."""
    with torch.no_grad(), unrecorded():
        if (some := some_values(parameter, _VALUES)) is not None:
            scalars.add(("mark", *key), some.double().sum())
