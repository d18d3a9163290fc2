"""torch.compile: run compiled code eagerly while a session is open.

PyTorch ignores a hook that is added to a live compiled model, without a word, and also on a second instance
of a class that was compiled before. The eager stance makes every compiled call run the plain Python, where
hooks fire; the compiled code stays in its cache and is used again, as it is, once the stance is lifted.

The stance belongs to the process, not to a thread, so sessions that overlap share one: the first sets it, the
last puts back what was there. That count lives in this module, as the swapped parameters do in `_swap`.
"""

import functools
import sys
import threading
from typing import Any

_lock = threading.Lock()
_open = 0
_before: Any = None


def force_eager() -> bool:
    """Set the eager stance, or join the session that did. False where nothing can have been compiled yet."""
    global _open, _before
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # torch.compile imports it, and importing it takes two seconds
        return False
    with _lock:
        if _open == 0:
            try:
                # What torch.compiler.set_stance does, in a third of the time: every session pays for it.
                _before = dynamo._set_stance(_eager())
            except RuntimeError as error:
                what = "a session cannot be opened inside code that torch.compile runs; open it around the call"
                raise RuntimeError(what) from error
        _open += 1
    return True


def allow_compiled() -> None:
    """Undo one `force_eager`."""
    global _open, _before
    with _lock:
        _open -= 1
        if _open == 0:
            sys.modules["torch._dynamo.eval_frame"]._set_stance(_before)
            _before = None


@functools.cache
def _eager() -> Any:
    from torch._dynamo.eval_frame import DynamoStance

    return DynamoStance("force_eager")


def something_was_compiled() -> bool:
    """Whether torch.compile has turned any Python code of this process into a graph."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen)
