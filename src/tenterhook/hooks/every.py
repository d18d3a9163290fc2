"""With every=n: which calls of the model a session looks at."""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.jit import ScriptModule

from tenterhook.addresses.modules import unwrap
from tenterhook.hooks.scope import Scope, here
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.hook_tables import Hook

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session


class Every(Hook):
    """The hook before a call of the model itself. What follows, up to the next one, belongs to that call."""

    changes = False

    def __init__(self, every: int, model: Any, scope: Scope) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is a whole number from 1 on, got {every!r}")
        if not isinstance(model, nn.Module) or isinstance(model, ScriptModule):
            raise TypeError(f"every={every} counts the calls of a module, and a {type(model).__name__} tells of none")
        self._every = every
        self._scope = scope
        self._calls = 0

    def place(self, session: "Session") -> None:
        """Before every other hook of the model."""
        model = session.model()
        if model is not None:
            session.places.put(unwrap(model)._forward_pre_hooks, self, first=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.count()

    def count(self) -> None:
        """The model is called."""
        if self._scope in here() and graph_task() == self._scope.task:  # else another thread's, or a recomputation
            self._scope.rests = self._calls % self._every != 0
            self._calls += 1

    def note(self) -> str:
        """What a report says of it."""
        if not self._calls:
            return f"every={self._every} counts calls of the model itself, which was not called: nothing was left out"
        kept = -(-self._calls // self._every)
        return f"every={self._every}: {kept} of {self._calls} calls of the model count here, from @0 to @{kept - 1}"
