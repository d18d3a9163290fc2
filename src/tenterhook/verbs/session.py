"""A session: the taps of one `with` block, placed when it is entered, removed when it is left, whatever happens."""

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from tenterhook.addresses.graph import NodeHooks
from tenterhook.addresses.sites import Site, walk
from tenterhook.addresses.why import why_never_called
from tenterhook.errors import EditError
from tenterhook.hooks.modes import Mode, Witness
from tenterhook.hooks.scope import Scope
from tenterhook.hooks.tap import After, Before, Tap
from tenterhook.inside.engine import Bound, Calling, Inside
from tenterhook.platform import compiler
from tenterhook.platform.checkpoints import checkpoints, graph_task
from tenterhook.platform.fsdp import sharded_parameters
from tenterhook.platform.hook_tables import Hook, begin_hiding, end_hiding, new_id, register
from tenterhook.tables import Table

_lock = threading.RLock()  # what is collected while it is held may close a session, too
_NOT_HOOKED = (ScriptModule, type(None))


class _ParameterHooks:
    """The gradient of a parameter, once per backward.

    A tensor hook sees what this backward contributes, before DDP reduces it. On a parameter that FSDP2 has sharded
    it never fires; there the hook after the accumulation does, with `.grad` as it then stands.
    """

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.task = -1

    def contributed(self, grad: Tensor | None) -> Tensor | None:
        self.task = graph_task()
        return self.tap.arrive(0, (), grad)

    def accumulated(self, parameter: Tensor) -> None:
        if graph_task() != self.task:
            self._arrive(parameter)

    def accumulated_first(self, parameter: Tensor) -> None:
        """Wait for the end of the backward pass, and then for what waits for that, which DDP's reduction does."""
        if any(again for _, again in checkpoints()):
            what = "a reentrant checkpoint is a backward pass of its own, so the end of the whole is not known there"
            raise EditError(f"{self.tap.site}: {what}; use use_reentrant=False, or edit without reduced=True")
        queue = Variable._execution_engine.queue_callback
        queue(functools.partial(queue, functools.partial(self._arrive, parameter)))

    def _arrive(self, parameter: Tensor) -> None:
        new = self.tap.arrive(0, (), None if parameter.grad is None else parameter.grad.clone())
        if new is not None and parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.copy_(new)


class Session:
    """Hooks for some taps, from entering to leaving. Not to be entered twice."""

    taps: list[Any]
    ran_eagerly = False
    reduced = False  # whether a parameter's gradient is wanted when the pass is over, and DDP has reduced it
    refused: tuple[Tap, ...] = ()  # parameters and buffers that cannot be had
    swapped: tuple[Any, ...] = ()  # those that were changed
    _entered = False
    _open = False
    _later: Sequence[tuple[Any, list[tuple[int, object]]]] = ()  # the hooks after its own, where a checkpoint may ask
    _orders: Sequence[tuple[Any, list[int]]] = ()  # of all hooks, before a checkpoint has asked
    _again = 0  # how many checkpoints run again under it, after it was left
    _ended_by: type[BaseException] | None = None
    _holds_stance = False
    _is_placed = False
    _inside: Inside | None = None  # looks into forwards, where an address asks for that

    def __init__(self, model: Any, *, frozen: bool = False, changes: bool = False) -> None:
        self.model = weakref.ref(model)
        self.scope = Scope(frozen)
        if frozen or changes:
            self.scope.session = weakref.ref(self)
        self.taps = []
        self._modes: list[Mode] = []
        self._pending: list[dict[int, Any]] = []
        self._placed: list[tuple[dict[int, Any], int]] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Session":
        if self._entered:
            raise RuntimeError("a session can be entered once; make a new one for the next block")
        self._entered = self._open = True
        if self.scope.frozen:
            for tap in self.taps:
                tap.changes = tap.changes or tap.site.address.grad
        try:
            self._place_all(self.taps)
            self.ran_eagerly = self._holds_stance
            for mode in self._modes:
                mode.switch_on()
            self.scope.open()
            if self.swapped and torch.is_grad_enabled() and self.scope.is_recomputed():
                what = "a checkpoint that runs again computes gradients with what is there when the block is over"
                raise EditError(f"{_names(self.swapped)}: {what}; open the block around the checkpoint")
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._ended_by = kind
        self._leave()

    @contextmanager
    def again(self) -> Iterator[None]:
        """While a checkpoint runs again: what changed something the first time is there, even after the session."""
        if self._open:
            with self._looking_inside():
                yield
            return
        if self.swapped:
            what = "it ran with a changed value under a checkpoint, which now runs it again"
            raise EditError(
                f"{_names(self.swapped)}: {what}, and has been restored since; run the backward inside the block"
            )
        try:
            with _lock:
                self._again += 1
                if self._again == 1:
                    self._orders = [(hooks, list(hooks)) for hooks, _ in self._later]
                    self._place_all(tap for tap in self.taps if tap.changes and _is_there(tap.site))
                    for hooks, later in self._later:
                        ours = {_whose(hook): key for key, hook in hooks.items() if isinstance(hook, Hook)}
                        _move_to_end(hooks, [ours.get(owner, key) for key, owner in later])
            with self._looking_inside():
                yield
        finally:
            with _lock:
                self._again -= 1
                if self._again == 0:
                    self._remove()
                    for hooks, keys in self._orders:  # those that have come since are the last
                        _move_to_end(hooks, [*keys, *(key for key in hooks if key not in keys)])

    def _place_all(self, taps: Iterable[Tap]) -> None:
        self._holds_stance = compiler.force_eager()
        begin_hiding()
        self._is_placed = True
        placed = self._placed
        for tap in taps:
            site = tap.site
            module = site.owner()
            if site.kind != "module" or site.address[3] != "out" or isinstance(module, _NOT_HOOKED):
                self._place(tap, module)
                continue
            # What register_forward_hook does, less its handle and options, in a quarter of the time.
            hooks = module._forward_hooks
            key = new_id()
            placed.append((hooks, key))
            hooks[key] = tap
            if tap.needs_before:
                self._place_before(module, Before(tap))
                self._pending.append(tap.started)
        if self._inside is not None:
            self._hook_calls(self._inside)

    def _place(self, tap: Tap, module: Any) -> None:
        """One that is no hook on an output."""
        site = tap.site
        if module is None:
            raise ReferenceError(f"the module of {site} is gone")
        if site.kind != "module":
            self._place_elsewhere(tap, module)
        elif isinstance(module, ScriptModule):
            tap.missed = "it runs as TorchScript, which calls no Python hooks; ask for the module around it"
        else:
            tap.prepare(module)
            flags = module._forward_pre_hooks_with_kwargs
            self._handles.append(register(module._forward_pre_hooks, tap, with_kwargs=flags))
            if site.address.grad or tap.changes:
                self._pending.append(tap.pending)
                # What took the place of an input goes back in the other order, the inner session's first.
                table, flags = module._forward_hooks, module._forward_hooks_with_kwargs
                self._handles.append(register(table, After(tap), with_kwargs=flags, first=tap.changes))

    def _place_elsewhere(self, tap: Tap, owner: Any) -> None:
        if tap.site.kind == "node":
            self._tap_node(tap, owner)
        elif tap.site.kind == "inner":
            self._look_inside(tap)
        else:
            self._tap_tensor(tap, owner)

    def _look_inside(self, tap: Tap) -> None:
        """A value inside a forward: what the address means is known when it comes."""
        if tap.twins is not None or tap.site.spot is not None:
            return
        tap.twins = []
        if self._inside is None:
            self._inside = Inside(self._add, (ref() for ref in self._modules))
            self._modes.append(self._inside)
            self.scope.session = weakref.ref(self)
        self._inside.want(tap)

    def _add(self, twin: Tap, asked: Tap) -> None:
        """One more value that an address means."""
        assert asked.twins is not None
        asked.twins.append(twin)
        twin.asked = weakref.ref(asked)
        twin.number = len(self.taps)
        self.taps.append(twin)

    @contextmanager
    def _looking_inside(self) -> Iterator[None]:
        """In a thread in which a checkpoint runs again, where the mode may be off."""
        inside = None if self._inside is None else self._inside.for_this_thread()
        switched = inside is not None and inside.switch_on()
        try:
            yield
        finally:
            if inside is not None and switched:
                inside.switch_off()

    @functools.cached_property
    def _modules(self) -> list[Any]:
        """References to the modules of the model, each once."""
        model = self.model()
        found = {id(m): weakref.ref(m) for _, m in walk(model)} if isinstance(model, nn.Module) else {}
        return list(found.values())

    def _hook_calls(self, inside: Inside) -> None:
        """A variable may take what a module returns."""
        calls, results = inside.to_hook()
        for module in (ref() for ref in self._modules):
            if id(module) not in calls or isinstance(module, ScriptModule):
                continue
            self._place_before(module, Calling(inside))
            if id(module) in results:
                key = new_id()
                self._placed.append((module._forward_hooks, key))
                module._forward_hooks[key] = Bound(inside)

    def _place_before(self, module: nn.Module, hook: Before | Calling) -> None:
        key, hooks = new_id(), module._forward_pre_hooks
        self._placed.append((hooks, key))
        hooks[key] = hook
        hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]  # before anything of ours makes copies

    def _tap_tensor(self, tap: Tap, owner: nn.Module) -> None:
        """A parameter or buffer: read once, on entering; its gradient at every backward."""
        name = tap.site.address.name.rpartition(".")[2]
        tensor = self._shards.get((id(owner), name), tap.site.tensor)
        tap.calls = 1
        if tensor is None or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            self._refuse(tap, "it is not initialised yet; run the lazy module once before")
        elif not tap.site.address.grad:
            if tap.changes and (id(owner), name) in self._shards:
                what = "FSDP2 has sharded it and gathers copies of it, which would keep the change; edit what uses it"
                raise EditError(f"{tap.site} cannot be edited: {what}")
            if tap.changes:
                self._swap(tap, tensor)
            else:
                tap.reach(tensor, 0)
        elif not tensor.requires_grad:
            self._refuse(tap, "frozen: its requires_grad is False")
        else:
            hooks = _ParameterHooks(tap)
            if self.reduced:
                self._handles.append(tensor.register_post_accumulate_grad_hook(hooks.accumulated_first))
                return
            self._handles.append(tensor.register_hook(hooks.contributed))
            if hasattr(tensor, "_local_tensor"):
                self._handles.append(tensor.register_post_accumulate_grad_hook(hooks.accumulated))

    def _refuse(self, tap: Tap, why: str) -> None:
        tap.missed = why
        self.refused += (tap,)

    def _swap(self, tap: Tap, tensor: Tensor) -> None:
        """Change a parameter or buffer until the session is over; a checkpoint that uses it must know."""
        self.swapped += (tap,)
        tap.swap(tensor)
        if len(self.swapped) == 1:
            self._modes.append(Witness(self.scope))

    def _tap_node(self, tap: Tap, step: Any) -> None:
        tap.calls = 1
        hooks = NodeHooks(tap)
        node = step.node
        is_input = tap.site.address.role == "in"
        self._handles.append(node.register_hook(hooks.inputs) if is_input else node.register_prehook(hooks.outputs))

    @functools.cached_property
    def _shards(self) -> dict[tuple[int, str], Tensor]:
        model = self.model()
        return {} if model is None else sharded_parameters(model)

    def _leave(self) -> None:
        try:
            if self._inside is not None:
                self._inside.finish(failed=self._ended_by is not None)
        finally:
            self.scope.close()
            with _lock:
                self._open = False
                self._remove()
            if self.swapped:
                with ExitStack() as stack:  # the last first, and each even if another fails
                    for tap in self.swapped:
                        stack.callback(tap.swap_back)

    def _remove(self) -> None:
        for mode in self._modes:
            mode.switch_off()
        if self.scope.is_awaited:
            self._later = list(self._hooks_after_ours())
        for hooks, key in self._placed:
            hooks.pop(key, None)
        self._placed.clear()
        for pending in self._pending:  # calls that ended in an exception
            pending.clear()
        for handles in (self._handles, self.scope.handles):
            for handle in handles:
                handle.remove()
            handles.clear()
        if self._is_placed:
            self._is_placed = False
            end_hiding()
        if self._holds_stance:
            self._holds_stance = False
            compiler.allow_compiled()

    def _hooks_after_ours(self) -> Iterator[tuple[Any, list[tuple[int, object]]]]:
        """Of each module, the hooks from the first of ours on, be they a session's or the user's."""
        placed: list[tuple[Any, int]] = [*self._placed, *((one.hooks_dict_ref(), one.id) for one in self._handles)]
        tables = {id(hooks): hooks for hooks, _ in placed if hooks is not None}
        for hooks in tables.values():
            ours = {key for table, key in placed if table is hooks}
            for i, (key, hook) in enumerate(hooks.items()):
                if key in ours and not isinstance(hook, After | Before | Calling):  # these are put first in any case
                    yield hooks, [(key, _whose(hook)) for key, hook in list(hooks.items())[i:]]
                    break

    def asked_and_got(self) -> list[Any]:
        """The taps, those inside a forward under the names that they have got."""
        wide = any(tap.twins and tap.site.wide for tap in self.taps)
        return [tap for tap in self.taps if tap.is_own_answer(wide)]

    def why_silent(self, tap: Tap) -> str:
        """The most likely reason that a tap never fired."""
        site = tap.site
        if not self._entered:
            return "the session was never entered; use it in a `with` block"
        if tap.missed:
            return tap.missed
        if site.kind == "inner" and tap.twins is not None and self._inside is not None:
            return self._inside.why_silent(site) or why_never_called(self.model(), site)
        if site.kind == "module" and not tap.calls:
            if tap.elsewhere:
                return f"its {tap.elsewhere} calls came from another thread or async task than this session's"
            if tap.recomputed:
                return "called only inside a backward pass, where a checkpoint recomputes; open the session earlier"
            return why_never_called(self.model(), site)
        if site.address.grad:
            view = ", or the base of this view was changed in place" if tap.is_view else ""
            return f"no backward inside this session reached it: none ran, or the loss does not need it{view}"
        if site.kind == "inner":
            return "it came, but not in the call that was asked for"
        return f"it was called {tap.calls} times, but not the call that was asked for"

    def report(self, rows: Iterable[tuple[Tap, str]]) -> "Report":
        """What fired and what did not; each row is a tap and what it saw, in words."""
        lines = []
        for tap, what in rows:
            lines.append((str(tap.site), times(tap), what if tap.fired else self.why_silent(tap)))
        return Report(("address", "fired", "value, or why there is none"), lines, list(self.notes()), ("fired",))

    def notes(self) -> Iterator[str]:
        """What a report says under its table."""
        if self.ran_eagerly and compiler.something_was_compiled():
            yield "any compiled code ran eagerly while this session was open (torch.compile ignores hooks added later)"
        recomputed = max((tap.recomputed for tap in self.taps), default=0)
        if recomputed:
            yield "calls during backward were a checkpoint recomputing, and are not counted again"
        elsewhere = max((tap.elsewhere for tap in self.taps), default=0)
        if elsewhere:
            yield "calls from other threads or async tasks, or made by a change or an observer, were left alone"
        if self._inside is not None and self._inside.was_elsewhere:
            yield "what ran in other threads was not looked into: a function mode sees the one that entered the block"
        if self._ended_by is not None and issubclass(self._ended_by, Exception):
            yield f"the block was left by {self._ended_by.__name__}: a module that was running then returned nothing"
        noted: dict[str, list[str]] = {}
        for tap in self.taps:
            if tap.note:
                noted.setdefault(tap.note, []).append(str(tap.site))
        for note, where in noted.items():
            more = f" and {len(where) - 3} more" if len(where) > 3 else ""
            yield f"{', '.join(where[:3])}{more}: {note}"
        if self._turned_fast_path_off():
            yield "hooks turn off PyTorch's fused transformer kernel in eval mode: last bits may differ from it"

    def _turned_fast_path_off(self) -> bool:
        model = self.model()
        hooked = {id(tap.site.module) for tap in self.taps if tap.calls or tap.fired}
        fused = (m for m in (model.modules() if model is not None else ()) if not m.training)
        layers = (m for m in fused if isinstance(m, nn.TransformerEncoderLayer))
        return any(id(inner) in hooked for layer in layers for inner in layer.modules())


def _whose(hook: Any) -> object:
    """What a hook of ours is known by when it is placed again; nothing for the user's, which stays where it is."""
    if isinstance(hook, After | Before):
        return type(hook), id(hook.tap)
    if isinstance(hook, Bound | Calling):
        return type(hook), id(hook.inside)
    return id(hook) if isinstance(hook, Hook) else None


def _move_to_end(hooks: Any, keys: list[int]) -> None:
    for key in keys:
        if key in hooks:
            hooks.move_to_end(key)


def _names(taps: Iterable[Tap]) -> str:
    return ", ".join(str(tap.site) for tap in taps)


def _is_there(site: Site) -> bool:
    return site.kind == "module" and site.owner() is not None


def times(tap: Tap) -> str:
    """How often a tap fired, as reports say it."""
    return f"{tap.fired}×" if tap.fired else "never"


class Report:
    """What a session saw or changed, site by site, and why the silent ones stayed silent. Print it."""

    def __init__(
        self, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], notes: list[str], right: Sequence[str]
    ) -> None:
        self.header = header
        self.rows = rows
        self.notes = notes
        self._right = right

    @property
    def silent(self) -> list[str]:
        """The addresses at which nothing was seen."""
        return [address for address, fired, *_ in self.rows if fired == "never"]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join([str(self._table()), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_() + "".join(f"<p>note: {note}</p>" for note in self.notes)

    def _table(self) -> Table:
        return Table(self.header, self.rows, right=self._right)
