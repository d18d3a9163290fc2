"""A session: taps say what to do, sites say where, and the session says for how long.

A `Tap` belongs to one site and is itself the PyTorch hook there. It works out whether a call is the session's
own and which call it is, and hands the value on: `reach` for a value, `arrive` for the gradient of each leaf,
which it gets by a tensor hook. Verbs are kinds of Tap. `Session` places the taps when it is entered and removes
exactly those when it is left.

Whose call is it? The scopes of the sessions that are open in this thread or async task are in a context variable:
a tap that fires outside its scope only counts. A call inside a backward pass is a checkpoint's recomputation and
is not counted again.
"""

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from tenterhook import _compiled
from tenterhook._handles import Hook
from tenterhook._inputs import Inputs, argument_names
from tenterhook._replay import Replays
from tenterhook._shards import sharded_parameters
from tenterhook._share import OwnShares
from tenterhook._sites import Site
from tenterhook._table import Table
from tenterhook._tree import Path, describe, leaves, paths_of, pick, rebuild
from tenterhook._why import why_never_called

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
    missed = ""  # why the value was not there when the module ran, for the report
    pending: dict[int, tuple[OwnShares, list[tuple[Tensor, int, Tensor]]]]
    _replays: Replays | None = None
    _names: tuple[str, ...] = ()
    _on_leaf: dict[int, RemovableHandle] | None = None

    def __init__(self, site: Site, scope: Scope) -> None:
        self.site = site
        self.scope = scope

    @property
    def fired(self) -> int:
        """How often something came."""
        raise NotImplementedError

    def reach(self, value: Any, call: int) -> None:
        """The value at the site, whole, as the model has it."""
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
        value = Inputs(args, last, self._names) if is_input else last
        call = self._count()
        if not self.site.address.grad:
            if call is not None:
                self.reach(value, call)
            return None
        if call is None and self._replays is not None:
            call = self._replays.next_call()
        if call is None or not self._wants(call):
            return None
        try:
            part = part_of(value, self.site.address.leaf)
        except LookupError:
            self.missed = no_such_leaf(value, self.site.address.leaf)
            return None
        if not isinstance(part, Tensor):
            self.expect(part, call)
        thawed = self._thaw(part)
        if is_input:
            self._await_shares(thawed, part, call, id(sys._getframe(1)))
        else:
            for path, tensor in leaves(thawed):
                self.hook(tensor, call, path)
        return None if thawed is part else _with_thawed(value, part, thawed)

    def prepare(self, module: nn.Module) -> None:
        """Look at the module once, before its hook is placed."""
        if self.site.address.role == "in":
            self._names = argument_names(module)

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
            if (before := self._on_leaf.pop(id(tensor), None)) is not None:
                before.remove()
            self._on_leaf[id(tensor)] = handle

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

    def _wants(self, call: int) -> bool:
        asked = self.site.address.call
        return not isinstance(asked, int) or asked < 0 or asked == call

    def _thaw(self, part: Any) -> Any:
        if not self.scope.frozen:
            return part
        return rebuild(part, lambda _, tensor: self.scope.thaw(tensor), opaque=lambda x: x)

    def _await_shares(self, thawed: Any, part: Any, call: int, frame: int) -> None:
        """Before the forward: note whose gradients are wanted; `after` finds who used them."""
        inputs, copies = [], []
        for (path, tensor), (_, original) in zip(leaves(thawed), leaves(part), strict=True):
            if tensor is not original:  # a copy that only this module will use
                copies.append((tensor, tensor._version, original))
                self.hook(tensor, call, path)
            elif tensor.requires_grad and torch.is_grad_enabled():
                inputs.append((tensor, functools.partial(self.arrive, call, path)))
            else:
                self.missed = self._why_no_gradient(tensor, call)
        # torch calls the hooks before and after one forward from one frame, whatever else happens in between.
        self.pending[frame] = (OwnShares(inputs), copies)

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
            return "its checkpoint was not run again: no backward came inside this session"
        return "it ran under torch.no_grad() or inference_mode(), where there are no gradients"


class _After(Hook):
    """The forward hook beside a tap on the gradient of an input."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, *given_and_output: Any) -> None:
        *given, output = given_and_output
        self.tap.after(id(sys._getframe(1)), module, given, output)


class _ParameterHooks:
    """The gradient of a parameter, once per backward.

    A tensor hook sees what this backward contributes. On a parameter that FSDP2 has sharded it never fires; there
    the hook after the accumulation does, with `.grad` as it then stands.
    """

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.task = -1

    def contributed(self, grad: Tensor | None) -> None:
        self.task = graph_task()
        self.tap.arrive(0, (), grad)

    def accumulated(self, parameter: Tensor) -> None:
        if graph_task() != self.task:
            self.tap.arrive(0, (), parameter.grad)


class Session:
    """Hooks for some taps, from entering to leaving. Not to be entered twice."""

    taps: Sequence[Any] = ()
    ran_eagerly = False
    _entered = False
    _holds_stance = False

    def __init__(self, model: nn.Module, *, frozen: bool = False) -> None:
        self.model = weakref.ref(model)
        self.scope = Scope(frozen)
        self._placed: list[tuple[dict[int, Any], int]] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Session":
        if self._entered:
            raise RuntimeError("a session can be entered once; make a new one for the next block")
        self._entered = True
        try:
            self.ran_eagerly = self._holds_stance = _compiled.force_eager()
            # What register_forward_hook does, less the bookkeeping of options that are not used here: an id
            # of torch's own, and the hook under it. Placing and removing a hook takes a quarter of the time.
            key = RemovableHandle.next_id
            RemovableHandle.next_id += len(self.taps)
            for tap in self.taps:
                self._place(tap, key)
                key += 1
            _open_scopes.set((*here(), self.scope))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()

    def _place(self, tap: Tap, key: int) -> None:
        site = tap.site
        module = site.owner()
        if module is None:
            raise ReferenceError(f"the module of {site} is gone")
        if site.kind != "module":
            self._tap_tensor(tap, module)
        elif isinstance(module, ScriptModule):
            tap.missed = "it runs as TorchScript, which calls no Python hooks; ask for the module around it"
        elif site.address.role == "out":
            hooks = module._forward_hooks
            self._placed.append((hooks, key))
            hooks[key] = tap
        else:
            tap.prepare(module)
            self._handles.append(module.register_forward_pre_hook(tap, with_kwargs=True))
            if site.address.grad:
                tap.pending = {}
                self._handles.append(module.register_forward_hook(_After(tap), with_kwargs=True))

    def _tap_tensor(self, tap: Tap, owner: nn.Module) -> None:
        """A parameter or buffer: read once, on entering; its gradient at every backward."""
        name = tap.site.address.name.rpartition(".")[2]
        tensor = self._shards.get((id(owner), name), tap.site.tensor)
        tap.calls = 1
        if tensor is None or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            tap.missed = "it is not initialised yet; run the lazy module once before"
        elif not tap.site.address.grad:
            tap.reach(tensor, 0)
        elif not tensor.requires_grad:
            tap.missed = "frozen: its requires_grad is False"
        else:
            hooks = _ParameterHooks(tap)
            self._handles.append(tensor.register_hook(hooks.contributed))
            if hasattr(tensor, "_local_tensor"):
                self._handles.append(tensor.register_post_accumulate_grad_hook(hooks.accumulated))

    @functools.cached_property
    def _shards(self) -> dict[tuple[int, str], Tensor]:
        model = self.model()
        return {} if model is None else sharded_parameters(model)

    def _leave(self) -> None:
        # Not a context token: a session may be left in another context than it was entered in.
        _open_scopes.set(tuple(scope for scope in here() if scope is not self.scope))
        for hooks, key in self._placed:
            hooks.pop(key, None)
        self._placed.clear()
        for handles in (self._handles, self.scope.handles):
            for handle in handles:
                handle.remove()
            handles.clear()
        if self._holds_stance:
            self._holds_stance = False
            _compiled.allow_compiled()

    def why_silent(self, tap: Tap) -> str:
        """The most likely reason that a tap never fired."""
        site = tap.site
        if not self._entered:
            return "the session was never entered; use it as `with capture(...) as seen:`"
        if tap.missed:
            return tap.missed
        if site.kind == "module" and not tap.calls:
            if tap.elsewhere:
                return f"its {tap.elsewhere} calls came from another thread or async task than this session's"
            if tap.recomputed:
                return "called only inside a backward pass, where a checkpoint recomputes; open the session earlier"
            return why_never_called(self.model(), site)
        if site.address.grad:
            view = ", or the base of this view was changed in place" if tap.is_view else ""
            return f"no backward inside this session reached it: none ran, or the loss does not need it{view}"
        return f"it was called {tap.calls} times, but not the call that was asked for"

    def report(self, rows: Iterable[tuple[Tap, str]]) -> "Report":
        """What fired and what did not; each row is a tap and what it saw, in words."""
        lines = []
        for tap, what in rows:
            fired = f"{tap.fired}×" if tap.fired else "never"
            lines.append((str(tap.site), fired, what if tap.fired else self.why_silent(tap)))
        return Report(lines, list(self._notes()))

    def _notes(self) -> Iterator[str]:
        if self.ran_eagerly and _compiled.something_was_compiled():
            yield "compiled code ran eagerly while this session was open (torch.compile ignores hooks added later)"
        recomputed = max((tap.recomputed for tap in self.taps), default=0)
        if recomputed:
            yield "calls during backward were a checkpoint recomputing, and are not counted again"
        elsewhere = max((tap.elsewhere for tap in self.taps), default=0)
        if elsewhere:
            yield "calls from other threads or async tasks were left alone"
        if self._turned_fast_path_off():
            yield "hooks turn off PyTorch's fused transformer kernel in eval mode: last bits may differ from it"

    def _turned_fast_path_off(self) -> bool:
        model = self.model()
        hooked = {id(tap.site.module) for tap in self.taps if tap.calls}
        fused = (m for m in (model.modules() if model is not None else ()) if not m.training)
        layers = (m for m in fused if isinstance(m, nn.TransformerEncoderLayer))
        return any(id(inner) in hooked for layer in layers for inner in layer.modules())


class Report:
    """What a session saw, site by site, and why the silent ones stayed silent. Print it."""

    def __init__(self, rows: list[tuple[str, str, str]], notes: list[str]) -> None:
        self.rows = rows
        self.notes = notes

    @property
    def silent(self) -> list[str]:
        """The addresses at which nothing was seen."""
        return [address for address, fired, _ in self.rows if fired == "never"]

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join([str(self._table()), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_() + "".join(f"<p>note: {note}</p>" for note in self.notes)

    def _table(self) -> Table:
        return Table(("address", "fired", "value, or why there is none"), self.rows, right=("fired",))


@contextmanager
def not_watching(scope: Scope) -> Iterator[None]:
    """Run a user's function without the session seeing the calls that it makes itself."""
    token = _open_scopes.set(tuple(s for s in here() if s is not scope))
    try:
        yield
    finally:
        _open_scopes.reset(token)


def _with_thawed(value: Any, part: Any, thawed: Any) -> Any:
    """The value as the hook hands it back, with thawed tensors in it."""
    swaps = {id(old): new for (_, old), (_, new) in zip(leaves(part), leaves(thawed), strict=True)}

    def swap(x: Any) -> Any:
        return rebuild(x, lambda _, tensor: swaps.get(id(tensor), tensor), opaque=lambda y: y)

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
