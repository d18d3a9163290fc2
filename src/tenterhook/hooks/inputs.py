"""A tap on the inputs of a module: a hook before its forward, and one after it where the forward has to be waited for.

The way of an input's gradient: the hook before notes the tensors (`InputShares`), the hook after finds the graph nodes
that used them, and the hooks on these nodes add up what they contribute and hand it to the action.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.jit import ScriptModule

from tenterhook.hooks.gradients import GradientTap, note_several_leaves
from tenterhook.hooks.outputs import SCRIPTED, StartHook
from tenterhook.hooks.shares import InputShares, WantedInput, hook_users
from tenterhook.hooks.tap import Call, with_part
from tenterhook.platform.frames import PerCall
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.inputs import Inputs, argument_names
from tenterhook.values.standins import Standins
from tenterhook.values.tree import leaves

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

_HANDED_ON = "the module hands this input on, so the gradient is that of all users of the tensor"


class _Waiting(NamedTuple):
    """Between the two hooks of one call."""

    call: int
    standins: Standins | None  # where other inputs took the place of the caller's
    shares: InputShares | None  # where gradients are wanted


class InputTap(GradientTap):
    """The hook before a module's forward."""

    def place(self, session: "Session") -> None:
        module = session.module_of(self.site)
        if isinstance(module, ScriptModule):
            self.missed = SCRIPTED
            return
        self.names = argument_names(module)
        self._waiting: PerCall[_Waiting] = PerCall()
        flags = module._forward_pre_hooks_with_kwargs
        session.places.put(module._forward_pre_hooks, self, with_kwargs=flags)
        if self.site.address.grad or self.changes:
            session.places.at_end(self._waiting.clear)
            if self.site.address.grad:
                session.wait_for_gradient(self)
            # What took the place of an input goes back in the other order, the inner session's first.
            table, flags = module._forward_hooks, module._forward_hooks_with_kwargs
            session.places.put(table, After(self), with_kwargs=flags, first=self.changes)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # removed while another thread is here: torch forgot with_kwargs
            return None
        self._waiting.take()  # of a call that ended in an exception, in a frame that had the same address
        given = Inputs(args, kwargs, self.names)
        reached = self.reached(given)
        if reached is None:
            return None
        call, part = reached
        shares, whole = None, given
        if self.site.address.grad:
            whole, shares = self._want_gradients(part, call, given)
        elif (new := self.changed(part, call)) is not None:
            note_several_leaves(given, part)
            whole = with_part(given, self.site.address.leaf, new)
        standins = None if whole is given else Standins(given, whole)
        if standins is not None or shares is not None:
            self._waiting.put(_Waiting(call.number, standins, shares))
        if standins is None:
            return None
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, StartHook):
                hook.restart()
        return whole.args, whole.kwargs

    def _want_gradients(self, part: Any, call: Call, given: Inputs) -> tuple[Any, InputShares | None]:
        """What the module goes on with, and the inputs of which it may share the gradient with other users."""
        own, whole = self.own(part, given, None)
        if not (call.has_graph and self.scope.is_open):
            return whole, None
        if self.action.changes:  # these are copies for this module alone
            self.hook_leaves(own, call.number)
            return whole, None
        return whole, InputShares(self._shared(own, part, call.number), given)

    def _shared(self, own: Any, part: Any, call: int) -> list[WantedInput]:
        """The inputs that others may use as well; those that only this module uses are hooked at once."""
        if not isinstance(part, torch.Tensor):
            self.action.on_structure(self, part, call)
        wanted = []
        for (path, tensor), (_, original) in zip(leaves(own), leaves(part), strict=True):
            if tensor is not original:  # frozen=True made a copy that only this module will use
                self.hook(tensor, call, path)
            elif not (tensor.requires_grad and torch.is_grad_enabled()):
                self.note_no_graph(tensor, call)
            elif self.is_copied_for_us(tensor):  # likewise, and edited first
                self.hook(tensor, call, path)
            else:
                self.scope.want(tensor)
                self.note_waiting(tensor)
                wanted.append(WantedInput(tensor, path))
        return wanted

    def after(self, module: nn.Module, given: Any, output: Any) -> Any:
        """After the forward: write back what the module did to its inputs, and hook whoever used them."""
        waiting = self._waiting.take(depth=3)
        if waiting is None:
            return None
        new = None if waiting.standins is None else waiting.standins.carry_back(output)
        if waiting.shares is not None:
            for wanted, users in waiting.shares.users(module, given, output):
                if users is None:
                    self.note = _HANDED_ON
                    self.hook(wanted.tensor, waiting.call, wanted.path)
                else:
                    hook_users(users, self, waiting.call, wanted.path)
        return new


class After(Hook):
    """The hook after it."""

    def __init__(self, tap: InputTap) -> None:
        self.tap = tap
        self.changes = tap.changes

    def __call__(self, module: nn.Module, *given_and_output: Any) -> Any:
        *given, output = given_and_output
        return self.tap.after(module, given, output)
