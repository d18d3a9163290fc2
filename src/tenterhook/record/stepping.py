"""The steps of all optimizers, told to whoever wants to know: one pair of torch's global hooks for all recorders.

Torch goes through its table of such hooks while they run, and must not find it changed by another thread, which may
end or begin a recording at any time.
"""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tenterhook.platform.frames import frames_from
from tenterhook.record.compiling import never_compile
from tenterhook.record.wrapped import wrap_all

_FILE = sys.modules[Optimizer.__module__].__file__
_lock = threading.Lock()
_told: tuple[Any, ...] = ()
_hooks: list[Any] = []  # torch's handles and what is wrapped, while anybody is told


class Stepping:
    """Has a recorder told of steps, until it is removed."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        _tell(lambda told: (*told, recorder))

    def remove(self) -> None:
        _tell(lambda told: tuple(one for one in told if one is not self._recorder))


def _tell(change: Any) -> None:
    global _told
    with _lock:
        _told = change(_told)
        if bool(_told) == bool(_hooks):
            return
        _wait_for_others()
        if _told:
            _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))
            _hooks.extend(wrap_all(lambda: _told))
        else:
            for hook in _hooks:
                hook.remove()
            _hooks.clear()


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = None
    for recorder in _told:
        new = recorder.before_step(optimizer, args, kwargs)
        if new is not None:
            changed = args, kwargs = new
    return changed


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for recorder in _told:
        recorder.after_step(optimizer, args, kwargs)


def look_for_scalers() -> None:
    """Classes of them may have come to be since."""
    with _lock:
        _hooks.extend(wrap_all(lambda: _told) if _told else ())


def is_stepping(frame: FrameType | None, optimizer: Optimizer | None = None) -> bool:
    """Whether an optimizer's step is around a frame: that of this one, or of any."""
    around = (one for one in frames_from(frame) if one.f_code.co_filename == _FILE)
    return any(optimizer is None or one.f_locals.get("self") is optimizer for one in around)


def is_compared(frame: FrameType) -> bool:
    """Whether torch.jit.trace is around a frame, and compares what it has made with the module: that is no step."""
    return not torch.is_grad_enabled() and any(one.f_code.co_name == "_check_trace" for one in frames_from(frame))


def _wait_for_others() -> None:
    """For a second at most: until no other thread is in an optimizer's step."""
    for _ in range(1000):
        frames = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
        if not any(map(is_stepping, frames)):
            return
        time.sleep(0.001)


def _renew() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it


os.register_at_fork(after_in_child=_renew)
never_compile(_before, _after)
