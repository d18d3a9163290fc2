"""torch.compile must not notice us: it compiles again where a hook has come or gone, and warns of global ones.

So we have to know before it first looks: that a module is wrapped is told by the hook for submodules, `_orig_mod`
being one, and that code is about to be compiled by a callback of the compiler itself.
"""

import contextlib
from collections.abc import Callable
from types import FrameType

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tenterhook.platform.compiler import compiler_callbacks, is_compiled, load_compiler
from tenterhook.platform.frames import first_argument, frames_from


class Compiling:
    """Calls `wrapped` with a module that torch.compile has wrapped, and `starts` when it begins to compile.

    `grows` is called with every other module that gets a new part or parameter, before it has it.
    """

    def __init__(
        self,
        wrapped: Callable[[nn.Module], None],
        starts: Callable[[], None],
        grows: Callable[[nn.Module], None],
        all_code: bool,
    ) -> None:
        self._wrapped, self._starts, self._grows = wrapped, starts, grows
        self._registrations = (
            register_module_module_registration_hook(self._registered),
            register_module_parameter_registration_hook(self._gets_parameter),
        )
        if all_code:
            load_compiler()
        self._compiler = compiler_callbacks()
        if self._compiler is not None:
            self._compiler.register_start_callback(self._started)

    def remove(self) -> None:
        """Listen no more."""
        for handle in self._registrations:
            handle.remove()
        if self._compiler is not None:
            with contextlib.suppress(ValueError):  # torch._dynamo.reset() forgets callbacks
                self._compiler.remove_start_callback(self._started)

    def _registered(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        if name == "_orig_mod":
            self._wrapped(module)
        else:
            self._grows(module)

    def _gets_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if name not in module._parameters:  # else it is exchanged, as some do at every step
            self._grows(module)

    def _started(self, facts: object) -> None:
        self._starts()


def called_compiled(frame: FrameType | None) -> nn.Module | None:
    """The outermost module whose call runs around a frame, and which is compiled."""
    found = None
    for one in frames_from(frame):
        owner = first_argument(one)
        if issubclass(type(owner), nn.Module) and is_compiled(owner):
            found = owner
    return found
