"""Losses and gradients that are not finite, in every step: where the first of them was made.

The loss is looked at when a backward pass begins on it, and the gradients just before an optimizer steps: the
parameters are still those of the step, so that it can be run again, slowly, and told which operation it was.
"""

import math
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenterhook.birth.replay import RootCall, Told, replay
from tenterhook.platform.frames import frame_here
from tenterhook.record.around import callers
from tenterhook.record.guard import Guard
from tenterhook.record.models import Models
from tenterhook.record.optimizers import parameters_of

_TRIES = 3  # bad steps that are run again, where the first could not be
_MOST_CALLS = 64  # of models, that one step remembers


class Births:
    """Looks at every loss and all gradients, until the first birth has been found."""

    def __init__(self, guard: Guard, models: Models) -> None:
        self._guard, self._models = guard, models
        self._calls: list[RootCall] = []
        self._backward: tuple[FrameType, int] | None = None
        self._told: Told | None = None
        self._tries = _TRIES

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is about to be called with these."""
        if self._tries and len(self._calls) < _MOST_CALLS and torch.is_grad_enabled():
            self._calls.append(RootCall.now(module, args, kwargs, frame_here(2)))

    def pass_begins(self, loss: Tensor | None, scaled: bool) -> None:
        """A backward pass begins on this loss."""
        if not self._tries:
            return
        caller = next(callers(frame_here(1)), None)
        self._backward = None if caller is None else (caller, caller.f_lineno)
        if loss is not None and not math.isfinite(value := loss.item()) and not (scaled and math.isinf(value)):
            self._find()

    def step_begins(self, optimizer: Optimizer, scaled: bool) -> None:
        """An optimizer is about to step; where a GradScaler is used, it has looked at the gradients itself."""
        if self._tries and not scaled and _any_bad([p.grad for p in parameters_of(optimizer) if p.grad is not None]):
            self._find()

    def step_ended(self) -> Told | None:
        """What a replay has shown in the step that ends; the next one begins."""
        told, self._told = self._told, None
        self._calls, self._backward = [], None
        return told

    def _find(self) -> None:
        if self._told is not None:
            return  # the loss was bad: so are the gradients
        self._tries -= 1
        names = [(f"{model.name}." if len(self._models.all) > 1 else "", module) for model, module in self._alive()]
        with self._guard.asleep():
            self._told = replay(self._calls, self._backward, names)
        if self._told.birth is not None:
            self._tries = 0

    def _alive(self) -> Iterator[tuple[Any, nn.Module]]:
        for model in self._models.all:
            module = model.module()
            if module is not None:
                yield model, module


def _any_bad(gradients: list[Tensor]) -> bool:
    """Whether any of them is not finite: a norm is finite only where all values are."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in gradients:
        if one.layout is torch.strided:
            by_device.setdefault(one.device, []).append(one)
    for some in by_device.values():
        norms = torch.stack(torch._foreach_norm(some, 2, torch.float32))
        if not math.isfinite(norms.sum().item()) and not all(bool(one.isfinite().all()) for one in some):
            return True
    return False
