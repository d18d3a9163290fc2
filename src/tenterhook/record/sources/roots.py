"""The calls of models: counted in every step, and their inputs measured in sampled ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tenterhook.platform.autograd import graph_task
from tenterhook.platform.hook_tables import Hook
from tenterhook.platform.jit import is_tracing
from tenterhook.record.guard import guarded
from tenterhook.record.sources.gradients import Value
from tenterhook.record.sources.outputs import Hub, tensors_in


class RootHook(Hook):
    """Before a model is called: measures what it is called with. Always there; it also counts the calls."""

    def __init__(self, hub: Hub, called: Callable[[], None], model: str, site: str, module: nn.Module) -> None:
        self.guard = hub.guard
        self._measuring, self._called, self._births = hub.measuring, called, hub.births
        self._model, self._site = model, site
        self._kind = type(module).__name__

    @guarded
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self.see(module, args, kwargs)

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The model is about to be called with these."""
        if graph_task() != -1 or is_tracing():
            return
        self._called()
        self._births.called(module, args, kwargs or {})
        measuring = self._measuring
        if not (torch.is_grad_enabled() or measuring.without_gradients):
            return
        given = (*enumerate(args), *(kwargs or {}).items())
        for key, value in given:
            measuring.micro.given.add((self._model, f"{self._site}:in[{key}]"), value)
        if measuring.sampled and "input" in measuring.what:
            self._measure(given)

    def _measure(self, given: tuple[tuple[Any, Any], ...]) -> None:
        measuring = self._measuring
        for key, value in given:
            for path, tensor in tensors_in(value, (key,)):
                site = self._site + ":in" + "".join(f"[{part}]" for part in path)
                place = measuring.places.number(self._model, site, "input", self._kind, tensor.dtype)
                known = Value(tensor, [place])
                measuring.micro.sample.gather.add(known.places, tensor, known.version)
