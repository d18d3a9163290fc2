"""Hooks that belong to one session: what becomes of them when a hooked module is copied or pickled."""

import functools
import sys
from typing import Any

from torch import nn


class Hook:
    """The base of our hooks. A copy of a hooked module gets a hook that removes itself at its first call.

    Pickled, a hook becomes a call without effect that needs nothing but Python, so that a model saved inside a
    session loads where tenterhook is not installed.
    """

    def __deepcopy__(self, memo: object) -> "Hook":
        return _Leftover()

    def __reduce__(self) -> Any:
        return functools.partial, (sys.audit, "tenterhook.leftover")


class _Leftover(Hook):
    def __call__(self, module: nn.Module, *rest: object) -> None:
        for hooks, with_kwargs in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                with_kwargs.pop(key, None)
