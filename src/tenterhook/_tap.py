"""A tap: what to do at one site, as a PyTorch hook.

A tap works out whether a call is its session's own and which call it is, and hands the value on: `reach` for a
value, `arrive` for the gradient of each leaf, which it gets by a tensor hook. The verbs are kinds of Tap.

Whose call is it? The scopes of the sessions that are open in this thread or async task are in a context variable:
a tap that fires outside its scope only counts. A call inside a backward pass is a checkpoint's recomputation and
is not counted again.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from tenterhook._address import may_cover
from tenterhook._handles import Hook
from tenterhook._inputs import Inputs, argument_names
from tenterhook._replay import Replays
from tenterhook._share import Input, OwnShares
from tenterhook._sites import Site
from tenterhook._tree import Path, describe, itself, leaves, paths_of, pick, rebuild

_open_scopes: "ContextVar[tuple[Scope, ...]]" = ContextVar("tenterhook", default=())
here = _open_scopes.get
graph_task = torch._C._current_graph_task_id


class Scope:
    """What the taps of one session share. Holds nothing that holds a tap, so that a session leaves no cycle."""

    _prune_at = 1024

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen
        self.handles: list[RemovableHandle] = []  # of hooks on tensors and graph nodes

    def add(self, handle: RemovableHandle) -> None:
        """Remember a tensor hook; those that died with their graph are let go now and then."""
        self.handles.append(handle)
        if len(self.handles) > self._prune_at:
            self.handles = [h for h in self.handles if h.hooks_dict_ref() is not None]
            self._prune_at = max(1024, 2 * len(self.handles))

    def thaw(self, tensor: Tensor) -> Tensor:
        """With frozen=True: a tensor that autograd ignored, as one that it follows from here on."""
        if not self.frozen or tensor.requires_grad or not _can_have_gradient(tensor):
            return tensor
        return tensor.detach().requires_grad_().clone() if torch.is_grad_enabled() else tensor


class Tap(Hook):
    """What to do at one site, as a hook. A verb overrides `reach` and `arrive`."""

    calls = 0
    elsewhere = 0
    recomputed = 0
    is_view = False
    note = ""  # for the report, whatever came
    missed = ""  # why the value was not there when the module ran, for the report
    pending: dict[int, tuple[OwnShares, list[tuple[Tensor, int, Tensor]]]]
    _replays: Replays | None = None
    _names: tuple[str, ...] = ()
    _on_leaf: dict[tuple[int, Path], RemovableHandle] | None = None

    def __init__(self, site: Site, scope: Scope) -> None:
        self.site = site
        self.scope = scope

    @property
    def fired(self) -> int:
        """How often something came."""
        raise NotImplementedError

    def reach(self, part: Any, call: int) -> None:
        """The value at the site, as the model has it; of a structure, the part that was asked for."""
        raise NotImplementedError

    def expect(self, part: Any, call: int) -> None:
        """The structured value whose leaves' gradients will arrive."""

    def arrive(self, call: int, path: Path, grad: Tensor | None) -> None:
        """The gradient of one leaf of the value of that call."""
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any = None) -> Any:
        """The hook: `last` is the output after a forward, the keyword arguments before it."""
        is_input = self.site.address.role == "in"
        if is_input and last is None:  # removed while another thread is in this module: torch forgot with_kwargs
            return None
        address = self.site.address
        value = Inputs(args, last, self._names) if is_input else last
        call = self._count()
        if call is None and self._replays is not None:
            call = self._replays.next_call()
        if call is None and self.scope.frozen and address.grad:
            return self._thaw_again(value)
        if call is None or not may_cover(address.call, call):
            return None
        try:
            part = part_of(value, address.leaf)
        except LookupError:
            self.missed = no_such_leaf(value, address.leaf)
            return None
        if not address.grad:
            self.reach(part, call)
            return None
        if not isinstance(part, Tensor):
            self.expect(part, call)
        thawed = self._thaw(part)
        if is_input:
            self._await_shares(thawed, part, call, value, id(sys._getframe(1)))
        else:
            for path, tensor in leaves(thawed):
                self.hook(tensor, call, path)
        return None if thawed is part else _with_thawed(value, part, thawed)

    def prepare(self, module: nn.Module) -> None:
        """Before a hook on inputs is placed: look at the module's signature once."""
        self._names = argument_names(module)
        self.pending = {}

    def hook(self, tensor: Tensor, call: int, path: Path) -> None:
        """Have `arrive` called with the gradient of one tensor."""
        if not tensor.requires_grad:
            self.missed = self._why_no_gradient(tensor, call)
            return
        self.is_view = self.is_view or tensor._is_view()
        is_leaf = tensor.grad_fn is None  # read in any case: torch 2.13 can crash in register_hook otherwise
        handle = tensor.register_hook(functools.partial(self.arrive, call, path))
        self.scope.add(handle)
        if is_leaf:  # it outlives the graph, so the last call that returned it owns its gradient
            self._on_leaf = {} if self._on_leaf is None else self._on_leaf
            if (before := self._on_leaf.pop((id(tensor), path), None)) is not None:
                before.remove()
            self._on_leaf[id(tensor), path] = handle
            if len(self._on_leaf) > 1024:
                alive = {key: old for key, old in self._on_leaf.items() if old.hooks_dict_ref() is not None}
                self._on_leaf = alive

    def _count(self) -> int | None:
        """The number of this call, if it counts."""
        if graph_task() != -1:
            self.recomputed += 1
        elif self.scope not in here():
            self.elsewhere += 1
        else:
            call = self.calls
            self.calls = call + 1
            return call
        return None

    def _thaw(self, part: Any) -> Any:
        if not self.scope.frozen:
            return part
        thawed: dict[int, Tensor] = {}  # a tensor that is there twice stays one tensor

        def thaw(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) not in thawed:
                thawed[id(tensor)] = self.scope.thaw(tensor)
            return thawed[id(tensor)]

        return rebuild(part, thaw, opaque=itself)

    def _thaw_again(self, value: Any) -> Any:
        """In a checkpoint's recomputation, which must save what the first pass saved; on a GPU in a bare thread."""
        if graph_task() == -1 or (here() and self.scope not in here()) or self.site.address.call is not None:
            return None
        try:
            part = part_of(value, self.site.address.leaf)
        except LookupError:
            return None
        return _with_thawed(value, part, self._thaw(part))

    def _await_shares(self, thawed: Any, part: Any, call: int, given: Inputs, frame: int) -> None:
        """Before the forward: note whose gradients are wanted; `after` finds who used them."""
        inputs, copies = [], []
        for (path, tensor), (_, original) in zip(leaves(thawed), leaves(part), strict=True):
            if tensor is not original:  # a copy that only this module will use
                copies.append((tensor, tensor._version, original))
                self.hook(tensor, call, path)
            elif tensor.requires_grad and torch.is_grad_enabled():
                arrive = functools.partial(self.arrive, call, path)
                hook = functools.partial(self._hook_handed_on, tensor, call, path)
                inputs.append(Input(tensor, arrive, hook, self._cannot_share))
            else:
                self.missed = self._why_no_gradient(tensor, call)
        # torch calls the hooks before and after one forward from one frame, whatever else happens in between.
        self.pending[frame] = (OwnShares(inputs, given), copies)

    def _hook_handed_on(self, tensor: Tensor, call: int, path: Path) -> None:
        self.note = "the module hands this input on, so the gradient is that of all users of the tensor"
        self.hook(tensor, call, path)

    def _cannot_share(self) -> None:
        self.note = self.missed = "what flows into an input in a second backward (create_graph) is not kept"

    def after(self, frame: int, module: nn.Module, given: Any, output: Any) -> None:
        """After the forward: hook whatever used the inputs."""
        shares, copies = self.pending.pop(frame, (None, ()))
        for copied, version, original in copies:
            if copied._version != version:  # the module wrote into its input: the caller's tensor must see that
                with torch.no_grad():
                    original.copy_(copied)
        if shares is not None:
            for handle in shares.hook(module, given, output):
                self.scope.add(handle)

    def _why_no_gradient(self, tensor: Tensor, call: int) -> str:
        if not _can_have_gradient(tensor):
            return f"{str(tensor.dtype).removeprefix('torch.')} values have no gradient"
        if torch.is_grad_enabled():
            return "frozen: nothing before it requires a gradient; frozen=True gives it one all the same"
        if self._replays is None:
            self._replays = Replays()
        if self._replays.remember(call):
            return "its checkpoint was not run again inside this session, or it is one within another"
        return "it ran under torch.no_grad() or inference_mode(), where there are no gradients"


class After(Hook):
    """The forward hook beside a tap on the gradient of an input."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, *given_and_output: Any) -> None:
        *given, output = given_and_output
        self.tap.after(id(sys._getframe(1)), module, given, output)


def open_scope(scope: Scope) -> None:
    """From here on, calls in this thread or async task belong to the scope's session too."""
    _open_scopes.set((*here(), scope))


def close_scope(scope: Scope) -> None:
    """Undo `open_scope`; not by a token, for a session may be left in another context than it was entered in."""
    _open_scopes.set(tuple(other for other in here() if other is not scope))


@contextmanager
def not_watching(scope: Scope) -> Iterator[None]:
    """Run a user's function so that neither the session nor a checkpoint around it sees what it does."""
    token = _open_scopes.set(tuple(s for s in here() if s is not scope))
    try:
        with saved_tensors_hooks(torch.detach, lambda tensor: tensor):
            yield
    finally:
        _open_scopes.reset(token)


def check_unchanged(before: list[tuple[Tensor, int]], who: str) -> None:
    """Raise if a user's function wrote into what it was shown."""
    if any(version_of(tensor) != version for tensor, version in before):
        raise RuntimeError(f"{who} changed the value in place; observing must change nothing")


def version_of(tensor: Tensor) -> int:
    """A number that changes with every write into the tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def _with_thawed(value: Any, part: Any, thawed: Any) -> Any:
    """The value as the hook hands it back, with thawed tensors in it."""
    swaps = {id(old): new for (_, old), (_, new) in zip(leaves(part), leaves(thawed), strict=True)}

    def swap(x: Any) -> Any:
        return rebuild(x, lambda _, tensor: swaps.get(id(tensor), tensor), opaque=itself)

    return (swap(value.args), swap(value.kwargs)) if isinstance(value, Inputs) else swap(value)


def part_of(value: Any, path: Path) -> Any:
    """The part of a site's value that an address means; LookupError where there is none."""
    if path and isinstance(value, Inputs):
        return pick(value[path[0]], path[1:])
    return pick(value, path)


def no_such_leaf(value: Any, path: Path) -> str:
    """Says what a value has where the asked leaf was not found."""
    asked = "".join(f"[{key}]" for key in path)
    if isinstance(value, Inputs):
        have = ", ".join(f"[{key}]" for key in value) or "no arguments"
        return f"it was called without {asked}; it was given {have}"
    return f"its value has no leaf {asked}; it is {describe(value)}, with leaves {paths_of(value)}"


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
