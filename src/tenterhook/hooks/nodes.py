"""A tap on a node of an autograd graph: the gradients of its outputs, or those of its inputs."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenterhook.hooks.tap import Tap
from tenterhook.values.tree import Path

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

_Gradients = tuple[Tensor | None, ...]


class NodeTap(Tap):
    """The hook before or after a node runs."""

    def place(self, session: "Session") -> None:
        self.calls = 1
        node = session.module_of(self.site).node
        is_input = self.site.address.role == "in"
        session.places.keep(node.register_hook(self._ran) if is_input else node.register_prehook(self._came))

    def _ran(self, grads: _Gradients, outputs: object) -> _Gradients | None:
        return self._came(grads)

    def _came(self, grads: _Gradients) -> _Gradients | None:
        """Each of the gradients that is asked for goes to the action."""
        asked = self.site.address.leaf
        if asked and asked[0] not in range(len(grads)):
            self.missed = f"the node has {len(grads)} of these, counted from [0]"
            return None
        paths: dict[Any, Path] = {k: (k,) for k in range(len(grads))}  # by position: of each that is wanted
        if asked or len(grads) == 1:
            paths = {asked[0] if asked else 0: ()}
        elif grads:
            self.action.on_structure(self, grads, 0)
        new = {k: self.arrive(0, path, grads[k]) for k, path in paths.items()}
        changed = {k: grad for k, grad in new.items() if grad is not None}
        return tuple(changed.get(k, grad) for k, grad in enumerate(grads)) if changed else None
