"""GradScalers: the scale of a backward pass, and the steps that are left out."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tenterhook.platform.scalers import has_overflowed, note_scale, noted_scale, scale_of
from tenterhook.record.guard import Guard, guarded
from tenterhook.record.measuring import Measuring


class Scalers:
    """Tells of steps that are left out, and notes scales with the micro-batches."""

    def __init__(self, guard: Guard, measuring: Measuring, left_out: Callable[[Optimizer], None]) -> None:
        self.guard = guard
        self._measuring = measuring
        self.scale: Tensor | None = None  # that of the last backward pass, if a scaler had one for it
        self._any = False  # whether there was any
        self._left_out = left_out

    @guarded
    def scaled(self, scaler: Any, output: Any) -> None:
        """A scaler has scaled something: a loss, most likely."""
        scale = scale_of(scaler)
        if scale is not None:
            self._any = True
            self.use(scale)
            note_scale(output, scale)

    @guarded
    def may_have_left_out(self, optimizer: Any, state: Any) -> None:
        """An optimizer that a scaler was to step has not: because gradients had overflowed?"""
        if isinstance(optimizer, Optimizer) and has_overflowed(state):
            self._left_out(optimizer)

    def scale_of(self, outputs: Sequence[Any]) -> Tensor | None:
        """By what the outputs of a backward pass were scaled."""
        return noted_scale(outputs) if self._any else None

    def use(self, scale: Tensor | None) -> None:
        """What comes next is scaled by this; a micro-batch keeps its first one."""
        if not self._measuring.micro.scaler:
            self.scale = scale

    def note(self) -> None:
        """What comes in this micro-batch is scaled."""
        micro = self._measuring.micro
        if self.scale is not None and not micro.scaler:
            micro.scaler = id(self.scale)
            micro.scalars.add("scale", self.scale)

    def note_after(self) -> None:
        """The scale may have fallen since: that, too, tells of a step that was left out."""
        micro = self._measuring.micro
        if self.scale is not None and micro.scaler == id(self.scale):
            micro.scalars.add("scale after", self.scale)
