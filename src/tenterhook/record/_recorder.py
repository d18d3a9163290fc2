"""The recorder: sees calls, backward passes and optimizer steps, and hands on whole steps.

It is told of everything by hooks that PyTorch offers: one on every module of a model while a step is sampled, one
before every model's call, one on one parameter per optimizer (for the loss), and the global hooks around
`Optimizer.step`. Nothing of torch is patched. An error of its own switches it off and is said once.
"""

import functools
import gc
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tenterhook._handles import Hook
from tenterhook.record._backward import find_scaler, is_cross_entropy, loss_of, outermost_backward
from tenterhook.record._hooks import OutputHook, RootHook, graph_task, guarded
from tenterhook.record._models import Model, Models
from tenterhook.record._parts import Micro, Part, Pending
from tenterhook.record._places import KINDS, Places
from tenterhook.record._schedule import Schedule
from tenterhook.record._step import Parameter, Step

_ids = itertools.count(-1_000_000_000, -1)  # far from torch's own, which count up, and from those of sessions


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
        self.places = Places()
        self.models = Models(selectors)
        self.schedule = schedule
        self.on = False
        self.spent = 0.0  # seconds in our own code, since the last step
        self.sampling = False
        self.without_gradients = False  # whether calls under no_grad count: where nothing is trained
        self.steps = 0
        self.failed: str | None = None
        self.what = frozenset(what)
        self.measures_outputs = "output" in self.what
        self.measures_gradients = "output_grad" in self.what
        self._take, self._complain = take, complain
        self._pid = os.getpid()
        self._at_once: set[int] = set()
        self._pending: list[Pending] = []
        self._current: Pending | None = None
        self._stepped: set[int] = set()  # the optimizers of the current step
        self._usual: set[int] = set()  # those of the one before
        self._optimizers: dict[int, Any] = {}
        self._before: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self._sentinels: list[RemovableHandle] = []
        self._watched_parameters: set[int] = set()
        self._globals: list[RemovableHandle] = []
        self._discovery: RemovableHandle | None = None
        self._placed: list[tuple[dict[int, Any], int]] = []
        self._roots: list[RemovableHandle] = []
        self._discovers = False
        self._scaler: Any = None
        self._searched_scaler = False
        self._last_loss: Any = None
        self._has_optimizer: bool | None = None
        self._only: Optimizer | None = None
        self._start = self._mark = time.perf_counter()
        self.part = Part(self._at_once, True)

    # From outside.

    def install(
        self,
        models: Iterable[tuple[str, nn.Module]] = (),
        optimizer: Optimizer | None = None,
        discover: bool = False,
    ) -> None:
        """Place the hooks: on these models, or on whatever is called."""
        self.on = True
        self._discovers = discover
        self._only = optimizer
        self._globals = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        _forked.add(self)
        for name, module in models:
            self._root(self.models.add(name, module), module)
        self._start = self._mark = time.perf_counter()
        self._begin_part()

    def remove(self) -> None:
        """Hand on what is left, and take away every hook."""
        self.on = False
        with ExitStack() as stack:
            for handle in (*self._globals, *self._roots, *self._sentinels):
                stack.callback(handle.remove)
            stack.callback(self._unhook)
        _forked.discard(self)

    def finish(self) -> None:
        """The training is over: the steps that are not yet handed on, and what belongs to none."""
        if self.failed is None and self.on:
            try:
                if self._stepped or any(micro.gather.blocks or micro.tasks for micro in self.part.micros):
                    if not self._stepped and self.part.micros[-1].tasks:
                        self._add_part()
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
            try:
                self.remove()
            finally:
                self._complain(self.failed)

    def forget(self) -> None:
        """In a forked process: not a word of it is recorded."""
        self.on = False

    # From the hooks.

    @property
    def micro(self) -> Micro:
        """The micro-batch that runs."""
        return self.part.micros[-1]

    def begin_call(self) -> None:
        """A module was called: after a backward pass that is a new micro-batch."""
        if self.micro.tasks:
            self._next_micro()

    def begin_root_call(self) -> None:
        """A model is called: where there is no optimizer, calls are the steps."""
        trains = torch.is_grad_enabled()
        if not trains and not self.without_gradients:
            if self._optimizers or self.micro.tasks or self._some_optimizer():
                return
            self.without_gradients = True
        called = self.micro.tasks or (self.without_gradients and self.micro.values)
        if called and not self._optimizers and not self._some_optimizer():
            self._add_part()
            self._end_step()
            self._begin_part()
        elif self.micro.tasks:
            self._next_micro()

    def saw_backward(self) -> None:
        """A gradient has come: the first of its backward pass tells of the loss."""
        task = graph_task()
        if task in self.micro.tasks:
            return
        frame = outermost_backward()
        self.micro.tasks.add(task)
        if frame is None:
            return
        loss = loss_of(frame)
        if loss is None or self._last_loss is loss:
            return
        self._last_loss = loss
        if not self._searched_scaler:
            self._searched_scaler = True
            self._know(find_scaler(frame))
        self._note_scale()
        with torch.no_grad():
            self.micro.scalars.add(("loss", len(self.micro.tasks)), loss)
        shape = self.micro.last_shape
        if self.part.classes is None and shape and (name := is_cross_entropy(loss)):
            self.part.classes = shape[1] if "2D" in name else shape[-1]

    @guarded
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """What an optimizer is about to do; with a closure it is only known once that has run."""
        if not self._concerns(optimizer):
            return None
        at, closure = _closure(args, kwargs)
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
        if id(optimizer) not in self._before:
            self._gradients_ready(optimizer)

    @guarded
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._before:
            return
        before = self._before.pop(id(optimizer))
        with torch.no_grad():
            for place, old, parameter in before:
                self.micro.gather.add([place], torch.sub(parameter.detach(), old))
        if id(optimizer) in self._stepped:
            self._end_step()
        self._add_part()
        self._stepped.add(id(optimizer))
        if self._stepped >= self._usual:
            self._end_step()
        self._begin_part()

    @guarded
    def _called(self, module: nn.Module, args: Any) -> None:
        """Any module, while a step is sampled: is it of a model that is not known yet?"""
        if self.models.knows(module):
            return
        if _is_compiled(module):
            self.without_modules()
        model = self.models.discover(module, sys._getframe(2))
        self._root(model, module)
        if self.sampling:
            self._unhook()
            self._hook()

    def without_modules(self) -> None:
        """torch.compile runs: hooks on modules would have it compile again. Parameters and losses go on."""
        for model in self.models.all:
            model.compiled = True
        self._discovers = False
        self._unhook()

    # Steps.

    def _gradients_ready(self, optimizer: Optimizer) -> None:
        """Just before the weights change: measure them and their gradients, and keep what the update needs."""
        self._know_optimizer(optimizer)
        self._note_scale(optimizer)
        self.part.rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        before = self._before.setdefault(id(optimizer), [])
        if not self.part.sampled:
            return
        self.part.unscaled_late = getattr(optimizer, "grad_scale", None) is not None
        gather = self.micro.gather
        self._facts(optimizer)
        copies = self._affordable(optimizer)
        with torch.no_grad():
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    model, site, kind = self._name(parameter, g, i)
                    if model is None:
                        continue
                    number = functools.partial(self.places.number, model, site, kind=kind, dtype=parameter.dtype)
                    if "parameter" in self.what:
                        gather.add([number("parameter")], parameter)
                    if parameter.grad is None:
                        continue
                    if "parameter_grad" in self.what:
                        gather.add([number("parameter_grad")], parameter.grad)
                    if copies:
                        before.append((number("update"), parameter.detach().clone(), parameter))

    def _name(self, parameter: Tensor, group: int, i: int) -> tuple[str | None, str, str]:
        known = self.models.parameter(parameter)
        if known is not None:
            return known[0].name, known[1], known[2]
        if not self._discovers and self.models.all:
            return None, "", ""  # watch() was given the model; this is of another one, or was not asked for
        return "optimizer", f"group{group}[{i}]", "Parameter"

    def _facts(self, optimizer: Optimizer) -> None:
        rates = {
            id(p): float(group.get("lr", float("nan")))
            for one in (reference() for reference in self._optimizers.values())
            if one is not None
            for group in one.param_groups
            for p in group["params"]
        }
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models.all:
            parameters = list(model.each_parameter())
            if not any(id(tensor) in mine for _, tensor in parameters):
                continue
            self.part.parameters += [
                Parameter(
                    model.name,
                    site,
                    trainable=tensor.requires_grad,
                    has_gradient=tensor.grad is not None,
                    rate=rates.get(id(tensor)),
                    size=tensor.numel(),
                )
                for site, tensor in parameters
                if not isinstance(tensor, nn.UninitializedParameter)
            ]

    def _affordable(self, optimizer: Optimizer) -> bool:
        """Whether there is room for a copy of the weights while the optimizer steps."""
        if "update" not in self.what:
            return False
        need: dict[torch.device, int] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                need[p.device] = need.get(p.device, 0) + p.numel() * p.element_size()
        return all(size < _free(device) / 4 for device, size in need.items())

    def _add_part(self) -> None:
        if self._current is None:
            self._current = Pending(self.steps)
        self.part.close()
        self._current.parts.append(self.part)

    def _end_step(self) -> None:
        now = time.perf_counter()
        step = self._current or Pending(self.steps)
        step.seconds, step.time, step.spent = now - self._mark, now - self._start, self.spent
        self.schedule.paid(step.seconds, step.spent, step.sampled)
        self._mark, self.spent = now, 0.0
        self._pending.append(step)
        self._usual, self._stepped, self._current = self._stepped or self._usual, set(), None
        self.steps += 1
        self._drain()

    def _drain(self, wait: bool = False) -> None:
        while self._pending and (wait or len(self._pending) > 8 or self._pending[0].ready()):
            self._take(self._pending.pop(0).make(self.places.all))

    def _begin_part(self) -> None:
        sampled = self.schedule.wants(self.steps) if not self._stepped else self.sampling
        self.part = Part(self._at_once, sampled)
        self._last_loss = None
        if self._scaler is not None:
            self._note_scale()
        if sampled != self.sampling:
            self.sampling = sampled
            self._hook() if sampled else self._unhook()

    def _next_micro(self) -> None:
        self.part.micros.append(Micro(self._at_once))
        self._last_loss = None
        self._note_scale()

    def _concerns(self, optimizer: Optimizer) -> bool:
        if self._only is not None:
            return optimizer is self._only
        if self._discovers or not self.models.all:
            return True
        return any(self.models.parameter(p) for group in optimizer.param_groups for p in group["params"])

    def _know_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._usual.add(id(optimizer))
        self.without_gradients = False
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters[-1:]:  # the last layer's, whose gradient is there first
            if id(parameter) not in self._watched_parameters and parameter.is_leaf:
                self._watched_parameters.add(id(parameter))
                self._sentinels.append(parameter.register_post_accumulate_grad_hook(_Sentinel(self)))

    def _some_optimizer(self) -> bool:
        """Whether there is an optimizer that has not stepped yet."""
        if self._has_optimizer is None:
            self._has_optimizer = any(isinstance(thing, Optimizer) for thing in gc.get_objects())
        return self._has_optimizer

    def _know(self, scaler: Any) -> None:
        if scaler is not None and scaler.is_enabled():
            self._scaler = weakref.ref(scaler)

    def _note_scale(self, optimizer: Optimizer | None = None) -> None:
        if optimizer is not None and self._scaler is None and self.steps < 3:
            self._know(find_scaler(sys._getframe(1)))
        scaler = None if self._scaler is None else self._scaler()
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            return
        key = "scale after" if self.micro.has_scale else "scale"
        if optimizer is not None or key == "scale":
            self.micro.has_scale = True
            self.micro.scalars.add(key, scale)
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self.micro.scalars.add("skipped", found)

    # Hooks.

    def _root(self, model: Model, module: nn.Module) -> None:
        site = next((name for name, ref in model.modules if ref() is module), ".")
        hook = RootHook(self, model, site, module)
        self._roots.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _hook(self) -> None:
        if self._discovers and self._discovery is None:
            self._discovery = register_module_forward_pre_hook(_Discovery(self))
        if self.what.isdisjoint(("output", "output_grad")):
            return
        for model in self.models.all:
            for site, reference in () if model.compiled else model.modules:
                module = reference()
                if module is not None and not isinstance(module, torch.jit.ScriptModule):
                    key = next(_ids)
                    self._placed.append((module._forward_hooks, key))
                    module._forward_hooks[key] = model.hooks.get(site) or self._new_hook(model, site, module)

    def _new_hook(self, model: Model, site: str, module: nn.Module) -> OutputHook:
        hook = model.hooks[site] = OutputHook(self, model, site, module)
        return hook

    def _unhook(self) -> None:
        if self._discovery is not None:
            self._discovery.remove()
            self._discovery = None
        for table, key in self._placed:
            table.pop(key, None)
        self._placed.clear()


class _Discovery(Hook):
    """The global hook: which models are there?"""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and not self.recorder.models.knows(module):
            self.recorder._called(module, args)


class _Sentinel:
    """On one parameter of an optimizer: there was a backward pass, sampled or not."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @guarded
    def __call__(self, parameter: Tensor) -> None:
        self.recorder.saw_backward()


_forked: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for recorder in list(_forked):
        recorder.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where the closure of `optimizer.step(closure)` is, and the closure; args begin with the optimizer."""
    if kwargs.get("closure") is not None:
        return "closure", kwargs["closure"]
    if len(args) > 1 and callable(args[1]):
        return 1, args[1]
    return 0, None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _free(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return float("inf")
