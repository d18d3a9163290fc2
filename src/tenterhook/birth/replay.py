"""A step that was bad, run once more: the same inputs and random numbers, and afterwards all is as it was."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from tenterhook.birth.again import again
from tenterhook.birth.birth import Birth, birth_of
from tenterhook.birth.find import tracing, worst_of
from tenterhook.birth.trace import CannotRunAgain, Trace
from tenterhook.platform.frames import frames_from


@dataclass(frozen=True, slots=True)
class RandomState:
    """Of every generator that a forward may draw from."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> "RandomState":
        """As it is."""
        numpy = sys.modules.get("numpy.random")
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(random.getstate(), numpy.get_state() if numpy else None, torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        """Make it so again."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


@dataclass(frozen=True, slots=True)
class RootCall:
    """A call of a model, as it began."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]  # of the tensors that it was given
    cpu: Tensor  # the state of torch's generator
    cuda: tuple[Tensor, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    callers: tuple[tuple[int, int], ...]  # the frames around it, by id, and their lines

    @classmethod
    def now(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> "RootCall":
        """A call that is about to run."""
        devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        return cls(
            model,
            args,
            kwargs,
            _versions(args, kwargs),
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if len(devices) > 1 else (),
            tuple((one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices),
            tuple((id(one), one.f_lineno) for one, _ in zip(frames_from(frame), range(_MOST_FRAMES), strict=False)),
        )

    def line_in(self, frame: FrameType) -> int | None:
        """Which line of a function led to the call."""
        return next((line for which, line in self.callers if which == id(frame)), None)

    def __call__(self) -> Any:
        """Once more."""
        self.check()
        with ExitStack() as stack:
            for device, on, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=on, cache_enabled=False))
            return self.model(*self.args, **self.kwargs)

    def check(self) -> None:
        """Its inputs have to be what they were."""
        if _versions(self.args, self.kwargs) != self.versions:
            raise CannotRunAgain("its inputs have been written into since")

    def random(self) -> None:
        """Have the same random numbers drawn as then."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


_MOST_FRAMES = 24


def _versions(args: Any, kwargs: Any) -> tuple[int, ...]:
    return tuple(
        one._version for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor) and not one.is_inference()
    )


@dataclass(frozen=True, slots=True)
class Told:
    """What a replay has shown."""

    birth: Birth | None
    note: str = ""  # why there is none, or what it does not cover


def replay(
    calls: list[RootCall], backward: tuple[FrameType, int] | None, names: Iterable[tuple[str, nn.Module]]
) -> Told:
    """Run the calls of a bad step again; `backward` is the function, and the line, that called backward()."""
    note = "no model was called in it"
    models, calls = list(names), list(calls)
    with as_it_was(models), _alone([*models, *(("", call.model) for call in calls)]):
        if backward is not None and calls:
            try:
                return _whole(calls, *backward, models)
            except Exception as error:
                note = f"what follows the model could not be run again: {_said(error)}"
        for call in calls:
            try:
                found = _forward(call, models)
            except Exception as error:
                note = f"the model could not be run again: {_said(error)}"
            else:
                if found is not None:
                    return Told(found, note)
    return Told(None, note)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CannotRunAgain) else f"{type(error).__name__}: {error}"


def _whole(calls: list[RootCall], frame: FrameType, line: int, models: list[tuple[str, nn.Module]]) -> Told:
    """From the first call of a model to the gradients."""
    lines = [(call, at) for call in calls if (at := call.line_in(frame)) is not None and at <= line]
    if not lines:
        raise CannotRunAgain("the function that calls backward() does not call the model")
    first, at = min(lines, key=lambda one: one[1])
    for call, _ in lines:
        call.check()
    compute = again(frame, at, line)
    first.random()
    trace, outputs, grads = Trace(models), list[Any](), list[Tensor]()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tracing(trace, first.model, outputs))
        loss = compute()
        leaves = [p for _, model in models for p in model.parameters() if p.requires_grad]
        if loss.requires_grad and leaves:
            given = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True)
            grads = [one for one in given if one is not None]
    made = worst_of(trace, [*grads, loss], [])
    if made is None:
        return Told(None, "it was finite when it was run again")
    return Told(birth_of(made))


def _forward(call: RootCall, models: list[tuple[str, nn.Module]]) -> Birth | None:
    """A call of a model alone, and the gradients of the sum of what it gives."""
    call.random()
    trace, outputs, grads = Trace(models), list[Any](), list[Tensor]()
    with torch.enable_grad(), tracing(trace, call.model, outputs):
        result = [one for one in tree_flatten(call())[0] if isinstance(one, Tensor) and one.requires_grad]
        leaves = [p for p in call.model.parameters() if p.requires_grad]
        if result and leaves:
            ones = [torch.ones_like(one) for one in result]
            grads = [one for one in torch.autograd.grad(result, leaves, ones, allow_unused=True) if one is not None]
    made = worst_of(trace, grads, outputs)
    return None if made is None else birth_of(made)


@contextmanager
def _alone(models: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """What is inside DistributedDataParallel runs without waiting for other processes."""
    wrappers = {one for _, model in models for one in model.modules() if isinstance(one, DistributedDataParallel)}
    for one in wrappers:
        one.__dict__["forward"] = one.module.__call__
    try:
        yield
    finally:
        for one in wrappers:
            one.__dict__.pop("forward", None)


@contextmanager
def as_it_was(models: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Afterwards buffers and generators are as they were."""
    buffers = [one for _, model in models for one in model.buffers()]
    values, state = [one.detach().clone() for one in buffers], RandomState.now()
    try:
        yield
    finally:
        for one, value in zip(buffers, values, strict=True):
            one.data.copy_(value)  # which leaves its version as it is: the graph of the step may hold it
        state.put_back()
