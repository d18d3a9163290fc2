"""What modules give: hooks on every module of a model, while a step is sampled."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenterhook.platform.autograd import graph_task, saves_hooked
from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.hook_tables import Hook
from tenterhook.platform.jit import is_tracing
from tenterhook.platform.layers import BatchNorm, ConvNd
from tenterhook.record.births import Births
from tenterhook.record.events import PartCalled
from tenterhook.record.guard import Guard, guarded
from tenterhook.record.measuring import Measuring
from tenterhook.record.snapshots import Snapshots
from tenterhook.record.sources.backward import Passes
from tenterhook.record.sources.gradients import GradientHook, Value, ask_for_gradient
from tenterhook.record.sources.layers import LayerOrder
from tenterhook.record.sources.units import watcher_of
from tenterhook.values.containers import children

_DEEPEST, _MOST = 6, 64  # how deep structures are looked into, and how many tensors are taken from one
_PART_CALLED = PartCalled()
_LAYERS = (nn.Linear, ConvNd, nn.RNNBase)
_INPUTS = 8  # samples in which the inputs of a layer are looked at


class Hub(NamedTuple):
    """What hooks on modules need of a recorder."""

    guard: Guard
    measuring: Measuring
    passes: Passes
    feed: Any  # the recorder's
    layers: LayerOrder
    births: Births
    snapshots: Snapshots | None = None


class OutputHook(Hook):
    """After a module's forward: measures what it gives, and asks for the gradient."""

    def __init__(self, hub: Hub, model: str, site: str, module: nn.Module) -> None:
        self.guard = hub.guard
        self.module = weakref.ref(module)
        self._hub, self._measuring, self._passes = hub, hub.measuring, hub.passes
        self._model, self._site = model, site
        self._kind = type(module).__name__
        self._outputs: dict[tuple[Any, ...], int] = {}  # the places of what it gives, by path
        self._gradients: dict[tuple[Any, ...], list[int]] = {}
        self._is_norm = isinstance(module, BatchNorm)
        self._looks_at_inputs = _INPUTS if isinstance(module, _LAYERS) else 0  # how often, still
        self._has_parameters = any(p is not None for p in module._parameters.values())
        self._units = watcher_of(module)

    @guarded
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        with_graph = torch.is_grad_enabled()
        if not with_graph:
            self._note_silence(module)
        if is_tracing() or not (with_graph or self._measuring.without_gradients):
            return  # an export or validation
        if graph_task() == -1:
            if self._measuring.micro.passes:
                self._hub.feed(_PART_CALLED)
        elif saves_hooked(False) is not None:
            return  # a checkpoint runs its function again
        self._see_all(output)
        if self._hub.snapshots is not None:
            self._picture(module, output)
        self._measuring.micro.sample.last = self._site
        if with_graph:
            self._look_at(module, args, output)

    def _picture(self, module: nn.Module, output: Any) -> None:
        assert self._hub.snapshots is not None
        for path, tensor in [((), output)] if type(output) is Tensor else tensors_in(output):
            if not is_of_transform(tensor):
                site = self._site + "".join(f"[{key}]" for key in path)
                is_convolution = isinstance(module, ConvNd)
                self._hub.snapshots.look(self._model, site, is_convolution, self._measuring.step, tensor)

    def _note_silence(self, module: nn.Module) -> None:
        """Where a layer is in training mode, it may be by mistake that it is called without gradients."""
        if module.training and self._has_parameters and graph_task() == -1:
            self._measuring.micro.sample.silent.add((self._model, self._site))

    def _look_at(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_norm:
            self._look_at_norm(module, output)
        if self._has_parameters:
            self._look_at_layer(module, args, output)

    def _see_all(self, output: Any) -> None:
        if type(output) is not Tensor:
            for path, tensor in tensors_in(output):
                self._see(path, tensor)
        elif output.is_cuda and self._units is None and not is_of_transform(output):
            self._note(output)
        else:
            self._see((), output)

    def _look_at_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        """See what it is beside its values: where in the model, and what it gets."""
        self._hub.layers.note((self._model, self._site), module, output)
        if self._looks_at_inputs and args and is_data(args[0]) and is_trained(module):
            self._looks_at_inputs -= 1
            size = largest_column(module, args[0])
            self._measuring.micro.scalars.add(("input size", self._model, self._site), size)

    def _look_at_norm(self, module: Any, output: Any) -> None:
        micro, at = self._measuring.micro, (self._model, self._site)
        micro.sample.modes[at] = module.training
        alone = module.training and not isinstance(module, nn.SyncBatchNorm)  # that looks at the batches of all ranks
        if alone and isinstance(output, Tensor) and output.dim() > 1:
            micro.sample.batches[at] = len(output), output.numel() // max(1, output.shape[1])
        if module.affine and not any(p.requires_grad for p in module.parameters()):
            micro.sample.frozen.add(at)

    def _note(self, tensor: Tensor) -> None:
        """See the one value of a module on a device, with the least that can be done while a model runs."""
        measuring = self._measuring
        if measuring.outputs:
            place = self._outputs.get(())
            if place is None:
                place = self._outputs[()] = self._place((), "output", tensor.dtype)
            measuring.micro.sample.gather.note([place], tensor)
        if measuring.gradients and tensor.requires_grad:
            places = self._gradients.get(()) or self._asked((), tensor)
            ask_for_gradient(tensor, GradientHook(measuring, self._passes, places), measuring)

    def _see(self, path: Any, tensor: Tensor) -> None:
        if is_of_transform(tensor):  # inside vmap or grad of torch.func, where there are no values to read
            return
        measuring = self._measuring
        micro = measuring.micro
        place = self._outputs.get(path)
        if place is None:
            place = self._outputs[path] = self._place(path, "output", tensor.dtype)
        known = micro.sample.values.get(id(tensor))
        if known is not None and known.is_still(tensor):
            known.places.append(place)
        else:
            known = micro.sample.values[id(tensor)] = Value(tensor, [place])
            if measuring.outputs:
                micro.sample.gather.add(known.places, tensor, known.version)
        if measuring.gradients and tensor.requires_grad:
            if known.gradient is None:
                known.gradient = GradientHook(measuring, self._passes, [])
                ask_for_gradient(tensor, known.gradient, measuring)
            known.gradient.places += self._asked(path, tensor)
        if self._units is not None and measuring.outputs:
            self._units.look(tensor, place, micro)

    def _asked(self, path: Any, tensor: Tensor) -> list[int]:
        """The place of a value's gradient, alone in a list."""
        if path not in self._gradients:
            self._gradients[path] = [self._place(path, "output_grad", tensor.dtype)]
        return self._gradients[path]

    def _place(self, path: Any, what: str, dtype: object) -> int:
        site = self._site + "".join(f"[{key}]" for key in path)
        return self._measuring.places.number(self._model, site, what, self._kind, dtype)


def is_data(value: object) -> bool:
    """Whether a layer gets this from outside of what is trained."""
    if type(value) is not Tensor or value.requires_grad or not value.is_floating_point() or not value.numel():
        return False
    return value.layout is torch.strided and value.dim() > 1 and not is_of_transform(value)


def is_trained(module: nn.Module) -> bool:
    """Whether a layer has parameters of its own that are not frozen."""
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def largest_column(module: nn.Module, value: Tensor) -> Tensor:
    """The largest RMS of a feature, or channel."""
    axis = -1 if not isinstance(module, ConvNd) else 1 if value.dim() == module.weight.dim() else 0
    with torch.no_grad():
        return value.detach().float().movedim(axis, -1).flatten(0, -2).square().mean(0).amax().sqrt()


class WriteHook(Hook):
    """Before a module that writes into what it is given: whatever waits is measured."""

    def __init__(self, hub: Hub) -> None:
        self.guard, self._measuring = hub.guard, hub.measuring

    @guarded
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not is_tracing():
            self._measuring.micro.sample.gather.measure()


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in a structure; it may be large, and refer to itself."""
    found: list[tuple[tuple[Any, ...], Tensor]] = []
    seen: set[int] = set()
    waiting = [(path, value)]
    while waiting and len(found) < _MOST:
        at, one = waiting.pop()
        if isinstance(one, Tensor):
            found.append((at, one))
        elif len(at) < _DEEPEST and id(one) not in seen:
            seen.add(id(one))
            waiting += [((*at, key), child) for key, child in reversed(children(one)[:_MOST])]
    return found
