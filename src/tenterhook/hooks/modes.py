"""Function modes, which see every call of a torch function in one thread: on and off, in any order."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from tenterhook.hooks.scope import Scope, here
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.checkpoints import checkpoints, may_be_checkpointed
from tenterhook.platform.modes import function_mode_is_on, push_function_mode, remove_function_mode

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session


class Mode(TorchFunctionMode):
    """A mode that can be switched off while others are on above it, as sessions may end in any order."""

    def switch_on(self) -> bool:
        """In this thread; False where it is on already."""
        if self.is_on():
            return False
        push_function_mode(self)
        return True

    def is_on(self) -> bool:
        """True if it is on in this thread."""
        return function_mode_is_on(self)

    def switch_off(self) -> None:
        """In this thread."""
        remove_function_mode(self)

    def restart(self) -> None:
        """Begin to count again."""

    def place_hooks(self, session: "Session") -> None:
        """Place the hooks that it needs, once all taps are placed."""

    def for_this_thread(self) -> "Mode | None":
        """A copy for the thread in which a checkpoint runs again, if it is needed there."""
        return None

    def finish(self, failed: bool) -> None:
        """The block is over, by an exception or not."""

    def notes(self) -> Iterable[str]:
        """What a report says of it."""
        return ()


class Witness(Mode):
    """While a parameter has another value: tells the checkpoints in which something is computed."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if may_be_checkpointed() and self._scope in here() and graph_task() == self._scope.task:
            for one, again in checkpoints():
                if not again:
                    self._scope.again_in(one)
        return func(*args, **kwargs) if kwargs else func(*args)
