"""Which hooks of a recorder are on modules: those that stay, and those that are there while a step is sampled."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tenterhook.platform.compiler import is_wrapper, never_compile
from tenterhook.platform.frames import frame_here, keywords_of_call
from tenterhook.platform.hook_tables import Hook, new_id, register
from tenterhook.record.model import Model
from tenterhook.record.models import Models
from tenterhook.record.sources.fused import Fused
from tenterhook.record.sources.outputs import Hub, OutputHook, WriteHook
from tenterhook.record.sources.roots import RootHook


class ModuleHooks:
    """Puts hooks on the modules of models, and takes them off."""

    def __init__(self, hub: Hub, models: Models, called: Callable[[], None]) -> None:
        self.fused = Fused(hub)
        self._hub, self._models, self._called = hub, models, called
        self._writes = WriteHook(hub)
        self._on: list[tuple[dict[int, Any], int]] = []  # while a step is sampled
        self._roots: list[RemovableHandle] = []
        self._outer: list[RemovableHandle] = []  # on what torch.compile has made of modules

    def handles(self) -> list[RemovableHandle]:
        """Of all that stay."""
        return [*self._roots, *self._outer]

    def root(self, model: Model, module: nn.Module) -> RootHook | None:
        """Count the calls of a model; of a slice of it unless those of its first layer are counted."""
        self._roots = [handle for handle in self._roots if handle.hooks_dict_ref() is not None]  # else it is gone
        first = next(iter(module), module) if type(module) is nn.Sequential else module
        found = ((name, one) for name, ref in model.modules if (one := ref()) is module or one is first)
        site, one = next(found, (".", module))
        if one is not module and any(handle.hooks_dict_ref() is one._forward_pre_hooks for handle in self._roots):
            return None
        hook = RootHook(self._hub, self._called, model.name, site, module)
        handles = self._outer if is_wrapper(module) else self._roots
        if id(module._forward_hooks) in model.fused or isinstance(module, torch.jit.ScriptModule):
            handles.append(register_module_forward_pre_hook(_Only(hook, module, self.fused)))
        else:
            flags = module._forward_pre_hooks_with_kwargs
            handles.append(register(module._forward_pre_hooks, hook, with_kwargs=flags))
        return hook

    def drop_roots(self) -> None:
        """Count calls no longer."""
        for handle in self._roots:
            handle.remove()
        self._roots.clear()

    def before_compiled(self, module: nn.Module, hook: Hook) -> None:
        """Have a hook before the calls of what torch.compile has made of a module."""
        self._outer.append(register(module._forward_pre_hooks, hook))

    def put_on(self) -> None:
        """A step is sampled: see what every module gives."""
        measuring = self._hub.measuring
        if not (measuring.outputs or measuring.gradients):
            return
        for model in self._models.all:
            for site, reference in () if model.compiled else model.modules:
                module = reference()
                if module is not None and not isinstance(module, torch.jit.ScriptModule):
                    self._put(module, self._hook(model, site, module))
        layers = {table: layers for model in self._models.all for table, layers in model.fused.items()}
        self.fused.watch(layers, self._on)

    def _put(self, module: nn.Module, hook: OutputHook) -> None:
        key = new_id()
        self._on.append((module._forward_hooks, key))
        module._forward_hooks[key] = hook
        if getattr(module, "inplace", False) is True:
            self._on.append((module._forward_pre_hooks, key))
            module._forward_pre_hooks[key] = self._writes

    def _hook(self, model: Model, site: str, module: nn.Module) -> OutputHook:
        hook = model.hooks.get(site)
        if hook is None or hook.module() is not module:  # it was exchanged
            hook = model.hooks[site] = OutputHook(self._hub, model.name, site, module)
        return hook

    def take_off(self) -> None:
        """It is no longer sampled."""
        self.fused.remove()
        for table, key in self._on:
            table.pop(key, None)
        self._on.clear()


class _Only(Hook):
    """A hook before one module, as a global one: it is not on the module."""

    def __init__(self, hook: RootHook, module: nn.Module, then: Fused) -> None:
        self._hook, self._module, self._then = hook, weakref.ref(module), then

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._module():
            self._hook(module, args, keywords_of_call(frame_here()))
            self._then(module, args)  # it may have come to be there just now


never_compile(_Only.__call__, keywords_of_call)
