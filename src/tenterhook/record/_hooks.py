"""The hooks that watch a model: thin, off while a step is not sampled, and never in the way of an exception."""

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tenterhook._handles import Hook
from tenterhook._replay import saves_hooked
from tenterhook._tree import leaves

graph_task = torch._C._current_graph_task_id
_WINDOW = 8  # sampled calls over which a unit must be silent to be dead
_SATURATING: dict[type, tuple[float, float]] = {nn.Tanh: (0.0, 0.97), nn.Sigmoid: (0.5, 0.47)}  # centre, distance


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """An entry from the user's program: counts its own time, and no exception of ours gets out."""

    @functools.wraps(method)
    def safely(self: Any, *args: Any) -> Any:
        recorder = self.recorder
        if not recorder.on or torch.compiler.is_compiling():
            return None
        start = time.perf_counter()
        try:
            return method(self, *args)
        except Exception as error:
            recorder.fail(error)
            return None
        finally:
            recorder.spent += time.perf_counter() - start

    return safely


class Value:
    """A tensor that a module gave, and the places at which it was seen, which share one measurement."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = 0 if tensor.is_inference() else tensor._version
        self.places: list[int] = []
        self.gradient: GradientHook | None = None

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, unchanged."""
        return self.tensor() is tensor and (tensor.is_inference() or tensor._version == self.version)


class GradientHook:
    """On a tensor: measures its gradient, for all places at which the tensor was seen."""

    def __init__(self, recorder: Any, part: Any) -> None:
        self.recorder = recorder
        self.part = part
        self.places: list[int] = []

    @guarded
    def __call__(self, grad: Tensor | None) -> None:
        self.recorder.saw_backward()
        if grad is not None and self.part is self.recorder.part:
            with torch.no_grad():
                self.recorder.micro.gather.add(self.places, grad)


class OutputHook(Hook):
    """After a module's forward: measures what it gives, and asks for the gradient."""

    def __init__(self, recorder: Any, model: Any, site: str, module: nn.Module) -> None:
        self.recorder = recorder
        self.model = model
        self.site = site
        self.kind = type(module).__name__
        self._places: dict[tuple[Any, str], int] = {}
        self._is_norm = isinstance(module, _BatchNorm)
        self._is_rectifier = isinstance(module, nn.ReLU | nn.ReLU6)
        self._limits = _SATURATING.get(type(module))
        self._alive: Tensor | None = None
        self._calls = 0

    @guarded
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self.recorder
        with_graph = torch.is_grad_enabled()
        again = graph_task() != -1
        if not (with_graph or recorder.without_gradients) or (again and saves_hooked(False) is not None):
            return  # validation, or a checkpoint that runs its function again
        if not again:
            recorder.begin_call()
        with torch.no_grad():
            if isinstance(output, Tensor):
                self._see((), output)
            else:
                for path, tensor in leaves(output):
                    self._see(path, tensor)
        if self._is_norm and with_graph:
            recorder.micro.modes[self.model.name, self.site] = module.training

    def _see(self, path: Any, tensor: Tensor) -> None:
        recorder = self.recorder
        values: dict[int, Value] = recorder.micro.values
        known = values.get(id(tensor))
        if known is None or not known.is_still(tensor):
            known = values[id(tensor)] = Value(tensor)
            if recorder.measures_outputs:
                recorder.micro.gather.add(known.places, tensor)
            if tensor.dim() > 1 and tensor.is_floating_point():
                recorder.micro.last_shape = tuple(tensor.shape)
        known.places.append(self._place(path, "output", tensor.dtype))
        if tensor.requires_grad and recorder.measures_gradients:
            if known.gradient is None:
                known.gradient = GradientHook(recorder, recorder.part)
                tensor.grad_fn  # noqa: B018  # read first: torch 2.13 can crash in register_hook otherwise
                handle = tensor.register_hook(known.gradient)
                if tensor.is_leaf:  # it outlives the graph
                    recorder.part.handles.append(handle)
            known.gradient.places.append(self._place(path, "output_grad", tensor.dtype))
        if (self._is_rectifier or self._limits is not None) and recorder.measures_outputs:
            self._watch_units(tensor)

    def _place(self, path: Any, what: str, dtype: object) -> int:
        known = self._places.get((path, what))
        if known is None:
            site = self.site + "".join(f"[{key}]" for key in path)
            known = self.recorder.places.number(self.model.name, site, what, self.kind, dtype)
            self._places[path, what] = known
        return known

    def _watch_units(self, tensor: Tensor) -> None:
        """Which units of a ReLU never fire over some calls; which share of a sigmoid's values is at its ends."""
        scalars, place = self.recorder.micro.scalars, self._place((), "output", tensor.dtype)
        if self._limits is not None:
            centre, far = self._limits
            scalars.add(("saturated", place), ((tensor.detach() - centre).abs() > far).double().mean())
            return
        if tensor.dim() < 2 or not tensor.numel():
            return
        tensor = tensor.detach()
        if tensor.dim() > 3:  # channels are units; in two steps, the first along neighbours, which is far faster
            tensor = tensor.flatten(2).amax(2)
        alive = tensor.flatten(0, -2).amax(0) > 0
        self._alive = alive if self._alive is None or self._alive.shape != alive.shape else self._alive | alive
        self._calls += 1
        if self._calls % _WINDOW == 0:
            scalars.add(("dead", place), 1 - self._alive.double().mean())
            self._alive = None


class RootHook(Hook):
    """Before a model is called: measures what it is called with. Always there; it also counts the calls."""

    def __init__(self, recorder: Any, model: Any, site: str, module: nn.Module) -> None:
        self.recorder = recorder
        self.model = model
        self.site = site
        self.kind = type(module).__name__

    @guarded
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        recorder = self.recorder
        if graph_task() != -1:
            return
        recorder.begin_root_call()
        if not recorder.sampling or not (torch.is_grad_enabled() or recorder.without_gradients):
            return
        given: tuple[tuple[Any, Any], ...] = (*enumerate(args), *(kwargs or {}).items())
        with torch.no_grad():
            for key, value in given:
                for path, tensor in leaves(value, (key,)):
                    site = self.site + ":in" + "".join(f"[{part}]" for part in path)
                    place = recorder.places.number(self.model.name, site, "input", self.kind, tensor.dtype)
                    recorder.micro.gather.add([place], tensor)
