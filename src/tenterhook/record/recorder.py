"""The recorder: has the sources tell the assembler what happens, and measures what belongs to each of its steps.

    sources (hooks of torch) → events → Assembler → the parts of whole steps ┐
    sources (hooks on values) → Measuring → what was measured in each part   ┴→ Outbox → Step → log and rules

`sources/wrapped.py` lists what of torch is wrapped meanwhile. An error of ours switches the recorder off.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.hook_tables import begin_hiding, end_hiding
from tenterhook.platform.optimizers import found_inf, look_for_optimizers, unscales
from tenterhook.record import events
from tenterhook.record.assemble import Assembler, WholeStep
from tenterhook.record.births import Births
from tenterhook.record.by_hand import ByHand
from tenterhook.record.events import Backward, Called, Event, Finished, Ready
from tenterhook.record.facts import Facts
from tenterhook.record.guard import Guard
from tenterhook.record.measuring import Measuring
from tenterhook.record.models import MOST_MODELS, Models
from tenterhook.record.optimizers import KnownOptimizer, Optimizers, parameters_of, rate_of
from tenterhook.record.outbox import Outbox
from tenterhook.record.parts import Part, Pending
from tenterhook.record.places import KINDS, Places
from tenterhook.record.schedule import Schedule
from tenterhook.record.snapshots import Snapshots
from tenterhook.record.sources import wrapped
from tenterhook.record.sources.backward import Passes
from tenterhook.record.sources.clipping import Clipping, Dropouts
from tenterhook.record.sources.discovery import Discovery
from tenterhook.record.sources.layers import LayerOrder
from tenterhook.record.sources.losses import Losses
from tenterhook.record.sources.outputs import Hub
from tenterhook.record.sources.scalers import Scalers
from tenterhook.record.sources.steps import Steps
from tenterhook.record.step import Step
from tenterhook.record.turns import Turns
from tenterhook.record.weights import Weights


class Recorder:
    """Watches a training, from `install` to `remove`; `take` gets every step, `complain` an error of ours."""

    def __init__(
        self,
        take: Callable[[Step], None],
        complain: Callable[[str], None],
        schedule: Schedule,
        what: Iterable[str] = KINDS,
        selectors: tuple[str, ...] = (),
        snapshots: Snapshots | None = None,
        capsule: Path | None = None,
    ) -> None:
        self.models = Models(selectors)
        self.schedule = schedule
        self._selects = bool(selectors)
        self._complain = complain
        self._optimizers = Optimizers(self.models)
        self._turns = Turns(self.models)
        self._facts = Facts(self.models, self._optimizers)
        self._measuring = Measuring(what)
        self._assembler = Assembler(self._optimizers.are_there, self._measuring.new_part, self._measuring.new_micro)
        self.by_hand = ByHand(self.models, self.places, self._measuring.what)
        self._outbox = Outbox(take, self.places)
        self._guard = guard = Guard(self._failed)
        self._births = Births(guard, self.models, capsule)
        stepping = self._assembler.optimizers_that_step
        self._steps = Steps(guard, self._optimizers, stepping, self)
        self._scalers = Scalers(guard, self._measuring, self._steps.left_out)
        passes = Passes(guard, self._scalers, stepping, self)
        self._losses = Losses(guard, self._measuring)
        others = Dropouts(guard, self._measuring), Clipping(guard, self._measuring)
        self._listeners = wrapped.Listeners(self._steps, self._scalers, passes, self._losses, *others, guard)
        self._layers = LayerOrder()
        self._discovery = Discovery(
            Hub(guard, self._measuring, passes, self.feed, self._layers, self._births, snapshots), self.models
        )
        self._installed = False
        self._start = self._mark = time.perf_counter()

    @property
    def places(self) -> Places:
        """All places so far."""
        return self._measuring.places

    @property
    def steps(self) -> int:
        """How many there were."""
        return self._assembler.number

    @property
    def optimizers(self) -> int:
        """How many have stepped."""
        return self._optimizers.stepped

    @property
    def awaits_optimizer(self) -> bool:
        """Whether there is an optimizer, and none has stepped: all that comes is one step, which does not end."""
        return self._assembler.awaits_optimizer and not self._assembler.has_optimizers

    @property
    def failed(self) -> str | None:
        """Which error of ours has ended the recording."""
        return self._guard.error

    @property
    def fused(self) -> bool:
        """Whether values were not seen, inside of layers that torch fuses."""
        return self._discovery.hooks.fused.happened

    def install(
        self,
        models: Iterable[tuple[str, nn.Module]] = (),
        optimizer: Optimizer | None = None,
        discover: bool = False,
    ) -> None:
        """Place the hooks: on these models, or on whatever is called."""
        self._guard.on = self._installed = True
        begin_hiding(self)
        self._optimizers.only, self._optimizers.everything = optimizer, discover
        if not discover:  # else the program is yet to begin
            look_for_optimizers()
        self._steps.listen()
        wrapped.listen(self._listeners)
        _forked.add(self)
        self._discovery.install(models, discover)
        self._start = self._mark = time.perf_counter()
        self._begin_part(self._measuring.part)

    def remove(self) -> None:
        """Take away every hook."""
        self._guard.on = False
        with self._guard.lock, contextlib.ExitStack() as stack:  # another thread may be in a hook
            stack.callback(self._steps.remove)
            stack.callback(wrapped.stop, self._listeners)
            for handle in (*self._discovery.handles(), *self._measuring.part.handles):
                stack.callback(handle.remove)
            stack.callback(self._discovery.take_off)
            if self._installed:
                self._installed = False
                stack.callback(end_hiding, self)
        _forked.discard(self)

    def finish(self) -> None:
        """The training is over: hand on the steps that are left, and what belongs to none, and take away every hook."""
        if self._guard.on:
            try:
                self.by_hand.measure_update(self._measuring.micro.sample.gather)
                if self._assembler.has_unfinished:
                    self._scalers.note_after()
                    self._measuring.micro.settle()
                self.feed(Finished())
                self._outbox.hand_on(wait=True)
            except Exception as error:
                self.fail(error)
        self.remove()

    def fail(self, error: BaseException) -> None:
        """An error of ours: record no more, and say so once. Never raises."""
        self._guard.fail(error)

    def _failed(self, error: str) -> None:
        with contextlib.suppress(Exception):
            self._discovery.take_off()  # the hooks of optimizers stay for now: torch may be going through them
        with contextlib.suppress(Exception):
            self._outbox.hand_on(wait=True)  # the steps before it are whole
        with contextlib.suppress(Exception):  # stderr can be closed or full, too
            self._complain(error)

    def forget(self) -> None:
        """In a forked process: not a word of it is recorded."""
        self._guard.on = False

    # From the sources.

    def feed(self, event: Event) -> None:
        """Something has happened: end the steps that end with it, and have what comes belong to what begins."""
        measuring = self._measuring
        part, micro = measuring.part, measuring.micro
        if isinstance(event, Called):
            self.by_hand.measure_update(micro.sample.gather)
        whole = self._assembler.feed(event)
        if measuring.micro is not micro:
            micro.settle()
        for step in whole:
            self._end_step(step)
        if measuring.part is not part:
            self._begin_part(part)
        measuring.without_gradients = self._assembler.without_gradients

    def is_trained(self, leaf: Tensor) -> bool:
        """Whether a backward pass that reaches this leaf counts."""
        if self.models.parameter(leaf) is not None or self._optimizers.train(leaf):
            return True
        return self._optimizers.everything and isinstance(leaf, nn.Parameter)

    def take_backward(self, event: Backward, loss: Tensor | None, scale: Tensor | None) -> None:
        """A backward pass has begun, on this loss, which was scaled by this."""
        if self.by_hand.notices(self._assembler.has_optimizers):
            self.feed(events.ByHand())
        self._scalers.use(scale)
        self._births.pass_begins(loss, scale is not None)
        self._turns.pass_begins()
        self.feed(event)
        micro = self._measuring.micro
        if loss is None or event.loss not in micro.losses[-1:]:
            return
        self._scalers.note()
        micro.scalars.add(("loss", event.loss), loss)
        if scale is not None:
            micro.scalars.add(("scale", event.loss), scale)
        self._losses.reached(loss)
        if self._measuring.sampled:
            micro.sample.chains += self._layers.chains(loss)

    def is_asked(self, leaf: Tensor) -> bool:
        """Whether it counts that the gradient of this leaf is asked for: where no optimizer makes the steps."""
        is_of_model = is_of_transform(leaf) or self.models.parameter(leaf) is not None
        return is_of_model and not self._assembler.awaits_optimizer

    def after_backward(self, asked: dict[int, Tensor]) -> None:
        """A backward pass has run."""
        self._turns.pass_ended()
        if self._assembler.by_hand and self._measuring.sampled:
            self._turns.after_pass_by_hand(self._measuring.micro.scalars)
            self.by_hand.after_pass(self._measuring.micro.sample.gather, asked)

    def before_step(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        """Just before the weights change: measure them and their gradients, and keep what the update needs."""
        weights = known.weights or self._first_step(optimizer, known)
        self.by_hand.optimizer_steps()
        self._births.step_begins(optimizer, self._scalers.scale is not None)
        part, micro = self._measuring.part, self._measuring.micro
        part.optimizers = frozenset((known.order,))
        if self._scalers.scale is not None:
            self._scalers.note_after() if micro.scaler else self._scalers.note()
            found = found_inf(optimizer)
            if found is not None:
                micro.scalars.add("skipped", found)
        part.rates = tuple([rate_of(group) for group in optimizer.param_groups if "lr" in group])
        part.turns += self._turns.before_step(optimizer, known, micro.scalars, part.sampled)
        self.feed(Ready(known.number))
        if not part.sampled:
            return
        part.unscaled_late = unscales(optimizer)
        known.parameters = frozenset(map(id, parameters_of(optimizer)))  # there may be more by now
        weights.look(*(group["params"] for group in optimizer.param_groups))
        part.parameters += self._facts.look(known, self.steps, micro.scalars)
        weights.before(micro.sample.gather)

    def after_step(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        """The weights have changed."""
        self._turns.after_step(optimizer, known, self._measuring.part.sampled)
        if self._measuring.part.sampled and self._assembler.is_stepping(known.number) and known.weights is not None:
            known.weights.after(self._measuring.micro.sample.gather)

    def _first_step(self, optimizer: Optimizer, known: KnownOptimizer) -> Weights:
        self._discovery.find_holder(next(parameters_of(optimizer), None))
        everything = not self._selects and (self._optimizers.everything or not self.models.all)
        known.weights = Weights(self.models, self.places, self._measuring.what, everything)
        self._optimizers.stepped += 1
        known.order = self._optimizers.stepped
        if known.order <= MOST_MODELS:  # there may be a new one for every step
            self.schedule.found(self.steps)  # what is new is looked at closely
        return known.weights

    def _begin_part(self, before: Part) -> None:
        for handle in before.handles:
            handle.remove()
        sampled = was_sampled = self._measuring.sampled
        if self._measuring.part.is_first:
            sampled = self.schedule.wants(self.steps) or self._assembler.may_train
        self._measuring.begin(self.steps, sampled=sampled)
        if sampled != was_sampled:
            self._discovery.put_on() if sampled else self._discovery.take_off()

    def _end_step(self, step: WholeStep) -> None:
        now = time.perf_counter()
        parts = cast(Sequence[Part], step.parts)
        sampled = any(part.sampled for part in parts)
        times = now - self._mark, now - self._start, self._guard.spent
        pending = Pending(step.number, parts, step.trains, sampled, *times, self._births.step_ended())
        self.schedule.paid(pending.number, pending.seconds, pending.spent, pending.sampled)
        self._mark, self._guard.spent = now, 0.0
        self._measuring.step = self.steps
        self._outbox.add(pending)


_forked: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for recorder in list(_forked):
        recorder.forget()


os.register_at_fork(after_in_child=_forget_in_child)
