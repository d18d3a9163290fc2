"""Backward passes: those that reach what is trained, and what they were called on.

torch's function that starts them is wrapped. One that C++ code starts is seen only by the gradients of a sampled step.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tenterhook.platform.engine import Asked, leaves_of
from tenterhook.platform.frames import frame_here
from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.optimizers import is_stepping
from tenterhook.record.events import Backward, Event, Raised
from tenterhook.record.guard import Guard, guarded
from tenterhook.record.sources.scalers import Scalers


class TakesPasses(Protocol):
    """Who is told of backward passes."""

    def is_trained(self, leaf: Tensor) -> bool:
        """Whether a pass that reaches this leaf counts."""
        ...

    def is_asked(self, leaf: Tensor) -> bool:
        """Whether a pass of autograd.grad() that asks for the gradient of this leaf counts."""
        ...

    def after_backward(self, asked: dict[int, Tensor]) -> None:
        """A pass that counts has run; these gradients were asked for, by the ids of the leaves."""
        ...

    def feed(self, event: Event) -> None:
        """Something else has happened."""
        ...

    def take_backward(self, event: Backward, loss: Tensor | None, scale: Tensor | None) -> None:
        """A pass has begun, on this loss, which was scaled by this."""
        ...


@dataclass(slots=True)
class _Pass:
    asked: Asked
    in_step: bool
    number: int = 0  # once it is told of


class Passes:
    """The backward passes that run now, one in each thread at most; others within them belong to them."""

    def __init__(
        self, guard: Guard, scalers: Scalers, stepping: Callable[[], Collection[int]], taker: TakesPasses
    ) -> None:
        self.guard = guard
        self._scalers, self._stepping, self._taker = scalers, stepping, taker
        self._numbers = itertools.count(1)
        self._running: dict[int, _Pass] = {}  # by thread
        self._task = -1  # of autograd's: the last one in which a gradient came
        self._measures = False  # whether gradients of it are measured
        self._last_loss: Callable[[], Any] = lambda: None  # itself it would keep its graph alive
        self._losses = 0

    @guarded
    def begins(self, asked: Asked, within: bool) -> None:
        """A backward pass is about to run, maybe within another, such as that of a re-entrant checkpoint."""
        if within:
            outer = self._current()
        else:
            in_step = bool(self._stepping()) and is_stepping(frame_here(3))
            outer = self._running[threading.get_ident()] = _Pass(asked, in_step)
        if outer is None or outer.number:
            return
        counts = self._taker.is_trained if outer.asked.accumulates else self._taker.is_asked
        for leaf in leaves_of(asked):
            if counts(leaf):
                self._tell(outer)
                return

    @guarded
    def returned(self, given: Any) -> None:
        """The one in this thread has run, and gave this."""
        one = self._running.get(threading.get_ident())
        if one is not None and one.number:
            inputs = () if one.asked.accumulates else one.asked.inputs
            self._taker.after_backward({id(leaf): g for leaf, g in zip(inputs, given or (), strict=False)})

    @guarded
    def raised(self) -> None:
        """The one in this thread has raised: its loss does not count."""
        one = self._running.get(threading.get_ident())
        if one is not None and one.number:
            self._taker.feed(Raised(one.number))

    def ended(self) -> None:
        """The one in this thread is over."""
        self._running.pop(threading.get_ident(), None)

    def measures(self, task: int) -> bool:
        """Whether gradients that come in this task of autograd are measured: those of autograd.grad() are not."""
        if task != self._task:
            self._task, self._measures = task, self._look_at(task)
        return self._measures

    def _look_at(self, task: int) -> bool:
        running = self._current()
        if running is None:  # C++ code has begun it
            self._taker.take_backward(Backward(next(self._numbers)), None, self._scalers.scale)
            return True
        if running.asked.accumulates and not running.number:
            self._tell(running)
        return running.number > 0

    def _current(self) -> _Pass | None:
        """That of this thread; on a GPU gradients come in a thread of autograd's, and another one waits for it."""
        here = self._running.get(threading.get_ident())
        return here if here is not None else next(iter(self._running.values()), None)

    def _tell(self, one: _Pass) -> None:
        one.number = next(self._numbers)
        outputs = one.asked.outputs
        loss = loss_of(outputs)
        event = Backward(one.number, self._number_of(loss), in_step=one.in_step)
        self._taker.take_backward(event, loss, self._scalers.scale_of(outputs))

    def _number_of(self, loss: Tensor | None) -> int | None:
        if loss is None:
            return None
        if self._last_loss() is not loss:
            self._last_loss = weakref.ref(loss)
            self._losses += 1
        return self._losses


def loss_of(outputs: Sequence[Any]) -> Tensor | None:
    """The scalar that a pass was called on. Of several it is their sum, for that is what the gradient is of."""
    for one in outputs:
        if not isinstance(one, Tensor) or is_of_transform(one) or one.numel() != 1 or one.is_complex():
            return None
    if len(outputs) == 1:
        return outputs[0]
    if not outputs or any(one.device != outputs[0].device for one in outputs):
        return None
    return torch.stack([one.detach().view(()) for one in outputs]).sum()
