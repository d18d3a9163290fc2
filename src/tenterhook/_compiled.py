"""torch.compile: run compiled code eagerly while a session is open.

PyTorch ignores a hook that is added to a live compiled model, without a word, and also on a second instance
of a class that was compiled before. The eager stance makes every compiled call run the plain Python, where
hooks fire; the compiled code stays in its cache and is used again, as it is, once the stance is lifted.

The stance belongs to the process, not to a thread, so sessions that overlap share one: the first sets it, the
last puts back what was there. That count is the only state of tenterhook that lives in a module.
"""

import sys
import threading
from typing import Any

import torch

_lock = threading.Lock()
_open = 0
_stance: Any = None


def force_eager() -> bool:
    """Set the eager stance, or join the session that did. False where nothing can have been compiled yet."""
    global _open, _stance
    if "torch._dynamo" not in sys.modules:  # torch.compile imports it, and importing it takes a second
        return False
    with _lock:
        if _open == 0:
            try:
                _stance = torch.compiler.set_stance("force_eager")  # in force from here, as a plain call
            except RuntimeError as error:
                what = "a session cannot be opened inside code that torch.compile runs; open it around the call"
                raise RuntimeError(what) from error
        _open += 1
    return True


def allow_compiled() -> None:
    """Undo one `force_eager`."""
    global _open, _stance
    with _lock:
        _open -= 1
        if _open == 0:
            _stance.__exit__(None, None, None)
            _stance = None


def something_was_compiled() -> bool:
    """Whether torch.compile has turned any Python code of this process into a graph."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen)
