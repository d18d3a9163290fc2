"""Reentrant checkpoints: which call of the first pass is being run again.

A reentrant checkpoint runs its function in `forward(ctx, …)` without gradients, and again in `backward(ctx, …)`
with them, on a GPU in another thread. `ctx` is the same object both times and tells which calls belong together.
(The other kind of checkpoint builds the graph in its first pass, and needs none of this.)
"""

import sys
import weakref
from typing import Any

import torch


class Replays:
    """The calls of one tap that checkpoints made without gradients."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, _Replay] = weakref.WeakKeyDictionary()

    def remember(self, call: int) -> bool:
        """Note a call of the first pass; False where it is not inside a checkpoint."""
        ctx = _context()
        if ctx is None:
            return False
        self._of.setdefault(ctx, _Replay()).calls.append(call)
        return True

    def next_call(self) -> int | None:
        """The call that is being run again right now, if it is one of ours."""
        ctx = _context()
        replay = None if ctx is None else self._of.get(ctx)
        return None if replay is None else replay.next()


class _Replay:
    def __init__(self) -> None:
        self.calls: list[int] = []
        self._task = self._i = -1

    def next(self) -> int | None:
        task = torch._C._current_graph_task_id()
        self._i = self._i + 1 if task == self._task else 0
        self._task = task
        return self.calls[self._i] if self._i < len(self.calls) else None


def _context() -> Any:
    """The autograd context of the innermost custom Function on this thread's stack, which a checkpoint is."""
    frame = sys._getframe(1)
    while frame is not None:
        if "ctx" in frame.f_code.co_varnames:
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, torch._C._FunctionBase):
                return ctx
        frame = frame.f_back  # type: ignore[assignment]
    return None
