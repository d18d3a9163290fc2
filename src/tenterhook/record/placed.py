"""Which hooks of a recorder are where: those that stay, and those that are there while a step is sampled."""

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tenterhook.platform.frames import CALLS, all_variables, frames_from
from tenterhook.platform.hook_tables import Hook, new_id, register
from tenterhook.record.compiling import never_compile
from tenterhook.record.hooks import OutputHook, RootHook, WriteHook, guarded, is_tracing
from tenterhook.record.models import Model
from tenterhook.record.sentinels import Sentinels


class Placed:
    """The hooks of a recorder on modules and parameters."""

    def __init__(self, recorder: Any) -> None:
        self.sentinels = Sentinels(recorder)
        self.discovers = False  # whether models are looked for, while a step is sampled
        self._recorder = recorder
        self._writes = WriteHook(recorder)
        self._discovery: RemovableHandle | None = None
        self._on: list[tuple[dict[int, Any], int]] = []  # while a step is sampled
        self.fused = Fused(recorder)
        self._switch: RemovableHandle | None = None  # that of the line above
        self._roots: list[RemovableHandle] = []
        self._outer: list[RemovableHandle] = []  # on what torch.compile has made of modules

    def handles(self) -> list[RemovableHandle]:
        """Of all that stay."""
        return [*self._roots, *self._outer, *self.sentinels.handles()]

    def root(self, model: Model, module: nn.Module) -> RootHook | None:
        """Count the calls of a model; of a slice of it unless those of its first layer are counted."""
        self._roots = [handle for handle in self._roots if handle.hooks_dict_ref() is not None]  # else it is gone
        first = next(iter(module), module) if type(module) is nn.Sequential else module
        found = ((name, one) for name, ref in model.modules if (one := ref()) is module or one is first)
        site, one = next(found, (".", module))
        if one is not module and any(handle.hooks_dict_ref() is one._forward_pre_hooks for handle in self._roots):
            return None
        hook = RootHook(self._recorder, model, site, module)
        handles = self._outer if hasattr(module, "_orig_mod") else self._roots
        if id(module._forward_hooks) in model.fused or isinstance(module, torch.jit.ScriptModule):
            handles.append(register_module_forward_pre_hook(_Only(hook, module, self.fused)))
        else:
            flags = module._forward_pre_hooks_with_kwargs
            handles.append(register(module._forward_pre_hooks, hook, with_kwargs=flags))
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
        self._outer.append(register(module._forward_pre_hooks, _Discovery(self._recorder)))

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
                    key = new_id()
                    self._on.append((module._forward_hooks, key))
                    module._forward_hooks[key] = self._hook(model, site, module)
                    if getattr(module, "inplace", False) is True:
                        self._on.append((module._forward_pre_hooks, key))
                        module._forward_pre_hooks[key] = self._writes
        layers = {table: layers for model in recorder.models.all for table, layers in model.fused.items()}
        for table, hook_id in self._on if layers else ():
            for layer in layers.get(id(table), ()):
                self.fused.hooks.setdefault(layer, []).append((table, hook_id, table[hook_id]))
        if self.fused.hooks and self._switch is None:
            self._switch = register_module_forward_pre_hook(self.fused)

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
        if self._switch is not None:
            self._switch.remove()
            self._switch = None
        self.fused.hooks.clear()
        for table, key in self._on:
            table.pop(key, None)
        self._on.clear()


class _Discovery(Hook):
    """The global hook: which models are there?"""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.recorder.models.knows(module) and not torch.compiler.is_compiling() and not is_tracing():
            self.recorder.called(module, args)


class _Only(Hook):
    """A hook before one module, as a global one: it is not on the module."""

    def __init__(self, hook: RootHook, module: nn.Module, then: "Fused") -> None:
        self._hook, self._module, self._then = hook, weakref.ref(module), then

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._module():
            self._hook(module, args, _keywords())
            self._then(module, args)  # it may have come to be there just now


class Fused(Hook):
    """A global hook: before torch runs an nn.TransformerEncoderLayer as one operation, our hooks are taken off it.

    With a hook on it or in it, torch would run its parts one by one, and the values would differ in the last bits.
    """

    def __init__(self, recorder: Any) -> None:
        self.hooks: dict[int, list[tuple[dict[int, Any], int, Any]]] = {}  # by the id of a layer: table, key and hook
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any) -> None:
        if id(module) in self.hooks:
            self._switch(module, args)

    @guarded
    def _switch(self, module: nn.Module, args: Any) -> None:
        fused = _is_fused(module, args)
        self.recorder.fused |= fused and (torch.is_grad_enabled() or self.recorder.without_gradients)
        for table, key, hook in self.hooks.get(id(module), ()):
            if fused:
                table.pop(key, None)
            else:
                table[key] = hook


def _is_fused(layer: Any, args: Any) -> bool:
    """Whether torch runs a layer as one operation; it can be that it does not where this is true."""
    if layer.training or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    try:
        attention = layer.self_attn
        parts = (attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
        tensors = [attention.in_proj_weight, attention.in_proj_bias, *(t for p in parts for t in (p.weight, p.bias))]
        tensors.append(args[0] if args else _keywords().get("src"))
        graph = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
        return bool(attention.batch_first) and not graph
    except Exception:  # another kind of layer
        return False


def _keywords() -> dict[str, Any]:
    """Those of the module's call that a global hook runs in, which is told of none."""
    try:
        frame = next(one for one in frames_from(sys._getframe(1)) if one.f_code.co_filename == CALLS)
        return dict(all_variables(frame)["kwargs"])
    except Exception:  # in another torch
        return {}


never_compile(_Discovery.__call__, _Only.__call__, Fused.__call__, _keywords)
