"""A step that was bad, run once more: the same inputs and random numbers, and afterwards all is as it was."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenterhook.birth.alone import alone, rank_of_several, waits_for_others, wrappers_of
from tenterhook.birth.birth import Birth, birth_of
from tenterhook.birth.find import tracing, worst_of
from tenterhook.birth.loss_code import loss_code
from tenterhook.birth.state import RandomState, as_it_was
from tenterhook.birth.trace import CannotRunAgain, Trace
from tenterhook.platform.compiler import something_was_compiled
from tenterhook.platform.engine import Asked, leaves_of
from tenterhook.platform.frames import frames_from
from tenterhook.values.tree import leaves


class RootCall(NamedTuple):
    """A call of a model, as it began."""

    model_ref: "weakref.ref[nn.Module]"  # a model that is gone by then is not kept for us
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]  # of the tensors that it was given
    random: RandomState
    autocast: "Autocast"
    callers: tuple[tuple[int, int], ...]  # the frames around it, by id, and their lines

    @classmethod
    def now(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> "RootCall":
        """A call that is about to run."""
        return cls(
            weakref.ref(model),
            args,
            kwargs,
            _versions(args, kwargs),
            RandomState.of_torch(),
            _autocast_now(),
            tuple([(id(one), one.f_lineno) for one in islice(frames_from(frame), _MOST_FRAMES)]),
        )

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState, autocast: "Autocast"
    ) -> "RootCall":
        """One that nothing called."""
        return cls(weakref.ref(model), args, kwargs, _versions(args, kwargs), random, autocast, ())

    @property
    def model(self) -> nn.Module:
        """The model that was called."""
        model = self.model_ref()
        if model is None:
            raise CannotRunAgain("the model is gone")
        return model

    def line_in(self, frame: FrameType) -> int | None:
        """Which line of a function led to the call."""
        return next((line for which, line in self.callers if which == id(frame)), None)

    def __call__(self) -> Any:
        """Once more."""
        self.check()
        with _cast(self.autocast):
            return self.model(*self.args, **self.kwargs)

    def check(self) -> None:
        """Its inputs have to be what they were."""
        if _versions(self.args, self.kwargs) != self.versions:
            raise CannotRunAgain("its inputs have been written into since")


_MOST_FRAMES = 24
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class Backward(NamedTuple):
    """A call of backward(): the functions that led to it, the innermost first, each with the line that it was at."""

    functions: list[tuple[FrameType, int]]
    autocast: Autocast

    @classmethod
    def now(cls, frames: Iterable[FrameType]) -> "Backward":
        """One that is about to run."""
        return cls([(one, one.f_lineno) for one in frames], _autocast_now())


def _autocast_now() -> Autocast:
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return tuple((one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices)


@contextmanager
def _cast(autocast: Autocast) -> Iterator[None]:
    """Autocast as it was."""
    with ExitStack() as stack:
        for device, on, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled=on, cache_enabled=False))
        yield


def _versions(args: Any, kwargs: Any) -> tuple[int, ...]:
    return tuple(one._version for _, one in leaves((args, kwargs)) if not one.is_inference())


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay has shown."""

    birth: Birth | None
    note: str = ""  # why there is none, or what it does not cover
    elsewhere: bool = False  # all is well here: another process has made it
    rank: int | None = None  # of this process, where there are several
    capsule: str = ""  # where the step is saved, or why it is not


def replay(calls: list[RootCall], backward: Backward | None, models: list[tuple[str, nn.Module]]) -> Replayed:
    """Run the calls of a bad step again; `backward` is None where that was not called."""
    calls = [call for call in calls if call.model_ref() is not None]
    modules = [model for _, model in models] + [call.model for call in calls]
    replayed = Replayed(None, waits_for_others(modules))
    if not replayed.note:
        with as_it_was(modules), alone(modules):
            replayed = _run_again(calls, backward, models)
    if something_was_compiled() and replayed.birth is not None:
        notes = filter(None, (replayed.note, "what was compiled ran eagerly to show this"))
        replayed = replace(replayed, note="; ".join(notes))
    return replace(replayed, rank=rank_of_several())


def _run_again(calls: list[RootCall], backward: Backward | None, models: list[tuple[str, nn.Module]]) -> Replayed:
    if not calls:
        return Replayed(None, "no call of the model was seen in it: watch what the training calls")
    note = "backward() was not called"
    if backward is not None:
        try:
            found = _whole(calls, backward, models)
            if found is not None:
                return Replayed(found)
            note = _finite()
        except Exception as error:
            note = f"what follows the model could not be run again: {_said(error)}"
    for call in calls:  # such as those of micro-batches before the last one
        try:
            found = forward_again(call, models)
        except Exception as error:
            note = f"the model could not be run again: {_said(error)}"
        else:
            if found is not None:
                return Replayed(found, "" if note == _finite() else note)
    several = rank_of_several() is not None and any(wrappers_of(model) for _, model in models)
    if several and note == _finite():
        return Replayed(None, "it is finite on this rank, and gradients are averaged over all of them", elsewhere=True)
    return Replayed(None, note)


def _finite() -> str:
    what = " eagerly, without what torch.compile has made of it" if something_was_compiled() else ""
    return f"it was finite when it was run again{what}"


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CannotRunAgain) else f"{type(error).__name__}: {error}"


def _whole(calls: list[RootCall], backward: Backward, models: list[tuple[str, nn.Module]]) -> Birth | None:
    """From the first call of a model to the gradients, in the innermost function that led to both."""
    for frame, line in backward.functions:
        lines = [(call, at) for call in calls if (at := call.line_in(frame)) is not None and at <= line]
        if lines:
            break
    else:
        raise CannotRunAgain("no function led both to the model and to backward()")
    first, at = min(lines, key=lambda one: one[1])
    for call, _ in lines:
        call.check()
    compute = loss_code(frame, at, line)
    first.random.put_back()
    trace, outputs, grads = Trace(models, alone=True), list[Any](), list[Tensor]()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_cast(backward.autocast))
        stack.enter_context(tracing(trace, first.model, outputs))
        loss = compute()
        grads = _gradients([loss])
    made = worst_of(trace, [*grads, loss], [])
    return None if made is None else birth_of(made)


def forward_again(call: RootCall, models: list[tuple[str, nn.Module]]) -> Birth | None:
    """A call of a model alone, and the gradients of the sum of what it gives."""
    call.random.put_back()
    trace, outputs, grads = Trace(models, alone=True), list[Any](), list[Tensor]()
    with torch.enable_grad(), tracing(trace, call.model, outputs):
        result = [one for _, one in leaves(call())]
        grads = _gradients(result)
    made = worst_of(trace, grads, outputs)
    return None if made is None else birth_of(made)


def _gradients(outputs: list[Tensor]) -> list[Tensor]:
    """Of the sum of these, at all leaves that they come from; `.grad` stays as it is."""
    outputs = [one for one in outputs if one.requires_grad]
    wanted = list(leaves_of(Asked(outputs, (), accumulates=False)))
    if not wanted:
        return []
    ones = [torch.ones_like(one) for one in outputs]
    return [one for one in torch.autograd.grad(outputs, wanted, ones, allow_unused=True) if one is not None]
