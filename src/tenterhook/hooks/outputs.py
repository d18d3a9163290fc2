"""A tap on the output of a module."""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.jit import ScriptModule

from tenterhook.hooks.gradients import CallStart, GradientTap, note_several_leaves
from tenterhook.hooks.tap import with_part
from tenterhook.platform.autograd import next_sequence_number
from tenterhook.platform.frames import PerCall
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.tree import leaves

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

SCRIPTED = "it runs as TorchScript, which calls no Python hooks; ask for the module around it"


class OutputTap(GradientTap):
    """The forward hook of a module."""

    _start: "StartHook | None" = None

    def place(self, session: "Session") -> None:
        module = session.module_of(self.site)
        if isinstance(module, ScriptModule):
            self.missed = SCRIPTED
            return
        session.places.put_plainly(module._forward_hooks, self)
        if self.site.address.grad:
            session.wait_for_gradient(self)
        if self.action.changes and self.site.address.grad:
            self._start = StartHook()
            session.places.at_end(self._start.calls.clear)
            session.places.put(module._forward_pre_hooks, self._start, first=True)

    def __call__(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        start = None if self._start is None else self._start.calls.take()
        return self.handle(output, start)

    def handle(self, output: Any, start: CallStart | None) -> Any:
        """Do what is to be done with a value that was just made. Returns what takes its place, or None."""
        reached = self.reached(output)
        if reached is None:
            return None
        call, part = reached
        if self.site.address.grad:
            own, whole = self.own(part, output, start)
            if call.has_graph and self.scope.is_open:
                self.hook_leaves(own, call.number)
            return None if whole is output else whole
        new = self.changed(part, call)
        if new is None:
            return None
        note_several_leaves(output, part)
        return with_part(output, self.site.address.leaf, new)


class StartHook(Hook):
    """Before a module's forward: when did the call start? It tells what the module made from what it only hands on."""

    def __init__(self) -> None:
        self.calls: PerCall[CallStart] = PerCall()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        nodes = {tensor.grad_fn for _, tensor in leaves(args)}
        self.calls.put(CallStart(next_sequence_number(), nodes))

    def restart(self) -> None:
        """What takes the place of an input is as old as the input."""
        self.calls.update(lambda start: start._replace(number=next_sequence_number()))
