"""What is known of every parameter beside its numbers: whether it gets gradients, and from whom its changes come.

Of all models that an optimizer trains, or that get gradients. A mark is a number that changes with the values.
"""

import torch
from torch import Tensor, nn

from tenterhook.platform.modes import unrecorded
from tenterhook.record.gather import has_values
from tenterhook.record.models import Models
from tenterhook.record.numbers import Scalars
from tenterhook.record.optimizers import Known, Optimizers
from tenterhook.record.step import Parameter

_OFTEN, _SELDOM = 32, 10  # they are asked for at the first samples of an optimizer, then at every tenth
_VALUES = 64  # of a parameter that are in its mark


class Facts:
    """Asked for just before an optimizer steps, while its step is sampled."""

    def __init__(self, models: Models, optimizers: Optimizers) -> None:
        self._models, self._optimizers = models, optimizers
        self._known: list[Parameter] = []

    def look(self, known: Known, step: int, scalars: Scalars) -> list[Parameter]:
        """What is known of the parameters now; the marks of those that nothing seems to train go to the scalars."""
        known.samples += 1
        if known.samples > _OFTEN and known.samples % _SELDOM:
            return []
        rates, moved = self._optimizers.rates(look=step in (1, 10)), self._optimizers.trained()
        found = []
        for model in self._models.all:
            module = model.module()
            training = module is None or module.training
            each = [(site, p) for site, p in model.each_parameter() if not isinstance(p, nn.UninitializedParameter)]
            if any(p.grad is not None or id(p) in known.parameters for _, p in each):
                facts = [
                    Parameter(
                        model.name,
                        site,
                        p.requires_grad,
                        p.grad is not None,
                        rates.get(id(p)),
                        p.numel(),
                        id(p) in moved,
                        training,
                    )
                    for site, p in each
                ]
                found += facts
                for one, (_, p) in zip(facts, each, strict=True):
                    if one.trainable and not (one.has_gradient and one.steps and one.rate):
                        add_mark(scalars, (one.model, one.site), p)
        if found != self._known:  # else the former ones are kept: Python's garbage collection looks through new ones
            self._known = found
        return self._known


def add_mark(scalars: Scalars, key: tuple[str, str], parameter: Tensor) -> None:
    """Have a number on the host that tells of changes; not of what all ranks would have to read together."""
    if type(parameter.data) is not Tensor or not parameter.is_floating_point() or not has_values(parameter):
        return
    with torch.no_grad(), unrecorded():
        values = parameter.detach().reshape(-1)
        some = values[:: max(1, values.numel() // _VALUES)][:_VALUES]
        scalars.add(("mark", *key), some.double().sum())
