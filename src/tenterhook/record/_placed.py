"""Which hooks of a recorder are where: those that stay, and those that are there while a step is sampled."""

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tenterhook._handles import Hook
from tenterhook.record._compiling import never_compile
from tenterhook.record._hooks import OutputHook, RootHook, WriteHook
from tenterhook.record._models import Model
from tenterhook.record._sentinels import Sentinels

_ids = itertools.count(-1_000_000_000, -1)  # far from torch's own, which count up, and from those of sessions


class Placed:
    """The hooks of a recorder on modules and parameters."""

    def __init__(self, recorder: Any) -> None:
        self.sentinels = Sentinels(recorder)
        self.discovers = False  # whether models are looked for, while a step is sampled
        self._recorder = recorder
        self._writes = WriteHook(recorder)
        self._discovery: RemovableHandle | None = None
        self._on: list[tuple[dict[int, Any], int]] = []  # while a step is sampled
        self._roots: list[RemovableHandle] = []
        self._outer: list[RemovableHandle] = []  # on what torch.compile has made of modules

    def handles(self) -> list[RemovableHandle]:
        """Of all that stay."""
        return [*self._roots, *self._outer, *self.sentinels.handles()]

    def root(self, model: Model, module: nn.Module) -> RootHook:
        """Count the calls of a model."""
        site = next((name for name, ref in model.modules if ref() is module), ".")
        hook = RootHook(self._recorder, model, site, module)
        handles = self._outer if hasattr(module, "_orig_mod") else self._roots
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        self.watch_last(module)
        return hook

    def watch_last(self, module: nn.Module) -> None:
        """See backward passes by the last parameter of a model."""
        trained = [p for p in module.parameters() if p.requires_grad and not isinstance(p, nn.UninitializedParameter)]
        self.sentinels.post(trained[-1:])

    def drop_roots(self) -> None:
        """Count calls no longer."""
        for handle in self._roots:
            handle.remove()
        self._roots.clear()

    def discover_by(self, module: nn.Module) -> None:
        """Look for models when this one is called, which torch.compile has wrapped."""
        self._outer.append(module.register_forward_pre_hook(_Discovery(self._recorder)))

    def put_on(self) -> None:
        """A step is sampled: see what every module gives."""
        recorder = self._recorder
        if self.discovers and self._discovery is None:
            self._discovery = register_module_forward_pre_hook(_Discovery(recorder))
        if recorder.what.isdisjoint(("output", "output_grad")):
            return
        for model in recorder.models.all:
            for site, reference in () if model.compiled else model.modules:
                module = reference()
                if module is not None and not isinstance(module, torch.jit.ScriptModule):
                    key = next(_ids)
                    self._on.append((module._forward_hooks, key))
                    module._forward_hooks[key] = self._hook(model, site, module)
                    if getattr(module, "inplace", False) is True:
                        self._on.append((module._forward_pre_hooks, key))
                        module._forward_pre_hooks[key] = self._writes

    def _hook(self, model: Model, site: str, module: nn.Module) -> Any:
        hook = model.hooks.get(site)
        if hook is None or hook.module() is not module:  # it was exchanged
            hook = model.hooks[site] = OutputHook(self._recorder, model, site, module)
        return hook

    def take_off(self) -> None:
        """It is no longer sampled."""
        if self._discovery is not None:
            self._discovery.remove()
            self._discovery = None
        for table, key in self._on:
            table.pop(key, None)
        self._on.clear()


class _Discovery(Hook):
    """The global hook: which models are there?"""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and not self.recorder.models.knows(module):
            self.recorder.called(module, args)


never_compile(_Discovery.__call__)
