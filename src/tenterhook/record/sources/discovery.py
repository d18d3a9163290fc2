"""Models, as they come to be known: by a call, when they get new layers, and when torch.compile wraps them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tenterhook.platform.compiler import is_compiled, never_compile
from tenterhook.platform.frames import frame_here
from tenterhook.platform.hook_tables import Hook
from tenterhook.platform.jit import is_compared, is_tracing
from tenterhook.platform.layers import Loss
from tenterhook.record.events import Called
from tenterhook.record.guard import guarded
from tenterhook.record.holders import is_called_for_torch
from tenterhook.record.models import Models
from tenterhook.record.sources.compiling import Compiling, called_compiled
from tenterhook.record.sources.modules import ModuleHooks
from tenterhook.record.sources.outputs import Hub
from tenterhook.record.sources.wrapped import look_for_scalers

_CALLED = {trains: Called(trains) for trains in (True, False)}


class Discovery:
    """Keeps the models up to date, and the hooks on them."""

    def __init__(self, hub: Hub, models: Models) -> None:
        self.guard = hub.guard
        self.hooks = ModuleHooks(hub, models, self._model_called)
        self._hub, self._models = hub, models
        self._everything = False  # whether whatever is called counts
        self._looks = False  # whether models are looked for, while a step is sampled
        self._stale = False  # whether a module of a model was exchanged
        self._handle: RemovableHandle | None = None  # of the global hook, while models are looked for
        self._compiling: Compiling | None = None

    def install(self, models: Iterable[tuple[str, nn.Module]], everything: bool) -> None:
        """Begin with these, and look for others or not."""
        self._everything = self._looks = everything
        self._compiling = Compiling(self._wrapped, self._compiles, self._grows, all_code=everything)
        for name, module in models:
            model = self._models.add(name, module)
            model.compiled = is_compiled(module)
            self.hooks.root(model, module)

    def handles(self) -> list[Any]:
        """Of all that stays."""
        return [*([self._compiling] if self._compiling else ()), *self.hooks.handles()]

    def put_on(self) -> None:
        """A step is sampled."""
        if self._looks and self._handle is None:
            self._handle = register_module_forward_pre_hook(_CallHook(self))
        self.hooks.put_on()

    def take_off(self) -> None:
        """It is no longer sampled."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.hooks.take_off()

    def find_holder(self, parameter: Tensor | None) -> None:
        """Where models are not found by their calls, an optimizer's first parameter leads to one."""
        looks_elsewhere = self._everything and not self._looks
        if looks_elsewhere and parameter is not None and self._models.parameter(parameter) is None:
            self._models.find_holder(parameter, frame_here(2))

    @guarded
    def called(self, module: nn.Module, args: Any) -> None:
        """Any module, while a step is sampled: is it of a model that is not known yet? Losses are none."""
        if self._models.knows(module) or isinstance(module, Loss) or is_compared(frame_here()):
            return
        if is_called_for_torch(frame_here(2)):
            return
        look_for_scalers()
        model = self._models.discover(module, frame_here(2))
        if is_compiled(module):
            self._without_modules()
        if model is None:
            return
        root = self.hooks.root(model, module)
        if self._hub.measuring.sampled:
            self._put_on_again()
            self.hooks.fused(module, args)  # by itself it would first see the next call
        if root is not None:
            root.see(module, args)  # likewise

    def knows(self, module: nn.Module) -> bool:
        """Whether a module belongs to one of the models."""
        return self._models.knows(module)

    def _model_called(self) -> None:
        if self._stale:
            self._look_again()
        trains = torch.is_grad_enabled()
        if trains or not is_compared(frame_here()):
            self._hub.feed(_CALLED[trains])
            self._hub.measuring.micro.forwards[trains] += 1

    def _look_again(self) -> None:
        self._stale = False
        self._models.look()
        if self._hub.measuring.sampled:
            self._put_on_again()

    def _put_on_again(self) -> None:
        self.take_off()
        self.put_on()

    def _grows(self, module: nn.Module) -> None:
        """A module gets a new part: that is looked at when the model is called next."""
        self._stale |= self._models.grows(module)

    @guarded
    def _wrapped(self, module: nn.Module) -> None:
        """torch.compile has wrapped a module: its hooks run outside of what is compiled."""
        if self._everything or any(self._models.knows(part) for part in module.children()):
            self._without_modules()
            if self._everything:
                self.hooks.before_compiled(module, _CallHook(self))

    @guarded
    def _compiles(self) -> None:
        """Something is about to be compiled, and may have a model of ours in it."""
        module = called_compiled(frame_here(1))
        if self._everything and module is not None and not self._models.knows(module):
            self._models.discover(module, frame_here(1))
        self._without_modules()
        self.hooks.drop_roots()

    def _without_modules(self) -> None:
        """torch.compile runs: hooks on modules would have it compile again. Parameters and losses go on."""
        for model in self._models.all:
            model.compiled = True
        self._looks = False
        self.take_off()


class _CallHook(Hook):
    """The global hook: which models are there?"""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self._discovery.knows(module) and not torch.compiler.is_compiling() and not is_tracing():
            self._discovery.called(module, args)


never_compile(_CallHook.__call__, Discovery.called)
