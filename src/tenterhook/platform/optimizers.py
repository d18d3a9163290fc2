"""Optimizers: all that there are, and the frames in which they step.

Relies on: `Optimizer.step` runs in a wrapper in the file of `torch.optim.optimizer`, where the optimizer is `self`; a
class whose `step` has that wrapper says so by `step.hooked`; a fused optimizer is given `found_inf` and `grad_scale`.
"""

import gc
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tenterhook.platform.frames import frames_from

_FILE = sys.modules[Optimizer.__module__].__file__


_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def look_for_optimizers() -> None:
    """Note those that there are, among all objects of the process, which takes a while."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer):  # isinstance would run code of the objects
            _seen.add(thing)


def note_optimizer(optimizer: Optimizer) -> None:
    """One was made."""
    _seen.add(optimizer)


def all_optimizers() -> Iterator[Optimizer]:
    """Those that were noted, less those that only pass calls on, and those that raised while they were made."""
    return (one for one in list(_seen) if getattr(type(one).step, "hooked", False) and hasattr(one, "param_groups"))


def is_stepping(frame: FrameType | None, optimizer: Optimizer | None = None) -> bool:
    """Whether an optimizer's step is around a frame: that of this one, or of any."""
    around = (one for one in frames_from(frame) if one.f_code.co_filename == _FILE)
    return any(optimizer is None or one.f_locals.get("self") is optimizer for one in around)


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """A fused optimizer that a GradScaler steps leaves out its step by itself, by this number."""
    return getattr(optimizer, "found_inf", None)


def unscales(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer divides the gradients by the scale itself, when it steps."""
    return getattr(optimizer, "grad_scale", None) is not None


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where the closure of `optimizer.step(closure)` is, and the closure; args begin with the optimizer."""
    if kwargs.get("closure") is not None:
        return "closure", kwargs["closure"]
    if len(args) > 1 and callable(args[1]):
        return 1, args[1]
    return 0, None
