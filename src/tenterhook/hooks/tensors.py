"""A tap on a parameter or buffer: its value on entering, its gradient at every backward, or another value meanwhile."""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.errors import EditError
from tenterhook.hooks.modes import Witness
from tenterhook.hooks.swap import Swap
from tenterhook.hooks.tap import Call, Tap
from tenterhook.platform.autograd import at_end_of_backward, graph_task
from tenterhook.platform.checkpoints import checkpoints
from tenterhook.platform.fsdp import local_part
from tenterhook.values.tree import Path

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session


class TensorTap(Tap):
    """The value of a parameter or buffer, or the gradient of a parameter."""

    was_overwritten = False  # of a changed one: whether somebody else wrote into it
    _swap: Swap | None = None

    def place(self, session: "Session") -> None:
        owner = session.module_of(self.site)
        name = self.site.address.name.rpartition(".")[2]
        is_sharded = (id(owner), name) in session.sharded
        tensor = session.sharded.get((id(owner), name), self.site.tensor)
        self.calls = 1
        if tensor is None or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            self._refuse(session, "it is not initialised yet; run the lazy module once before")
        elif self.site.address.grad and not tensor.requires_grad:
            self._refuse(session, "frozen: its requires_grad is False")
        elif self.site.address.grad:
            self._hook(session, tensor)
        elif not self.changes:
            self.action.on_value(self, tensor, Call(0))
        elif is_sharded:
            what = "FSDP2 has sharded it and gathers copies of it, which would keep the change; edit what uses it"
            raise EditError(f"{self.site} cannot be edited: {what}")
        else:
            self._put_other(session, tensor)

    def _refuse(self, session: "Session", why: str) -> None:
        self.missed = why
        session.refused.append(self)

    def _hook(self, session: "Session", parameter: Tensor) -> None:
        """A tensor hook sees what a backward contributes, before DDP reduces it.

        On a parameter that FSDP2 has sharded it never fires; there the hook after the accumulation does, with `.grad`
        as it then stands.
        """
        session.wait_for_gradient(self)
        self.born = math.inf  # no graph is older or younger
        hooks = _GradientHooks(self)
        if session.reduced:
            session.places.keep(parameter.register_post_accumulate_grad_hook(hooks.accumulated_first))
            return
        session.places.keep(parameter.register_hook(hooks.contributed))
        self.scope.want(parameter)
        if local_part(parameter) is not None:
            session.places.keep(parameter.register_post_accumulate_grad_hook(hooks.accumulated))

    def _put_other(self, session: "Session", tensor: Tensor) -> None:
        """Change it until the session is over; a checkpoint that uses it must know."""
        session.swapped.append(self)
        try:
            swap = Swap(tensor)
            swap.put(lambda value: self.action.on_value(self, value, Call(0)))
        except EditError:
            raise
        except RuntimeError as error:
            raise EditError(f"{self.site} cannot be edited: {error}") from error
        self._swap = swap
        if len(session.swapped) == 1:
            session.modes.append(Witness(self.scope))

    def arrive(self, call: int, path: Path, grad: Tensor | None) -> Tensor | None:
        return None if self.scope.rests else super().arrive(call, path, grad)

    def put_back(self) -> None:
        """Undo the change."""
        swap, self._swap = self._swap, None
        if swap is not None:
            name = self.site.address.name.rpartition(".")[2]
            table: Any = getattr(self.site.module, f"_{self.site.kind}s", None)
            self.was_overwritten = swap.put_back(table if type(table) is dict else {}, name)


class _GradientHooks:
    """The hooks on one parameter: its gradient comes once per backward."""

    def __init__(self, tap: TensorTap) -> None:
        self._tap = tap
        self._task = -1

    def contributed(self, grad: Tensor | None) -> Tensor | None:
        self._task = graph_task()
        return self._tap.arrive(0, (), grad)

    def accumulated(self, parameter: Tensor) -> None:
        if graph_task() != self._task:
            self._arrive(parameter)

    def accumulated_first(self, parameter: Tensor) -> None:
        """Wait for the end of the backward pass, and then for what waits for that, which DDP's reduction does."""
        if any(again for _, again in checkpoints()):
            what = "a reentrant checkpoint is a backward pass of its own, so the end of the whole is not known there"
            raise EditError(f"{self._tap.site}: {what}; use use_reentrant=False, or edit without reduced=True")
        at_end_of_backward(functools.partial(at_end_of_backward, functools.partial(self._arrive, parameter)))

    def _arrive(self, parameter: Tensor) -> None:
        new = self._tap.arrive(0, (), None if parameter.grad is None else parameter.grad.clone())
        if new is not None and parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.copy_(new)
