"""Checkpoints: which call of the first pass is being run again, and under which sessions.

A checkpoint runs its function twice: in the forward, and again in the backward, on a GPU in another thread. An
object of its own stays the same and tells which calls belong together: the autograd context of the reentrant kind,
the `_CheckpointFrame` of the other. It also holds the function; `run_again_under` has it ask the sessions that
changed something the first time to do so the second time, even where they were left in between.

Relies on, in `torch.utils.checkpoint`: in the first pass of the non-reentrant kind, saved tensors are hooked by
functions whose closure has the `_CheckpointFrame`, and a generator called `gen` in the frame of `checkpoint()` has it
as `new_frame`; the second pass runs below a function `unpack_hook` whose closure has it as `frame`, calls its
`recompute_fn` and may end with `_StopRecomputationError`. The reentrant kind is an autograd Function: the first
argument of its `forward` and `backward` is called `ctx`, a `torch._C._FunctionBase` with a `run_function`.
Selective ones push `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils import checkpoint

from tenterhook.platform.autograd import graph_task, jvp_enabled, saves_hooked
from tenterhook.platform.modes import without_dispatch_modes

_FILE = checkpoint.__file__
Enough = checkpoint._StopRecomputationError  # a recomputation has all that it wants, and ends there
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
_lock = threading.Lock()


def may_be_checkpointed() -> bool:
    """A cheap test for a first pass: a checkpoint hooks what is saved, or runs inside an autograd Function."""
    # no_grad() leaves forward derivatives enabled, the inside of a Function does not.
    return saves_hooked(False) is not None or not (jvp_enabled() or torch.is_inference_mode_enabled())


def checkpoints() -> Iterator[tuple[Any, bool]]:
    """The checkpoints around the code that runs now, from the inside out, and whether each is being run again."""
    found = set()
    hooks = saves_hooked(False)
    if hooks is not None and (innermost := _closed_over(hooks[0])) is not None:
        found.add(id(innermost))
        yield innermost, False
    frame = sys._getframe(1)
    while frame is not None:
        one = checkpoint_of(frame)
        if one is not None and id(one[0]) not in found:
            found.add(id(one[0]))
            yield one
        frame = frame.f_back  # type: ignore[assignment]


def checkpoint_of(frame: Any) -> tuple[Any, bool] | None:
    """The checkpoint that a frame belongs to, as torch's own code for it, and whether it is being run again."""
    code = frame.f_code
    if code.co_varnames[:1] == ("ctx",) and code.co_name in ("forward", "backward"):
        ctx = frame.f_locals.get("ctx")
        return (ctx, code.co_name == "backward") if isinstance(ctx, torch._C._FunctionBase) else None
    if code.co_filename != _FILE:
        return None
    if code.co_name == "unpack_hook" and "frame" in code.co_freevars:
        return frame.f_locals["frame"], True
    # In checkpoint(), which keeps a generator waiting while the function runs. (Where it began without gradients it
    # will not run again; to count it all the same does no harm.)
    running = getattr(frame.f_locals.get("gen"), "gi_frame", None)
    mine = running.f_locals.get("new_frame") if running is not None else None
    return None if mine is None else (mine, False)


def _closed_over(pack: Any) -> Any:
    """The `_CheckpointFrame` in the closure of a first pass's pack hook."""
    for cell in getattr(pack, "__closure__", None) or ():
        if isinstance(cell.cell_contents, checkpoint._CheckpointFrame):
            return cell.cell_contents
    return None


def beside_checkpoints() -> AbstractContextManager[None]:
    """For what is done beside the model: a selective checkpoint must not count on seeing it again."""
    return without_dispatch_modes(_is_selective)


def _is_selective(mode: Any) -> bool:
    return isinstance(mode, _SELECTIVE)


def runs_in_backward(one: Any) -> bool:
    """True if a checkpoint is of the kind that is not reentrant, which runs again within the same backward pass."""
    return isinstance(one, checkpoint._CheckpointFrame)


class Replays:
    """The calls of one tap that checkpoints made, so that each can be told when it is made again."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, _Replay] = weakref.WeakKeyDictionary()

    def remember(self, call: int) -> list[Any]:
        """Note a call of the first pass under every checkpoint around it, and return these."""
        around = []
        for one, again in checkpoints():
            if again:
                break
            self._of.setdefault(one, _Replay()).calls.append(call)
            around.append(one)
        return around

    def knows(self, call: int) -> bool:
        """True if a call was made in a checkpoint that can still run again."""
        return any(call in replay.calls for replay in self._of.values())

    def next_call(self) -> tuple[int, bool, list[Any]] | None:
        """The call that is being made again, if it is one of ours; whether only now with a graph; and the checkpoints
        within the one that runs again, which are new.
        """
        inside = []
        for one, again in checkpoints():
            if not again:
                inside.append(one)
                continue
            known = self._of.get(one)
            call = None if known is None else known.next()
            if call is None:
                return None
            for new in inside:
                self._of.setdefault(new, _Replay()).calls.append(call)
            return call, isinstance(one, torch._C._FunctionBase), inside
        return None


class _Replay:
    def __init__(self) -> None:
        self.calls: list[int] = []
        self._task = self._i = -1

    def next(self) -> int | None:
        task = graph_task()
        self._i = self._i + 1 if task == self._task else 0
        self._task = task
        return self.calls[self._i] if self._i < len(self.calls) else None


class Again:
    """The function of a checkpoint, for its second run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.sessions: dict[int, Callable[[], AbstractContextManager[None]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for number in sorted(self.sessions):
                stack.enter_context(self.sessions[number]())
            return self.function(*args, **kwargs)


def run_again_under(one: Any, number: int, session: Callable[[], AbstractContextManager[None]]) -> None:
    """Have a checkpoint enter a session, the `number`-th that was opened, for its second run."""
    name = "recompute_fn" if runs_in_backward(one) else "run_function"
    with _lock:
        function = getattr(one, name, None)
        if function is not None:
            again = function if isinstance(function, Again) else Again(function)
            again.sessions.setdefault(number, session)
            setattr(one, name, again)
