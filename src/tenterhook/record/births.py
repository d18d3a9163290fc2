"""Losses and gradients that are not finite, in every step: where the first of them was made.

The loss is looked at when a backward pass begins on it, and the gradients just before an optimizer steps: the
parameters are still those of the step, so that it can be run again, slowly, and told which operation it was.
"""

import itertools
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenterhook.birth.birth import Birth
from tenterhook.birth.capsule import save
from tenterhook.birth.made import as_real
from tenterhook.birth.replay import Backward, Replayed, RootCall, replay
from tenterhook.errors import TenterhookError
from tenterhook.platform.foreach import foreach_norm
from tenterhook.platform.frames import frame_here
from tenterhook.platform.fsdp import local_part
from tenterhook.record.guard import Guard
from tenterhook.record.holders import callers
from tenterhook.record.models import Models
from tenterhook.record.optimizers import parameters_of
from tenterhook.record.surroundings import versions
from tenterhook.say import file_here

_OF_MODEL = ("input", "parameter", "buffer")  # what is bad when it comes in, and is in a capsule
_TRIES = 3  # bad steps that are run again, where the first could not be
_MOST_CALLERS = 6  # functions that lead to backward()
_MOST_CALLS = 64  # of models, that one step remembers
_MOST_FORWARDS = 16  # those of them that no backward pass has followed yet


class Births:
    """Looks at every loss and all gradients, until the first birth has been found."""

    def __init__(self, guard: Guard, models: Models, capsule: Path | None) -> None:
        self._guard, self._models, self._capsule = guard, models, capsule
        self._calls: list[RootCall] = []
        self._before = 0  # how many of them are from before the last backward pass
        self._backward: Backward | None = None
        self._replayed: Replayed | None = None
        self._tries = _TRIES
        self._elsewhere = False  # whether the last loss was on a device that is not looked at

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is about to be called with these."""
        if not self._tries or self._elsewhere or not torch.is_grad_enabled():
            return
        self._calls.append(RootCall.now(module, args, kwargs, frame_here(2)))
        if len(self._calls) - self._before > _MOST_FORWARDS:  # an evaluation that forgot no_grad, most likely
            del self._calls[self._before]
        elif len(self._calls) > _MOST_CALLS:
            del self._calls[0]
            self._before -= 1

    def pass_begins(self, loss: Tensor | None, scaled: bool) -> None:
        """A backward pass begins on this loss."""
        if not self._tries:
            return
        self._before = len(self._calls)
        self._elsewhere = loss is not None and not self._is_looked_at(loss)
        if self._elsewhere:
            return
        self._backward = Backward.now(itertools.islice(callers(frame_here(1)), _MOST_CALLERS))
        if loss is not None and not math.isfinite(value := loss.item()) and not (scaled and math.isinf(value)):
            self._find()

    def step_begins(self, optimizer: Optimizer, scaled: bool) -> None:
        """An optimizer is about to step; where a GradScaler is used, it has looked at the gradients itself."""
        if not self._tries or scaled:
            return
        # Of one that is sharded, what is here: to gather it would wait for other processes.
        found = [p.grad if (part := local_part(p.grad)) is None else part for p in parameters_of(optimizer)]
        if _any_bad([one for one in found if one is not None and self._is_looked_at(one)]):
            self._find()

    def _is_looked_at(self, tensor: Tensor) -> bool:
        """What a GPU computes would be waited for in every step: only where the bad step is wanted."""
        return tensor.device.type == "cpu" or self._capsule is not None

    def step_ended(self) -> Replayed | None:
        """What a replay has shown in the step that ends; the next one begins."""
        replayed, self._replayed = self._replayed, None
        self._calls, self._before, self._backward = [], 0, None
        return replayed

    def _find(self) -> None:
        if self._replayed is not None:
            return  # the loss was bad: so are the gradients
        is_later = self._tries < _TRIES
        self._tries -= 1
        several = len(self._models.all) > 1
        models = [(model.name if several else "", module) for model, module in self._alive()]
        with self._guard.asleep():
            self._replayed = replay(self._calls, self._backward, models)
        if self._replayed.birth is not None or self._replayed.elsewhere:
            self._tries = 0
        if is_later and _is_a_consequence(self._replayed):
            self._replayed = None
            return
        if self._capsule is not None and not self._replayed.elsewhere:
            self._replayed = replace(self._replayed, capsule=self._save_to(self._capsule, self._replayed, models))

    def _save_to(self, file: Path, replayed: Replayed, models: list[tuple[str, nn.Module]]) -> str:
        """Write the step; a sentence about that."""
        named = [(name or "model", model) for name, model in models]
        try:
            save(file, self._calls, named, str(replayed.birth or replayed.note), versions())
        except (TenterhookError, OSError, ImportError) as error:
            return f"the step could not be saved: {error}"
        return _how_to_replay(file_here(str(file)), replayed.birth)

    def _alive(self) -> Iterator[tuple[Any, nn.Module]]:
        for model in self._models.all:
            module = model.module()
            if module is not None:
                yield model, module


def _how_to_replay(capsule: str, birth: Birth | None) -> str:
    """A sentence on the file that a step was saved to: how to run it again, where that would show the birth."""
    if birth is not None and not (birth.address or birth.operation.startswith(_OF_MODEL)):
        return f"the models of this step are in {capsule}, but not the loss, which made it"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    model = [f"{file_here(script)}:FACTORY", *sys.argv[1:]] if script else ["FILE.py:FACTORY"]
    command = shlex.join(["tenterhook", "replay", capsule, *model])
    return f"`{command}` runs it again, where FACTORY is a function of that file which builds the model"


def _is_a_consequence(replayed: Replayed) -> bool:
    """Whether it came of a bad step before this one, which has been told of: the optimizer wrote it into a weight."""
    return replayed.birth is not None and replayed.birth.received and replayed.birth.operation.startswith("parameter")


def _any_bad(gradients: list[Tensor]) -> bool:
    """Whether any of them is not finite: a norm is finite only where all values are."""
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for one in gradients:
        if one.layout is torch.strided:
            by_device[one.device].append(as_real(one))
    for group in by_device.values():
        norms = torch.stack(foreach_norm(group, 2)).tolist()
        bad = [one for one, norm in zip(group, norms, strict=True) if not math.isfinite(norm)]
        if any(not bool(one.isfinite().all()) for one in bad):  # a norm may overflow by itself
            return True
    return False
