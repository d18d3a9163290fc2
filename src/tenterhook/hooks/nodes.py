"""A tap on a node of an autograd graph: the gradients of its outputs, or those of its inputs."""

from typing import TYPE_CHECKING

from torch import Tensor

from tenterhook.hooks.tap import Tap

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
        if not asked and len(grads) > 1:
            self.action.on_structure(self, grads, 0)
        new = list(grads)
        for k, grad in enumerate(grads):
            if asked in ((), (k,)):
                changed = self.arrive(0, () if asked or len(grads) == 1 else (k,), grad)
                new[k] = grad if changed is None else changed
        return tuple(new) if any(a is not b for a, b in zip(new, grads, strict=True)) else None
