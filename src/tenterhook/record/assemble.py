"""Where the steps of a training end, and which of its micro-batches count: events in, whole steps out. No torch here.

A part is what came since an optimizer last stepped, cut into micro-batches by the calls that follow a backward pass. A
step is made of the parts of all optimizers that step in turn: a GAN's two parts are one step. Without an optimizer,
every call of a model begins a step. Calls under no_grad are steps of a program that trains nothing; when a training
begins after all, they were none, and it begins at step 0.

    assembler = Assembler()
    for event in events:
        for step in assembler.feed(event):
            print(step.number, [micro.losses for part in step.parts for micro in part.micros])

Whoever measures can have it make its own kinds of parts and micro-batches, with what was measured in each.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from tenterhook.record.events import (
    Backward,
    ByHand,
    Called,
    Event,
    Finished,
    Joined,
    PartCalled,
    Raised,
    Ready,
    Skipped,
    Stepped,
    Stepping,
)

MOST_BEFORE = 1000  # steps that are taken back when a training begins: they are kept until then
MOST_MICROS = 1000  # micro-batches of a part; one that no optimizer ends is a step then


@dataclass(eq=False, slots=True)
class MicroBatch:
    """One forward and its backward passes."""

    called: bool = False  # whether a model was
    passes: dict[int, int | None] = field(default_factory=dict)  # by number, the loss that each adds, if it does
    skipped: bool = False  # whether a GradScaler has left out the step after it, of one optimizer or more

    @property
    def losses(self) -> list[int]:
        """The losses of its passes, each once."""
        return [loss for loss in self.passes.values() if loss is not None]


@dataclass(eq=False, slots=True)
class Part:
    """Everything since an optimizer last stepped."""

    is_first: bool = True  # of its step, as far as is known when it begins
    micros: list[MicroBatch] = field(default_factory=lambda: [MicroBatch()])
    keeps_last: bool = False  # whether losses before the last step that was left out count: another one was not


class WholeStep(NamedTuple):
    """The parts of one step."""

    number: int
    parts: Sequence[Part]
    trains: bool = True  # False for calls under no_grad before any training


class Assembler:
    """Cuts a stream of events into steps."""

    def __init__(
        self,
        has_optimizer: Callable[[bool], bool] = lambda trains: False,
        new_part: Callable[[bool], Part] = Part,
        new_micro: Callable[[], MicroBatch] = MicroBatch,
    ) -> None:
        self._asks_for_optimizer, self._new_part, self._new_micro = has_optimizer, new_part, new_micro
        self.number = 0
        self.trains = False  # whether a backward pass or an optimizer was seen
        self.by_hand = False  # whether parameters change without an optimizer, since one has stepped
        self.may_train = False  # whether the last call may begin a training
        self.without_gradients = False  # whether calls under no_grad count: where nothing is trained
        self.part = new_part(True)
        self.micro = self.part.micros[-1]
        # Optimizers that are stepping, or whose step has raised, and since when.
        self._ready: dict[int, MicroBatch] = {}
        self._optimizers: set[int] = set()
        self._usual: set[int] = set()  # those of the step before
        self._stepped: set[int] = set()  # those of this one
        self._left_out: set[int] = set()  # those whose turn it was, but a GradScaler has left it out
        self._parts: list[Part] = []
        self._whole: list[WholeStep] = []

    def feed(self, event: Event) -> list[WholeStep]:
        """The steps that end with an event."""
        self._handlers[type(event)](self, event)
        whole = self._whole
        if whole:
            self._whole = []
        return whole

    def optimizers_that_step(self) -> Collection[int]:
        """Those whose gradients are ready, and whose step has not returned; it may have raised."""
        return self._ready

    def is_stepping(self, optimizer: int) -> bool:
        """Whether a step of this optimizer will count: none that it wraps has stepped for it."""
        return optimizer in self._ready and optimizer in self._optimizers

    @property
    def has_unfinished(self) -> bool:
        """Whether something has happened that belongs to no step yet."""
        micro = self.micro
        return bool(micro.passes or (self.without_gradients and micro.called))

    @property
    def awaits_optimizer(self) -> bool:
        """Whether an optimizer makes the steps, which may not have stepped yet."""
        return not self.by_hand and (self.has_optimizers or self._asks_for_optimizer(self.trains))

    @property
    def has_optimizers(self) -> bool:
        """Whether any has stepped."""
        return bool(self._optimizers)

    def _begin_training(self) -> None:
        if self.trains:
            return
        self.trains, self.without_gradients = True, False
        if self.number < MOST_BEFORE:
            self.number = 0

    def _called(self, event: Called) -> None:
        self.may_train = event.trains and not self.trains
        if not event.trains and not self.without_gradients:
            if self.trains or self.awaits_optimizer:
                return
            self.without_gradients = True
        if self.has_unfinished and not self.awaits_optimizer:
            self._end_part()
            self._end_step()
            self._begin_part()
        elif self.micro.passes:
            self._begin_micro()
        self.micro.called = True

    def _part_called(self, event: PartCalled) -> None:
        if self.micro.passes:
            self._begin_micro()

    def _backward(self, event: Backward) -> None:
        self._begin_training()
        micro = self.micro
        counts = not (self._ready and event.in_step)  # of a closure that is called several times, the first one does
        is_new = event.loss not in micro.losses[-1:]
        micro.passes[event.number] = event.loss if counts and is_new else None

    def _raised(self, event: Raised) -> None:
        self.micro.passes.pop(event.number, None)

    def _changed_by_hand(self, event: ByHand) -> None:
        self.by_hand = True

    def _joined(self, event: Joined) -> None:
        if not self._optimizers:  # if the others do not take turns with it, that is soon known
            self._usual = set(event.others)
        for gone in event.replaces:
            self._optimizers.discard(gone)
            if gone in self._stepped:  # it had its turn
                self._end_step()
            self._usual.discard(gone)
        self._optimizers.add(event.optimizer)
        self._usual.add(event.optimizer)
        self._begin_training()

    def _stepping(self, event: Stepping) -> None:
        raised = self._ready.pop(event.optimizer, None)
        micros = self.part.micros
        if raised is not None and raised in micros[:-1]:  # what led to the step that raised is over
            del micros[: micros.index(raised) + 1]

    def _is_ready(self, event: Ready) -> None:
        self._ready[event.optimizer] = self.micro
        self.by_hand = False

    def _step_returned(self, event: Stepped) -> None:
        optimizer, counts = event.optimizer, self.is_stepping(event.optimizer)
        self._ready.pop(optimizer, None)
        if not counts:
            return
        if optimizer in self._stepped:
            self._end_step()
        self._left_out.discard(optimizer)
        self.part.keeps_last = bool(self._left_out)
        self._end_part()
        self._stepped.add(optimizer)
        if self._all_had_turns():
            self._end_step()
        self._begin_part()

    def _skipped(self, event: Skipped) -> None:
        self.micro.skipped = True
        if event.optimizer is None:
            return
        self._left_out.add(event.optimizer)
        if self._usual and self._left_out >= self._usual:  # nobody has stepped
            self._left_out = set()
        elif self._stepped and self._all_had_turns():
            self._end_part()
            self._end_step()
            self._begin_part()

    def _finished(self, event: Finished) -> None:
        unfinished = self.has_unfinished
        if unfinished and not self._stepped:
            self.part.keeps_last = True
            self._end_part()
        if unfinished or self._stepped:
            self._end_step()

    def _all_had_turns(self) -> bool:
        return self._stepped | self._left_out >= self._usual

    def _begin_micro(self) -> None:
        self._left_out &= self._optimizers  # of others it is not known whether they step in turn
        if len(self.part.micros) >= MOST_MICROS:
            self._end_part()
            self._end_step()
            self._begin_part()
            return
        self.micro = self._new_micro()
        self.part.micros.append(self.micro)

    def _begin_part(self) -> None:
        self.part = self._new_part(not self._stepped)
        self.micro = self.part.micros[-1]

    def _end_part(self) -> None:
        self._parts.append(self.part)

    def _end_step(self) -> None:
        self._whole.append(WholeStep(self.number, self._parts, self.trains))
        if self._stepped:
            self._usual = self._stepped | self._left_out
        self._stepped, self._left_out, self._parts = set(), set(), []
        self.number += 1

    _handlers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Called: _called,
        PartCalled: _part_called,
        Backward: _backward,
        Raised: _raised,
        ByHand: _changed_by_hand,
        Joined: _joined,
        Stepping: _stepping,
        Ready: _is_ready,
        Stepped: _step_returned,
        Skipped: _skipped,
        Finished: _finished,
    }


def first_that_count(part: Part, left_out: Sequence[bool]) -> tuple[int, int]:
    """The first micro-batch of a part whose gradients count, and the first whose loss does.

    A part is one or more attempts at a step: each but the last ended with a step that was left out. The gradients and
    the losses of the last one count; where it has no backward pass, since another optimizer stepped after that of the
    attempt before, so do the losses of that one.
    """
    attempts = [0, *(i + 1 for i, was in enumerate(left_out) if was)]  # where each begins
    gradients_from = losses_from = attempts[-1]
    if part.keeps_last and len(attempts) > 1 and not any(micro.passes for micro in part.micros[gradients_from:]):
        losses_from = attempts[-2]
    return gradients_from, losses_from
