"""Where two models, two runs or two machines first part; and the conditions of `compare(model, x, under=...)`.

Names are resolved on first use: two runs are compared without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.comparing.conditions import Condition as Condition
    from tenterhook.comparing.conditions import attention as attention
    from tenterhook.comparing.conditions import autocast as autocast
    from tenterhook.comparing.conditions import batch_of as batch_of
    from tenterhook.comparing.conditions import deterministic as deterministic
    from tenterhook.comparing.conditions import in_dtype as in_dtype
    from tenterhook.comparing.conditions import matmul_precision as matmul_precision
    from tenterhook.comparing.conditions import on_device as on_device
    from tenterhook.comparing.conditions import seed as seed
    from tenterhook.comparing.conditions import threads as threads
    from tenterhook.comparing.conditions import training as training

__all__ = [
    "Condition",
    "attention",
    "autocast",
    "batch_of",
    "deterministic",
    "in_dtype",
    "matmul_precision",
    "on_device",
    "seed",
    "threads",
    "training",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tenterhook.comparing' has no attribute {name!r}")
    return getattr(import_module("tenterhook.comparing.conditions"), name)
