"""The functions of torch that have something of ours around them while anything is recorded: `all_wrapped` lists them.

There is no hook for what they do. They are put back when the last recording ends, unless somebody else has wrapped them
since; what is left then only passes calls on.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from tenterhook.platform.autograd import graph_task
from tenterhook.platform.compiler import something_was_compiled
from tenterhook.platform.engine import ENGINE, ENGINE_IN, what_is_asked
from tenterhook.platform.hook_tables import is_ours
from tenterhook.platform.jit import SCRIPT, SCRIPTS_IN, scripted
from tenterhook.platform.losses import FAMILIES
from tenterhook.platform.observed import CLIPS, DROPOUTS, Observed, observable
from tenterhook.platform.optimizers import note_optimizer
from tenterhook.platform.scalers import scaler_classes
from tenterhook.record.guard import Guard
from tenterhook.record.sources.backward import Passes
from tenterhook.record.sources.clipping import Clipping, Dropouts, listed
from tenterhook.record.sources.losses import Losses
from tenterhook.record.sources.scalers import Scalers
from tenterhook.record.sources.steps import Steps


class Listeners(NamedTuple):
    """Those of one recorder."""

    steps: Steps
    scalers: Scalers
    passes: Passes
    losses: Losses
    dropouts: Dropouts
    clipping: Clipping
    guard: Guard


Around = Callable[..., Any]
_DROPOUTS = 1000  # calls that are told of: the first tell enough
_lock = threading.Lock()
_all: tuple[Listeners, ...] = ()
_wrapped: list["Wrapped | Observed"] = []


class Wrapped:
    """A function of torch that is called by way of `around(function, *args, **kwargs)`, until it is removed."""

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        inner = vars(owner)[name]

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        outer._has_tenterhook = True  # type: ignore[attr-defined]
        self._owner, self._name, self._inner, self._outer = owner, name, inner, outer
        setattr(owner, name, outer)

    def remove(self) -> None:
        """Unless somebody else has wrapped it since."""
        if vars(self._owner)[self._name] is self._outer:
            setattr(self._owner, self._name, self._inner)


def all_wrapped() -> list[tuple[Any, str, Around]]:
    """Every function of torch that is wrapped: who has it, its name, and what is around it."""
    scalers = scaler_classes()
    return [
        *((one, "scale", _scale) for one in scalers),  # with which scale a loss is scaled
        *((one, "_maybe_opt_step", _step) for one in scalers),  # whether a step is left out
        *((one, ENGINE, _run_backward) for one in ENGINE_IN),  # what backward() is called on
        (Optimizer, "add_param_group", _add_group),  # that an optimizer is made
        (SCRIPTS_IN, SCRIPT, _script),  # torch.jit.script, which would compile the hooks that are on a module
    ]


def listen(new: Listeners) -> None:
    """Have these told, too."""
    global _all
    with _lock:
        if not _all and not something_was_compiled():  # else it would be compiled again
            _observe(FAMILIES, _loss)
            _observe(DROPOUTS, _dropout, calls=_DROPOUTS)
            _observe(CLIPS, _clip)
        _all = (*_all, new)
        _wrap_new()


def stop(old: Listeners) -> None:
    """Tell these no longer."""
    global _all
    with _lock:
        _all = tuple(one for one in _all if one is not old)
        while _wrapped and not _all:
            _wrapped.pop().remove()


def look_for_scalers() -> None:
    """Classes of them may have come to be since."""
    with _lock:
        if _all:
            _wrap_new()


def _observe(names: Iterable[str], around: Around, calls: int | None = None) -> None:
    found = (function for name in names if (function := observable(name)) is not None)
    _wrapped.extend(Observed(function, around, calls) for function in found)


def _wrap_new() -> None:
    for owner, name, around in all_wrapped():
        function = vars(owner).get(name)
        if isinstance(function, FunctionType) and not hasattr(function, "_has_tenterhook"):
            _wrapped.append(Wrapped(owner, name, around))


def _run_backward(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    asked, within = what_is_asked(args, kwargs), graph_task() != -1
    told = _all
    try:
        for one in told:
            one.passes.begins(asked, within)
        given = inner(*args, **kwargs)
        for one in () if within else told:
            one.passes.returned(given)
        return given
    except BaseException:
        for one in () if within else told:
            one.passes.raised()
        raise
    finally:
        for one in () if within else told:
            one.passes.ended()


def _add_group(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    note_optimizer(args[0])
    return inner(*args, **kwargs)


def _loss(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    output = inner(*args, **kwargs)
    for one in _all:
        one.losses.called(inner, args, kwargs, output)
    return output


def _dropout(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    for one in _all:
        one.dropouts.called(args, kwargs)
    return inner(*args, **kwargs)


def _clip(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = listed(args, kwargs)  # parameters may come from an iterator, which can be gone through once
    for one in _all:
        one.clipping.begins(inner.__name__, args, kwargs)
    result = inner(*args, **kwargs)
    for one in _all:
        one.clipping.ends(inner.__name__, args, kwargs, result)
    return result


def _scale(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    scaler = args[0] if args else kwargs.get("self")

    def told(output: Any) -> Any:
        if not torch.compiler.is_compiling():
            for one in _all:
                one.scalers.scaled(scaler, output)
        return output

    output = inner(*args, **kwargs)
    return map(told, output) if type(output) is map else told(output)  # `losses.values()` are scaled one by one


def _step(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or len(args) < 3:
        return inner(*args, **kwargs)
    before = [(one, one.steps.begun()) for one in _all]
    result = inner(*args, **kwargs)
    for one, begun in before:
        if one.steps.begun() == begun:  # nobody has stepped
            one.scalers.may_have_left_out(*args[1:3])
    return result


def _script(inner: Around, /, *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for one in _all:
            stack.enter_context(one.guard.lock)  # in another thread a step may begin or end
        stack.enter_context(_without_hooks(scripted(args, kwargs)))
        return inner(*args, **kwargs)


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    tables = [table for one in module.modules() for table in (one._forward_hooks, one._forward_pre_hooks)]
    before = [(table, [*table.items()]) for table in tables]
    for table, hooks in before:
        for key, _ in hooks:
            if is_ours(key):
                table.pop(key, None)  # a copy.copy of a module has the same table
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)  # in the order in which they were


def _renew() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it


os.register_at_fork(after_in_child=_renew)
