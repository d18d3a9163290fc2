"""torch.compile: what compiled code runs while a session is open.

PyTorch ignores a hook that is added to a live compiled model, without a word, and also on a second instance
of a class that was compiled before. The eager stance makes every compiled call run the plain Python, where
hooks fire; the compiled code stays in its cache and is used again, as it is, once the stance is lifted. Whoever holds
the stance may give, for a call, something else than plain Python to run: another entry to the same code (twins.py).

The stance belongs to the process, not to a thread, so sessions that overlap share one: the first sets it, the
last puts back what was there. Who holds it lives in this module, as the swapped parameters do in `hooks/swap.py`.

Relies on: `torch._dynamo.eval_frame._set_stance`, which gives the stance before and refuses inside compiled code, and
`DynamoStance("force_eager")`; `_callback_from_stance` of the same module, which every compiled call asks what Dynamo is
to call back for the code that it runs (None: it runs as it is written); `convert_frame.input_codes.seen`, the code that
was compiled so far; a wrapped module keeps the original as `_orig_mod`, one compiled in place has a
`_compiled_call_impl`; `set_code_exec_strategy` with `_FrameAction.SKIP` in `torch._C._dynamo.eval_frame`;
`torch._dynamo.callback.callback_handler`, which calls back when anything begins to be compiled.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_lock = threading.RLock()  # a session may be closed by garbage collection while another is being opened
_holders: "dict[int, weakref.ref[Any]]" = {}  # by id: what wants compiled code to run eagerly
_before: Any = None
_asked_before: Any = None
Choose = Callable[[Any], Any]


def force_eager(holder: object, choose: Choose | None = None) -> bool:
    """Set the eager stance, or join those that did. False where nothing can have been compiled yet.

    `choose` is given what Dynamo would call back in a compiled call, and gives what it calls instead; all holders share
    that of the first.
    """
    global _before, _asked_before
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # torch.compile imports it, and importing it takes two seconds
        return False
    with _lock:
        if not _holders:
            try:
                # What torch.compiler.set_stance does, in a third of the time: every session pays for it.
                _before = dynamo._set_stance(_eager())
            except RuntimeError as error:
                what = "a session cannot be opened inside code that torch.compile runs; open it around the call"
                raise RuntimeError(what) from error
            if choose is not None:
                _asked_before = dynamo._callback_from_stance
                dynamo._callback_from_stance = choose
        _holders[id(holder)] = weakref.ref(holder)
    return True


def allow_compiled(holder: object) -> None:
    """Undo its `force_eager`; may be done again, after Ctrl-C in between."""
    global _before, _asked_before
    with _lock:
        if _before is not None and _holders.keys() <= {id(holder)}:
            dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
            if _asked_before is not None:
                dynamo._callback_from_stance, _asked_before = _asked_before, None
            dynamo._set_stance(_before)
            _before = None
        _holders.pop(id(holder), None)


def holders() -> list[Any]:
    """Who holds the stance, in the order in which they began."""
    return [holder for ref in list(_holders.values()) if (holder := ref()) is not None]


def stance_of_user() -> str:
    """What the user had set, with `torch.compiler.set_stance`; empty where that is nothing."""
    if _before is None or _before == type(_before)():
        return ""
    return f"{_before.stance} with a backend" if _before.backend is not None else str(_before.stance)


@functools.cache
def _eager() -> Any:
    from torch._dynamo.eval_frame import DynamoStance

    return DynamoStance("force_eager")


def something_was_compiled() -> bool:
    """True if torch.compile has turned any Python code of this process into a graph."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen)


def never_compile(*functions: Any) -> None:
    """Where the compiler runs code as it is, it still would compile the hooks that this code calls."""
    compiler = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError, TypeError):
        skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
        for function in functions:
            compiler.set_code_exec_strategy(function.__code__, skip)


def is_compiled(module: nn.Module) -> bool:
    """True if a call of this module runs compiled code."""
    return is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_wrapper(module: nn.Module) -> bool:
    """True for the module that `torch.compile(module)` gives."""
    return hasattr(module, "_orig_mod")


def load_compiler() -> None:
    """Import torch's compiler: two seconds, which every optimizer takes, too, when it is made."""
    import torch._dynamo.callback  # noqa: F401


def compiler_callbacks() -> Any:
    """Has `register_start_callback` and `remove_start_callback`; None while the compiler has not been imported."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
