"""The hooks that watch a model: thin, off while a step is not sampled, and never in the way of an exception."""

import contextlib
import functools
import itertools
import math
import signal
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, compiler, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tenterhook.platform.checkpoints import graph_task, saves_hooked, unrecorded
from tenterhook.platform.hook_tables import Hook
from tenterhook.record.gather import is_plain, is_wrapped
from tenterhook.stats.native import mark_firing
from tenterhook.values.containers import children
from tenterhook.values.tree import version_of

dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
is_tracing = torch._C._is_tracing  # torch.jit.trace, which would take what we do for the model's
_DEEPEST, _MOST = 6, 64  # how deep structures are looked into, and how many tensors are taken from one
clock = time.perf_counter
_ids = itertools.count(-1_000_000_000, -1)  # far from torch's own, which count up, and from those of sessions
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = {getattr(signal, name) for name in _NAMES if hasattr(signal, name)}
_WINDOW = 8  # sampled calls over which a unit must be silent to be dead
_LINEAR = {f"{name}Backward0" for name in ("Addmm", "Mm", "Linear", "MkldnnLinear", "Bmm", "Baddbmm")}
_OVER_CHANNELS = ("Convolution", "BatchNorm", "GroupNorm")
_SATURATING = ((nn.Tanh, (0.0, 0.97)), (nn.Sigmoid, (0.5, 0.47)))  # centre, distance


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """An entry from the user's program: counts its own time, and no exception of ours gets out."""

    @functools.wraps(method)
    def safely(self: Any, *args: Any) -> Any:
        recorder = self.recorder
        if not recorder.on or compiler._is_compiling_flag:  # what is_compiling() asks
            return None
        with recorder.lock:
            start = clock()  # to wait for another thread is not our own time
            try:
                if not dispatch_modes() and not function_modes():
                    return method(self, *args)
                with unrecorded(), torch._C.DisableTorchFunction():  # the user's modes are not for us
                    return method(self, *args)
            except Exception as error:
                recorder.fail(error)
                return None
            finally:
                recorder.spent += clock() - start

    return safely


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Have signals wait, such as Ctrl-C: a step that is half written would be lost, and what comes after it too."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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

    __slots__ = ("places", "recorder", "step")
    __torch_unserializable__ = True  # torch.save leaves it out, and need not warn of that

    def __init__(self, recorder: Any, places: list[int]) -> None:
        self.recorder = recorder
        self.step = recorder.steps
        self.places = places

    @guarded
    def __call__(self, grad: Tensor | None) -> None:
        recorder = self.recorder
        micro = recorder.micro
        task = graph_task()
        if task not in micro.tasks and task not in micro.asking:
            recorder.saw_backward()
        if grad is None or task in micro.asking or self.step != recorder.steps or not recorder.sampling:
            return
        if type(grad) is Tensor and grad.is_cuda and not is_wrapped(grad):
            micro.gather.note([*self.places], grad)
            return
        # A sum hands one gradient on to all its terms: it is measured once.
        values = micro.values
        known = values.get(id(grad))
        if known is not None and known.is_still(grad):
            known.places += self.places
        else:
            known = values[id(grad)] = Value(grad, [*self.places])  # for itself: more can be added to it
            micro.gather.add(known.places, grad, known.version)


class OutputHook(Hook):
    """After a module's forward: measures what it gives, and asks for the gradient."""

    def __init__(self, recorder: Any, model: Any, site: str, module: nn.Module) -> None:
        self.recorder = recorder
        self.model = model
        self.site = site
        self.module = weakref.ref(module)
        self.kind = type(module).__name__
        self._outputs: dict[tuple[Any, ...], int] = {}  # the places of what it gives, by path
        self._gradients: dict[tuple[Any, ...], list[int]] = {}
        self._is_norm = isinstance(module, _BatchNorm)
        self._is_rectifier = isinstance(module, nn.ReLU | nn.ReLU6)
        self._limits = next((limits for kind, limits in _SATURATING if kind is type(module)), None)
        self._is_simple = not self._is_rectifier and self._limits is None
        # By the module before: over how many calls, which units have fired, and on which axis these are.
        self._alive: dict[str, tuple[int, Tensor | None, int]] = {}

    @guarded
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self.recorder
        with_graph = torch.is_grad_enabled()
        again = graph_task() != -1
        if (
            is_tracing()
            or not (with_graph or recorder.without_gradients)
            or (again and saves_hooked(False) is not None)
        ):
            return  # an export, validation, or a checkpoint that runs its function again
        if not again and recorder.micro.tasks:
            recorder.begin_call()
        if type(output) is Tensor:
            if output.is_cuda and self._is_simple and not is_wrapped(output):
                self._note(output)
            else:
                self._see((), output)
        else:
            for path, tensor in tensors_in(output):
                self._see(path, tensor)
        recorder.micro.last = self
        if self._is_norm and with_graph:
            at = self.model.name, self.site
            recorder.micro.modes[at] = module.training
            if module.affine and not any(p.requires_grad for p in module.parameters()):
                recorder.micro.frozen.add(at)

    def _note(self, tensor: Tensor) -> None:
        """The same as `_see` for the one value of a module on a device."""
        recorder = self.recorder
        if recorder.measures_outputs:
            place = self._outputs.get(())
            if place is None:
                place = self._outputs[()] = self._place((), "output", tensor.dtype)
            recorder.micro.gather.note([place], tensor)
        if recorder.measures_gradients and tensor.requires_grad:
            handle = _hook_gradient(tensor, GradientHook(recorder, self._gradients.get(()) or self._asked((), tensor)))
            if handle is not None:
                recorder.part.handles.append(handle)

    def _asked(self, path: Any, tensor: Tensor) -> list[int]:
        """The place of a value's gradient, alone in a list."""
        if path not in self._gradients:
            self._gradients[path] = [self._place(path, "output_grad", tensor.dtype)]
        return self._gradients[path]

    def _see(self, path: Any, tensor: Tensor) -> None:
        if is_wrapped(tensor):  # inside vmap or grad of torch.func, where there are no values to read
            return
        recorder = self.recorder
        micro = recorder.micro
        place = self._outputs.get(path)
        if place is None:
            place = self._outputs[path] = self._place(path, "output", tensor.dtype)
        known = micro.values.get(id(tensor))
        if known is not None and known.is_still(tensor):
            known.places.append(place)
        else:
            known = micro.values[id(tensor)] = Value(tensor, [place])
            if recorder.measures_outputs:
                micro.gather.add(known.places, tensor, known.version)
        if recorder.measures_gradients and tensor.requires_grad:
            if known.gradient is None:
                known.gradient = GradientHook(recorder, [])
                handle = _hook_gradient(tensor, known.gradient)
                if handle is not None:
                    recorder.part.handles.append(handle)
            known.gradient.places += self._asked(path, tensor)
        if (self._is_rectifier or self._limits is not None) and recorder.measures_outputs:
            self._watch_units(tensor, place)

    def _place(self, path: Any, what: str, dtype: object) -> int:
        site = self.site + "".join(f"[{key}]" for key in path)
        return self.recorder.places.number(self.model.name, site, what, self.kind, dtype)

    def _watch_units(self, tensor: Tensor, place: int) -> None:
        """Which units of a ReLU never fire over some calls; which share of a sigmoid's values is at its ends."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return
        micro = self.recorder.micro
        use = "" if micro.last is None else micro.last.site  # one module may be used after several others
        if self._limits is not None:
            centre, far = self._limits
            share = ((tensor.detach() - centre).abs() > far).double().mean()
            micro.scalars.add(("saturated", place, use), share)
            return
        if tensor.dim() < 2 or not tensor.numel() or not tensor.is_floating_point():
            return
        calls, alive, axis = self._alive.get(use, (0, None, 0))
        if calls == 0 or axis >= tensor.dim():
            axis = axis_of_units(tensor)
        tensor, units = tensor.detach(), tensor.shape[axis]
        if alive is None or alive.numel() != units or alive.device != tensor.device:
            calls, alive = 0, torch.zeros(units, dtype=torch.bool, device=tensor.device)
        outer = math.prod(tensor.shape[:axis])
        if is_plain(tensor):
            mark_firing(tensor, outer, tensor.numel() // (outer * units), alive)
        else:
            alive = alive | (tensor.reshape(outer, units, -1) > 0).any(2).any(0)
        self._alive[use] = calls + 1, alive, axis
        if calls + 1 == _WINDOW:
            micro.scalars.add(("dead", place, use), 1 - alive.double().mean())
            del self._alive[use]


def axis_of_units(tensor: Tensor) -> int:
    """The channels of a convolution or of its norm, or the features of a linear layer.

    The graph tells, also where axes have changed places since. Where it does not, images have channels.
    """
    axes = list(range(tensor.dim()))  # where those of the value are in what a node gives; -1: nowhere
    shape: Sequence[int] = tensor.shape
    node: Any = tensor.grad_fn
    which = tensor.output_nr
    for _ in range(6):
        before, shape = shape, _shape_of(node, which)
        if not shape:
            break
        if len(shape) != len(before):
            same = _same_axes(before, shape)
            axes = [same.get(axis, -1) for axis in axes]
        name = node.name()
        units = 1 if any(kind in name for kind in _OVER_CHANNELS) else len(shape) - 1 if name in _LINEAR else None
        if units is not None:
            if units in axes:
                return axes.index(units)
            break
        if name in ("TransposeBackward0", "TBackward0"):
            dims = (0, 1) if name[1] == "B" else (node._saved_dim0, node._saved_dim1)
            one, other = (_signed(dim) % len(shape) for dim in dims)
            axes = [{one: other, other: one}.get(axis, axis) for axis in axes]
        elif name == "PermuteBackward0":
            axes = [axis if axis < 0 else _signed(node._saved_dims[axis]) % len(shape) for axis in axes]
        node, which = node.next_functions[0] if node.next_functions else (None, 0)
    return 1 if tensor.dim() > 3 else tensor.dim() - 1


def _shape_of(node: Any, which: int) -> Sequence[int]:
    """Of what a node has given."""
    try:
        return tuple(node._input_metadata[which].shape)
    except (AttributeError, IndexError, RuntimeError):
        return ()


def _same_axes(shape: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """Which axes have stayed as they were where their number has changed: from the first on, and up to the last."""
    many, first, last = min(len(shape), len(before)), 0, 1
    while first < many and shape[first] == before[first]:
        first += 1
    while last <= many - first and shape[-last] == before[-last]:
        last += 1
    same = {axis: axis for axis in range(first)}
    return same | {len(shape) - i: len(before) - i for i in range(1, last)}


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number  # as torch keeps -1 in its graph


class WriteHook(Hook):
    """Before a module that writes into what it is given: whatever waits is measured."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    @guarded
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not is_tracing():
            self.recorder.micro.gather.measure()


def _hook_gradient(tensor: Tensor, hook: GradientHook) -> Any:
    """What register_hook does, in half of the time; a leaf, which outlives the graph, gets a handle."""
    node = tensor.grad_fn  # read first: torch 2.13 can crash in register_hook otherwise
    if node is None:
        return tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    hooks[next(_ids)] = hook
    return None


class RootHook(Hook):
    """Before a model is called: measures what it is called with. Always there; it also counts the calls."""

    def __init__(self, recorder: Any, model: Any, site: str, module: nn.Module) -> None:
        self.recorder = recorder
        self.model = model
        self.site = site
        self.kind = type(module).__name__

    @guarded
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self.see(args, kwargs)

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The model is about to be called with these."""
        recorder = self.recorder
        if graph_task() != -1 or is_tracing():
            return
        recorder.begin_root_call()
        if not recorder.sampling or "input" not in recorder.what:
            return
        if not (torch.is_grad_enabled() or recorder.without_gradients):
            return
        given: tuple[tuple[Any, Any], ...] = (*enumerate(args), *(kwargs or {}).items())
        for key, value in given:
            for path, tensor in tensors_in(value, (key,)):
                site = self.site + ":in" + "".join(f"[{part}]" for part in path)
                place = recorder.places.number(self.model.name, site, "input", self.kind, tensor.dtype)
                known = Value(tensor, [place])
                recorder.micro.gather.add(known.places, tensor, known.version)
