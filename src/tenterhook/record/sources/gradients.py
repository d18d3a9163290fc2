"""The gradients of values: a hook on each tensor that a module gives."""

import weakref

from torch import Tensor

from tenterhook.platform.autograd import graph_task
from tenterhook.platform.functorch import is_of_transform
from tenterhook.platform.tensors import hook_gradient
from tenterhook.record.guard import guarded
from tenterhook.record.measuring import Measuring
from tenterhook.record.sources.backward import Passes
from tenterhook.values.tree import version_of


class Value:
    """A tensor that was measured, and the places at which it was seen, which share the measurement."""

    __slots__ = ("gradient", "places", "tensor", "version")

    def __init__(self, tensor: Tensor, places: list[int]) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = version_of(tensor)
        self.places = places
        self.gradient: GradientHook | None = None

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, unchanged; one of inference mode does not tell."""
        return self.tensor() is tensor and self.version >= 0 and tensor._version == self.version


class GradientHook:
    """On a tensor: measures its gradient, for all places at which the tensor was seen."""

    __slots__ = ("_measuring", "_passes", "_step", "guard", "places")
    __torch_unserializable__ = True  # torch.save leaves it out, and need not warn of that

    def __init__(self, measuring: Measuring, passes: Passes, places: list[int]) -> None:
        self.guard = passes.guard
        self.places = places
        self._measuring, self._passes, self._step = measuring, passes, measuring.step

    @guarded
    def __call__(self, grad: Tensor | None) -> None:
        measuring = self._measuring
        if not self._passes.measures(graph_task()) or grad is None:
            return
        if self._step != measuring.step or not measuring.sampled:
            return
        micro = measuring.micro
        if type(grad) is Tensor and grad.is_cuda and not is_of_transform(grad):
            micro.sample.gather.note([*self.places], grad)
            return
        # A sum hands one gradient on to all its terms: it is measured once.
        known = micro.sample.values.get(id(grad))
        if known is not None and known.is_still(grad):
            known.places += self.places
        else:
            known = micro.sample.values[id(grad)] = Value(grad, [*self.places])  # for itself: more can be added to it
            micro.sample.gather.add(known.places, grad, known.version)


def ask_for_gradient(tensor: Tensor, hook: GradientHook, measuring: Measuring) -> None:
    """Have a hook called with the gradient of a tensor; on a leaf, until the part is over."""
    handle = hook_gradient(tensor, hook)
    if tensor.grad_fn is None:
        measuring.part.handles.append(handle)
