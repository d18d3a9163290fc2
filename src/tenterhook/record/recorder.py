"""The recorder: sees calls, backward passes and optimizer steps, and hands on whole steps.

It is told of everything by hooks that PyTorch offers: one on every module of a model while a step is sampled, one
before every model's call, one on a parameter or a few per optimizer (for the loss), and the global hooks around
`Optimizer.step`. What of torch is wrapped is in `_wrapped.py`. An error of its own switches it off and is said once.
"""

import contextlib
import gc
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from tenterhook.platform.checkpoints import graph_task
from tenterhook.platform.hook_tables import begin_hiding, end_hiding
from tenterhook.record.backward import asked_for, classes_of, note_scale, outermost_backward
from tenterhook.record.compiling import Compiling, called_compiled, is_compiled, never_compile
from tenterhook.record.hooks import guarded, uninterrupted
from tenterhook.record.models import MOST_MODELS, Models
from tenterhook.record.parts import Micro, Part, Pending
from tenterhook.record.placed import Placed
from tenterhook.record.places import KINDS, Places
from tenterhook.record.schedule import Schedule
from tenterhook.record.step import Layout, Step
from tenterhook.record.stepping import Stepping, is_compared, is_stepping, look_for_scalers
from tenterhook.record.weights import Weights
from tenterhook.values.tree import version_of

# Steps that are handed on together, those of them that were sampled, and seconds after which they are in any case.
_TOGETHER, _SAMPLES, _WAIT = 32, 4, 0.25
_MISSED = 64  # backward passes of an optimizer after which nobody looks for a parameter that would tell of them
_SHARED = 4  # the same where it seems to have none of its own


class Recorder:
    """Watches a training, from `install` to `remove`; `take` gets every step, `complain` an error of ours."""

    def __init__(
        self,
        take: Callable[[Step], None],
        complain: Callable[[str], None],
        schedule: Schedule,
        what: Iterable[str] = KINDS,
        selectors: tuple[str, ...] = (),
    ) -> None:
        self.recorder = self  # for `guarded`
        self.lock = threading.RLock()
        self.places = Places()
        self.models = Models(selectors)
        self.schedule = schedule
        self.on = self._installed = False
        self.spent = 0.0  # seconds in our own code, since the last step
        self.sampling = False
        self.without_gradients = False  # whether calls under no_grad count: where nothing is trained
        self.fused = False  # whether values were not seen, inside of layers that torch fuses
        self.steps = 0
        self.failed: str | None = None
        self.what = frozenset(what)
        self._selects = bool(selectors)
        self.measures_outputs = "output" in self.what
        self.measures_gradients = "output_grad" in self.what
        self._take, self._complain = take, complain
        self._pid = os.getpid()
        self._at_once: set[int] = set()
        self._pending: list[Pending] = []
        self._samples = 0  # those of them that were sampled
        self._layouts: dict[bytes, Layout] = {}
        self._last_rates: dict[tuple[str, str], float | None] = {}  # of the steps that were handed on
        self._current: Pending | None = None
        self._stepped: set[int] = set()  # the optimizers of the current step
        self._usual: set[int] = set()  # those of the one before
        self._left_out: set[int] = set()  # those whose turn it was, but a GradScaler has left it out
        self._begun: dict[int, int] = {}  # by thread: how many steps optimizers, whichever, have begun
        self._optimizers: dict[int, tuple[Any, Weights]] = {}
        self._weights: weakref.WeakKeyDictionary[Optimizer, Weights] = weakref.WeakKeyDictionary()  # of all there were
        self._ready: dict[int, Micro] = {}  # those that are stepping, and since when
        self._globals: list[Any] = []
        self._everything = False  # whether whatever is called counts
        self._hooks = Placed(self)
        self._scale: Tensor | None = None  # that of the last backward pass, if a GradScaler had one for it
        self._scales = False  # whether there was any
        self._last_loss: Any = None
        self._new_until = 0  # the step after the first one of the newest optimizer
        self._began_in = -1  # the backward pass in which the part has begun
        self._has_optimizer: bool | None = None
        self._stale = False  # whether a module of a model was exchanged
        self._only: Optimizer | None = None
        self._others: list[Any] = []
        self._serial = 0
        self._start = self._mark = self._drained = time.perf_counter()
        self.part = Part(self._at_once, True)
        self.micro = self.part.micros[-1]  # the micro-batch that runs

    # From outside.

    def install(
        self,
        models: Iterable[tuple[str, nn.Module]] = (),
        optimizer: Optimizer | None = None,
        discover: bool = False,
    ) -> None:
        """Place the hooks: on these models, or on whatever is called."""
        self.on = self._installed = True
        begin_hiding()
        self._hooks.discovers = self._everything = discover
        self._only = optimizer
        self._globals = [Stepping(self), Compiling(self._wrapped, self._compiles, self._grows, all_code=discover)]
        _forked.add(self)
        for name, module in models:
            model = self.models.add(name, module)
            model.compiled = is_compiled(module)
            self._hooks.root(model, module)
        self._start = self._mark = time.perf_counter()
        self._begin_part()

    def remove(self) -> None:
        """Hand on what is left, and take away every hook."""
        self.on = False
        with self.lock, contextlib.ExitStack() as stack:  # another thread may be in a hook
            for handle in (*self._globals, *self._hooks.handles(), *self.part.handles):
                stack.callback(handle.remove)
            stack.callback(self._hooks.take_off)
            if self._installed:
                self._installed = False
                stack.callback(end_hiding)
        _forked.discard(self)

    def finish(self) -> None:
        """The training is over: the steps that are not yet handed on, and what belongs to none."""
        if self.failed is None and self.on:
            try:
                unstepped = self.micro.tasks - {self._began_in} or (self.without_gradients and self.micro.called)
                if unstepped and not self._stepped:
                    self._note_scale_after()
                    self.part.keeps_last = True
                    self._add_part()
                if unstepped or self._stepped:
                    self._end_step()
                self._drain(wait=True)
            except Exception as error:
                self.fail(error)
        self.remove()

    def fail(self, error: BaseException) -> None:
        """An error of ours: record no more, and say so once. Never raises."""
        if self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
            self.on = False
            with contextlib.suppress(Exception):
                self._hooks.take_off()  # those of the optimizers stay for now: torch may be going through them
            with contextlib.suppress(Exception):
                self._drain(wait=True)  # the steps before it are whole
            with contextlib.suppress(Exception):  # stderr can be closed or full, too
                self._complain(self.failed)

    def forget(self) -> None:
        """In a forked process: not a word of it is recorded."""
        self.on = False

    # From the hooks.

    def begin_call(self) -> None:
        """A module was called: after a backward pass that is a new micro-batch."""
        if self.micro.tasks:
            self._next_micro()

    def begin_root_call(self) -> None:
        """A model is called: where there is no optimizer, calls are the steps."""
        if self._stale:
            self._look_again()
        trains = torch.is_grad_enabled()
        if not trains and not self.without_gradients:
            if self._optimizers or self.micro.tasks or is_compared(sys._getframe()) or self._some_optimizer():
                return
            self.without_gradients = True
        called = self.micro.tasks or (self.without_gradients and self.micro.called)
        if called and not self._optimizers and not self._some_optimizer():
            self._add_part()
            self._end_step()
            self._begin_part()
        elif self.micro.tasks:
            self._next_micro()
        self.micro.called = True

    def saw_backward(self) -> None:
        """A gradient has come: the first of its backward pass tells of the loss."""
        task = graph_task()
        if task in self.micro.tasks or task in self.micro.asking:
            return
        frame = outermost_backward()
        only_asks, loss, scale = asked_for(frame, self._scales) if frame is not None else (False, None, self._scale)
        if only_asks:
            self.micro.asking.add(task)
            return
        self.micro.tasks.add(task)
        if not self.micro.has_scale:
            self._scale = scale
        if self._ready and is_stepping(frame):  # a closure that is called again: the first one's loss counts
            return
        if loss is None or (self._last_loss is not None and self._last_loss() is loss):
            return
        self._last_loss = weakref.ref(loss)  # itself it would keep the graph alive
        self._note_scale()
        self.micro.scalars.add(("loss", len(self.micro.tasks)), loss)
        if scale is not None:
            self.micro.scalars.add(("scale", len(self.micro.tasks)), scale)
        if self.steps <= self._new_until and self.part.classes is None:
            self.part.classes = classes_of(loss)

    @guarded
    def scaled(self, scaler: Any, output: Any) -> None:
        """A GradScaler has scaled something: a loss, most likely."""
        scale = getattr(scaler, "_scale", None)
        if scale is not None and scaler.is_enabled():
            self._scales = True
            if not self.micro.has_scale:
                self._scale = scale
            note_scale(output, scale)

    @guarded
    def left_out(self, optimizer: Any, state: Any) -> None:
        """A GradScaler may have left out a step of an optimizer: it has if gradients had overflowed."""
        found = state.get("found_inf_per_device", {}) if isinstance(state, dict) else {}
        if not isinstance(optimizer, Optimizer) or not any(one.item() for one in found.values()):
            return  # torch has read these just now: nobody has to wait for them
        weights = self._weights.get(optimizer)
        wraps = weights is not None and weights.wraps
        if not wraps and not self._concerns(optimizer):
            return
        self.micro.was_left_out = True
        if wraps:
            return
        self._left_out.add(id(optimizer))
        if self._usual and self._left_out >= self._usual:  # nobody has stepped
            self._left_out = set()
        elif self._stepped and self._had_turns():
            self._add_part()
            self._end_step()
            self._begin_part()

    def begun(self) -> int:
        """How many steps optimizers have begun in this thread."""
        return self._begun.get(threading.get_ident(), 0)

    def _had_turns(self) -> bool:
        """Whether all optimizers that step in turn did, or were left out."""
        return (self._stepped | self._left_out if self._left_out else self._stepped) >= self._usual

    @guarded
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """What an optimizer is about to do; with a closure it is only known once that has run."""
        thread = threading.get_ident()
        self._begun[thread] = self._begun.get(thread, 0) + 1
        known = self._optimizers.get(id(optimizer))
        is_known = known is not None and not known[1].wraps and known[0]() is optimizer
        if not is_known and not self._concerns(optimizer):
            weights = self._weights.get(optimizer)
            if weights is not None:
                weights.state = self.begun(), _versions(optimizer)
            return None
        if self._ready:
            self._note_wrappers(optimizer)
            failed = self._ready.pop(id(optimizer), None)
            if failed is not None and failed in self.part.micros[:-1]:  # its last step raised: what led to it is over
                del self.part.micros[: self.part.micros.index(failed) + 1]
        at, closure = _closure(args, kwargs) if kwargs or len(args) > 1 else (0, None)
        if closure is None:
            self._gradients_ready(optimizer)
            return None

        def then_look(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self._after_closure(optimizer)
            return result

        if isinstance(at, str):
            return args, {**kwargs, at: then_look}
        return (*args[:at], then_look, *args[at + 1 :]), kwargs

    @guarded
    def _after_closure(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._ready:
            self._gradients_ready(optimizer)

    @guarded
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._ready.pop(id(optimizer), None) is None:
            weights = self._weights.get(optimizer)
            if weights is not None and weights.state[0] == self.begun() and weights.state[1] != _versions(optimizer):
                weights.wraps = False  # it has stepped by itself
            return
        if id(optimizer) not in self._optimizers:  # another one, that it wraps, has stepped for it
            return
        if self.part.sampled:
            self._optimizers[id(optimizer)][1].after(self.micro.gather)
        if id(optimizer) in self._stepped:
            self._end_step()
        self._left_out.discard(id(optimizer))
        self.part.keeps_last = bool(self._left_out)
        self._add_part()
        self._stepped.add(id(optimizer))
        if self._had_turns():
            self._end_step()
        self._begin_part()

    @guarded
    def called(self, module: nn.Module, args: Any) -> None:
        """Any module, while a step is sampled: is it of a model that is not known yet? Losses are none."""
        if self.models.knows(module) or isinstance(module, _Loss) or is_compared(sys._getframe()):
            return
        look_for_scalers()
        model = self.models.discover(module, sys._getframe(2))
        if is_compiled(module):
            self.without_modules()
        if model is None:
            return
        root = self._hooks.root(model, module)
        if self.sampling:
            self._hooks.take_off()
            self._hooks.put_on()
            self._hooks.fused(module, args)  # likewise
        if root is not None:
            root.see(args)  # by itself it would first see the next call

    @guarded
    def _wrapped(self, module: nn.Module) -> None:
        """torch.compile has wrapped a module: its hooks run outside of what is compiled."""
        if self._everything or any(self.models.knows(part) for part in module.children()):
            self.without_modules()
            if self._everything:
                self._hooks.discover_by(module)

    def _grows(self, module: nn.Module) -> None:
        """A module gets a new part: that is looked at when the model is called next."""
        self._stale = self._stale or self.models.knows(module)

    def _look_again(self) -> None:
        self._stale = False
        for module in self.models.look():
            self._hooks.watch_last(module)
        if self.sampling:
            self._hooks.take_off()
            self._hooks.put_on()

    @guarded
    def _compiles(self) -> None:
        """Something is about to be compiled, and may have a model of ours in it."""
        module = called_compiled(sys._getframe(1))
        if self._everything and module is not None and not self.models.knows(module):
            self.models.discover(module, sys._getframe(1))
        self.without_modules()
        self._hooks.drop_roots()

    def without_modules(self) -> None:
        """torch.compile runs: hooks on modules would have it compile again. Parameters and losses go on."""
        for model in self.models.all:
            model.compiled = True
        self._hooks.discovers = False
        self._hooks.take_off()

    # Steps.

    def _gradients_ready(self, optimizer: Optimizer) -> None:
        """Just before the weights change: measure them and their gradients, and keep what the update needs."""
        weights, part = self._know_optimizer(optimizer), self.part
        if self._hooks.sentinels.scouting is not None or not part.is_watched():
            self._watch_for_backward(weights)
        part.optimizers = weights.alone
        if self._scale is not None:
            self._note_scale_after() if self.micro.has_scale else self._note_scale()
            found = getattr(optimizer, "found_inf", None)  # a fused one leaves out its step by itself
            if found is not None:
                self.micro.scalars.add("skipped", found)
        part.rates = tuple([rate_of(group) for group in optimizer.param_groups if "lr" in group])
        self._ready[id(optimizer)] = self.micro
        if not part.sampled:
            return
        part.unscaled_late = getattr(optimizer, "grad_scale", None) is not None
        weights.look(optimizer)
        part.parameters += weights.facts(self._rates())
        weights.before(self.micro.gather)

    def _rates(self) -> dict[int, float]:
        """The learning rate of every parameter that an optimizer has."""
        references = [reference for reference, _ in self._optimizers.values()]
        if self.steps in (1, 10):  # those that have not stepped yet, and may never: looking for them takes a while
            self._others = [weakref.ref(optimizer) for optimizer in _optimizers()]
        optimizers = [found for reference in (*references, *self._others) if (found := reference()) is not None]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return {id(p): rate for group in groups for rate in (rate_of(group),) for p in group["params"]}

    def _add_part(self) -> None:
        if self._current is None:
            self._current = Pending(self.steps)
        self.part.close()
        self._current.parts.append(self.part)
        self._current.sampled |= self.part.sampled

    def _end_step(self) -> None:
        now = time.perf_counter()
        step = self._current or Pending(self.steps)
        step.seconds, step.time, step.spent = now - self._mark, now - self._start, self.spent
        self.schedule.paid(step.number, step.seconds, step.spent, step.sampled)
        self._mark, self.spent = now, 0.0
        self._pending.append(step)
        if self._stepped:
            self._usual = self._stepped | self._left_out
        self._stepped, self._left_out, self._current = set(), set(), None
        self.steps += 1
        # One by one, steps take thrice as long as several together, by all that is no longer in the caches.
        self._samples += step.sampled
        if self._samples >= _SAMPLES or len(self._pending) >= _TOGETHER or now - self._drained > _WAIT:
            self._drain()

    def _drain(self, wait: bool = False) -> None:
        self._drained, self._samples = time.perf_counter(), 0
        with uninterrupted():
            self._hand_on(wait)

    def _hand_on(self, wait: bool) -> None:
        while self._pending and (wait or len(self._pending) > 8 or self._pending[0].ready()):
            step = self._pending.pop(0).make(self.places.all, self._layouts)
            if step.parameters:
                self._last_rates = {**self._last_rates, **{one[:2]: one.rate for one in step.parameters}}
            step.rate = self._last_rates
            self._take(step)

    def _begin_part(self) -> None:
        sampled = self.schedule.wants(self.steps) if not self._stepped else self.sampling
        self.part = Part(self._at_once, sampled)
        self.micro = self.part.micros[-1]
        self._began_in = graph_task()
        if self._began_in == -1:  # an optimizer may step inside the backward pass, which has the one loss
            self._last_loss = None
        if sampled != self.sampling:
            self.sampling = sampled
            self._hooks.put_on() if sampled else self._hooks.take_off()

    def _next_micro(self) -> None:
        self.micro.settle()
        if self._left_out:
            self._left_out &= self._optimizers.keys()  # of others it is not known whether they step in turn
        self.micro = Micro(self._at_once, self.part.sampled)
        self.part.micros.append(self.micro)
        self._last_loss = None

    def _concerns(self, optimizer: Optimizer) -> bool:
        known = self._optimizers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return not known[1].wraps
        weights = self._weights.get(optimizer)
        if weights is not None and weights.wraps:
            return False
        if self._only is not None:
            return optimizer is self._only
        if self._everything or not self.models.all:
            return True
        return any(self.models.parameter(p) for group in optimizer.param_groups for p in group["params"])

    def _note_wrappers(self, optimizer: Optimizer) -> None:
        """Others that are stepping, with the same parameters, only wrap this one: they do not count from now on."""
        first = _first(optimizer)
        for key in (self._ready.keys() & self._optimizers.keys()) - {id(optimizer)}:
            other = self._optimizers[key][0]()
            if other is not None and _is_over(other, first) and is_stepping(sys._getframe(), other):
                self._optimizers[key][1].wraps = True

    def _know_optimizer(self, optimizer: Optimizer) -> Weights:
        known = self._optimizers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        if not self._optimizers:  # those that step in turn with it, as a GAN's do; if they do not, that is soon known
            self._usual = {id(other) for other in _optimizers() if self._concerns(other)}
        first = _first(optimizer)
        if (
            self._everything
            and not self._hooks.discovers
            and first is not None
            and self.models.parameter(first) is None
        ):
            self.models.find_holder(first, sys._getframe(2))
        for key in [key for key, (reference, _) in self._optimizers.items() if _is_over(reference(), first)]:
            del self._optimizers[key]
            if key in self._stepped:  # it had its turn
                self._end_step()
            self._usual.discard(key)
        weights = self._weights.get(optimizer) or self._new_weights(optimizer)
        self._optimizers[id(optimizer)] = (weakref.ref(optimizer), weights)
        self._usual.add(id(optimizer))
        self.without_gradients = False
        return weights

    def _new_weights(self, optimizer: Optimizer) -> Weights:
        everything = not self._selects and (self._everything or not self.models.all)
        weights = self._weights[optimizer] = Weights(self.models, self.places, self.what, everything)
        self._serial += 1
        weights.alone = frozenset((self._serial,))
        if self._serial <= MOST_MODELS:  # there may be a new one for every step
            self.schedule.found(self.steps)  # what is new is looked at closely
            self._new_until = self.steps + 1
        return weights

    def _watch_for_backward(self, weights: Weights) -> None:
        """A backward pass went by those parameters that tell of one: find some by which it comes."""
        sentinels = self._hooks.sentinels
        watched = self.part.is_watched()
        if sentinels.scouting is not None and not sentinels.settle(self._parameters(), weights, watched):
            return
        before = self._current.parts if self._current else []
        passes = {task for micro in self.part.micros for task in micro.tasks - micro.watched} - {self._began_in}
        most = _MISSED
        if passes:  # an optimizer that steps inside one ends its part
            passes -= {task for part in before for micro in part.micros for task in micro.watched}
        elif self.part.micros[0].watched:  # of others nothing is known
            return
        else:
            passes = {-1}
            if any(part.micros[0].watched for part in before):  # it may share the pass of another, and have none
                most = _SHARED if graph_task() == -1 else 0
        if passes and weights.missed < most:
            weights.missed += 1
            sentinels.scout(self._parameters(), weights)

    def _parameters(self) -> list[Tensor]:
        """Of all optimizers, each once."""
        found = [optimizer for reference, _ in self._optimizers.values() if (optimizer := reference()) is not None]
        return list({id(p): p for one in found for group in one.param_groups for p in group["params"]}.values())

    def _some_optimizer(self) -> bool:
        """Whether there is an optimizer that has not stepped yet."""
        if self._has_optimizer is None:
            self._has_optimizer = any(True for _ in _optimizers())
        return self._has_optimizer

    def _note_scale(self) -> None:
        if self._scale is not None and not self.micro.has_scale:
            self.micro.has_scale, self.micro.scaler = True, id(self._scale)
            self.micro.scalars.add("scale", self._scale)

    def _note_scale_after(self) -> None:
        """The scale may have fallen since: that, too, tells of a step that was left out."""
        if self._scale is not None and self.micro.scaler == id(self._scale):
            self.micro.scalars.add("scale after", self._scale)


never_compile(Recorder.before_step)  # all that are guarded share their code

_forked: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for recorder in list(_forked):
        recorder.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _first(optimizer: Optimizer) -> Tensor | None:
    return next((p for group in optimizer.param_groups for p in group["params"]), None)


def _versions(optimizer: Optimizer) -> list[int]:
    return [version_of(p) for group in optimizer.param_groups for p in group["params"]]


def _is_over(optimizer: Optimizer | None, first: Tensor | None) -> bool:
    """Whether an optimizer is gone, or another one has taken its parameters."""
    return optimizer is None or any(p is first for group in optimizer.param_groups for p in group["params"])


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group; some optimizers find their own."""
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    rate = rate.detach() if isinstance(rate, Tensor) else rate
    return math.nan if rate is None else float(rate)


def _optimizers() -> Iterator[Optimizer]:
    """All that there are, less those that only pass calls on, and those that raised while they were made."""
    for thing in gc.get_objects():
        is_one = issubclass(type(thing), Optimizer)  # isinstance would run code of the objects
        if is_one and getattr(type(thing).step, "hooked", False) and hasattr(thing, "param_groups"):
            yield thing


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where the closure of `optimizer.step(closure)` is, and the closure; args begin with the optimizer."""
    if kwargs.get("closure") is not None:
        return "closure", kwargs["closure"]
    if len(args) > 1 and callable(args[1]):
        return 1, args[1]
    return 0, None
