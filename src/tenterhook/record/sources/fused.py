"""nn.TransformerEncoderLayer, which torch may run as one operation: it would not with our hooks on it or in it.

The values would then differ in the last bits, so the hooks are taken off such a layer for that call.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tenterhook.platform.compiler import never_compile
from tenterhook.platform.frames import frame_here, keywords_of_call
from tenterhook.platform.hook_tables import Hook
from tenterhook.record.guard import guarded
from tenterhook.record.sources.outputs import Hub

Entry = tuple[dict[int, Any], int, Any]  # a table, a key in it, and the hook


class Fused(Hook):
    """A global hook before every module's call, there while some of our hooks are in such layers."""

    def __init__(self, hub: Hub) -> None:
        self.guard = hub.guard
        self.happened = False  # whether values were not seen because of it
        self._measuring = hub.measuring
        self._entries: dict[int, list[Entry]] = {}  # by the id of a layer
        self._handle: RemovableHandle | None = None

    def watch(self, layers: dict[int, list[int]], placed: list[tuple[dict[int, Any], int]]) -> None:
        """Look after those of the hooks that were placed that are in layers; `layers` gives these by id of table."""
        for table, key in placed if layers else ():
            for layer in layers.get(id(table), ()):
                self._entries.setdefault(layer, []).append((table, key, table[key]))
        if self._entries and self._handle is None:
            self._handle = register_module_forward_pre_hook(self)

    def remove(self) -> None:
        """Look no more."""
        self._entries.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._entries:
            self._switch(module, args)

    @guarded
    def _switch(self, module: nn.Module, args: Any) -> None:
        fused = is_fused(module, args)
        self.happened |= fused and (torch.is_grad_enabled() or self._measuring.without_gradients)
        for table, key, hook in self._entries.get(id(module), ()):
            if fused:
                table.pop(key, None)
            else:
                table[key] = hook


def is_fused(layer: Any, args: Any) -> bool:
    """Whether torch runs a layer as one operation; it can be that it does not where this is true."""
    if layer.training or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    try:
        attention = layer.self_attn
        parts = (attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
        tensors = [attention.in_proj_weight, attention.in_proj_bias, *(t for p in parts for t in (p.weight, p.bias))]
        tensors.append(args[0] if args else keywords_of_call(frame_here()).get("src"))
        graph = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
        return bool(attention.batch_first) and not graph
    except Exception:  # another kind of layer
        return False


never_compile(Fused.__call__, is_fused)
