"""How values and gradients are kept: the actions of capture."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from tenterhook.addresses.grammar import covers
from tenterhook.addresses.sites import Site
from tenterhook.hooks.gradients import CallStart, Unsaved, later_site_first
from tenterhook.hooks.outputs import OutputTap
from tenterhook.hooks.scope import Scope, here, not_watching
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import Action, Call, Tap, check_unchanged
from tenterhook.inside.taps import InnerTap
from tenterhook.platform.autograd import graph_task, sequence_number
from tenterhook.platform.checkpoints import beside_checkpoints
from tenterhook.platform.modes import dispatch_modes, without_function_modes
from tenterhook.platform.tensors import hook_gradient, is_view, share_storage
from tenterhook.values.tree import Omitted, Path, rebuild, version_of


class Stop(BaseException):
    """Ends a forward pass early. Not an Exception, so that a model's own `except Exception` lets it pass."""

    def __init__(self, scope: Scope) -> None:
        super().__init__("tenterhook: every asked value is there")
        self.scope = scope


class Countdown:
    """Ends a forward when as many values have come as it waits for, if it waits for any number."""

    awaited: int | None = None
    came = 0

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def one_more(self) -> None:
        """A value came."""
        self.came += 1
        if self.came == self.awaited:
            raise Stop(self.scope)


class Failed(Omitted):
    """Stands for a tensor that `reduce` failed on, at one of many sites."""

    def __init__(self, error: Exception) -> None:
        self.kind = "tensor"
        self.error = f"{type(error).__name__}: {error}"

    def __repr__(self) -> str:
        return f"<a tensor that reduce failed on: {self.error}>"

    @property
    def why(self) -> str:
        return f"was not kept: reduce failed with {self.error}"


_Versions = tuple[tuple[Tensor, int], ...]


class Entry(NamedTuple):
    """One kept value: of which call, and, where it is not a copy, which version of its tensors it was."""

    call: int
    value: Any
    versions: _Versions


class _Arrival(NamedTuple):
    """The gradient of one leaf, as one backward pass (`task`) brought it."""

    call: int
    path: Path
    task: int
    value: Any
    versions: _Versions


class _Slot:
    """In the outline of a structured value: where the gradient of one leaf belongs. Opaque to the tree."""

    def __init__(self, path: Path) -> None:
        self.path = path


class Log(list[tuple[int, Any, Any, Any]]):
    """What came to all taps of a session, in order: the number of the tap, the call, a value and its version.

    Plain taps keep everything here, since one list is the least that can be done while a model runs; the others only
    note that they were reached.
    """

    _read = 0

    @functools.cached_property
    def _of(self) -> defaultdict[int, list[Entry]]:
        return defaultdict(list)

    def of(self, number: int) -> list[Entry]:
        """What one tap put here, in order."""
        for tap, call, value, version in self[self._read :]:
            versions = ((value, version),) if isinstance(version, int) else version or ()
            self._of[tap].append(Entry(call, value, versions))
        self._read = len(self)
        return self._of[number]

    def note(self, tap: Tap) -> None:
        """A tap that keeps its values elsewhere was reached for the first time."""
        self.append((tap.number, None, None, None))

    def order(self) -> list[int]:
        """The numbers of the taps that were reached, by when they first were."""
        return list(dict.fromkeys(tap for tap, *_ in self))


@dataclass(slots=True)
class How:
    """How to keep a tensor: the options of capture."""

    copy: bool
    detach: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    reduce: Callable[[Tensor], Any] | None
    keep_only: str  # "all" or "last"
    scope: Scope
    log: Log
    countdown: Countdown | None = None
    simple: bool = field(init=False)  # whether a tensor is kept just by detaching it, and copying it or not

    def __post_init__(self) -> None:
        if self.keep_only not in ("all", "last"):
            raise ValueError(f"keep is 'all' or 'last', got {self.keep_only!r}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype is a torch.dtype such as torch.float32, got {self.dtype!r}")
        if self.reduce is not None and not callable(self.reduce):
            raise TypeError(f"reduce is a function of a tensor, got {self.reduce!r}")
        if self.device is not None:
            self.device = torch.device(self.device)  # a misspelt one fails here, not in the middle of a forward
        is_changed = (self.device, self.dtype, self.reduce) != (None, None, None)
        self.simple = self.detach and not self.last and not is_changed

    @property
    def last(self) -> bool:
        """True if only the last call is kept."""
        return self.keep_only == "last"

    def keep(self, tensor: Tensor, wide: bool) -> Any:
        """What is kept of one tensor; `wide`: its site is one of many."""
        if self.reduce is not None:
            return self._reduced(tensor, wide)
        if self.detach:
            tensor = tensor.detach()
        if self.device is None and self.dtype is None:
            # an inference tensor does not tell when it is overwritten, so it is copied in any case
            return tensor.clone() if self.copy or tensor.is_inference() else tensor
        return self._moved(tensor)

    def _moved(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device or tensor.device, dtype, copy=self.copy or tensor.is_inference())

    def _reduced(self, tensor: Tensor, wide: bool) -> Any:
        assert self.reduce is not None
        with not_watching(self.scope), torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            shown = tensor.detach() if self.detach else tensor
            before = [(shown, version_of(shown))]
            try:
                small = self.reduce(shown)
            except Exception as error:
                if not wide:
                    raise
                small = Failed(error)
            check_unchanged(before, "reduce")
            return rebuild(small, lambda _, part: self._own(part, tensor), opaque=_own_array)

    def _own(self, part: Tensor, whole: Tensor) -> Tensor:
        """A part of what `reduce` gave, in memory of its own."""
        if self.device is not None or self.dtype is not None:
            return self._moved(part)
        return part.clone() if self.copy and share_storage(part, whole) else part


class Keep(Action):
    """What capture does at a site: keep something for each call."""

    _dropped = 0  # of what was kept, with keep="last"

    needs_all = False

    def __init__(self, how: How) -> None:
        self.how = how

    @property
    def may_keep_given(self) -> bool:  # type: ignore[override]
        return not self.how.copy

    @property
    def why_not_compiled(self) -> str:  # type: ignore[override]
        return "" if self.how.detach else "keeps the graph (detach=False)"

    def entries(self, tap: Tap) -> list[Entry]:
        """What was kept, in the order of the calls."""
        raise NotImplementedError

    def expected(self, tap: Tap) -> Iterable[int]:
        """The calls that something is kept of, where something comes."""
        return () if self.how.last else tap.own_calls()

    def fired(self, tap: Tap) -> int:
        asked = tap.site.address.call
        return self._dropped + sum(covers(asked, entry.call, tap.calls) for entry in self.entries(tap))


class KeepValues(Keep):
    """Keep each value, in the log of the session."""

    def entries(self, tap: Tap) -> list[Entry]:
        return self.how.log.of(tap.number)

    def on_value(self, tap: Tap, value: Any, call: Call) -> None:
        versions: list[tuple[Tensor, int]] = []
        with beside_checkpoints():
            kept = rebuild(value, lambda _, tensor: self._kept(tap, tensor, versions))
        if isinstance(kept, Omitted):
            tap.missed = f"its value {kept.why}"
            return
        self._store(tap, Entry(call.number, kept, tuple(versions)))
        if self.how.countdown is not None:
            self.how.countdown.one_more()

    def _kept(self, tap: Tap, tensor: Tensor, versions: list[tuple[Tensor, int]]) -> Any:
        try:
            kept = self.how.keep(tensor, tap.site.wide)
        except Exception as error:
            error.add_note(f"while keeping the value at {tap.site}")
            raise
        if isinstance(kept, Failed):
            tap.note = f"reduce failed with {kept.error}"
        if not self.how.copy:
            _note_version(kept, versions)
        return kept

    def _store(self, tap: Tap, entry: Entry) -> None:
        self.how.log.append((tap.number, *entry))


class KeepLastValue(KeepValues):
    """Keep the value of the last call alone."""

    _last: Entry | None = None

    def entries(self, tap: Tap) -> list[Entry]:
        return [] if self._last is None else [self._last]

    def restart(self) -> None:
        self._last, self._dropped = None, 0

    def _store(self, tap: Tap, entry: Entry) -> None:
        if self._last is None:
            self.how.log.note(tap)
        else:
            self._dropped += 1
        self._last = entry


class PlainOutput(OutputTap):
    """The common case without a detour: a module's whole output, every call of it, just detached and copied or not."""

    def __init__(self, number: int, site: Site, how: How) -> None:
        self.number = number
        self.site = site
        self.scope = how.scope
        self.how = how

    @property
    def action(self) -> KeepValues:  # type: ignore[override]
        return KeepValues(self.how)

    def place(self, session: Session) -> None:
        module = self.site.owner()
        if not isinstance(module, nn.Module) or isinstance(module, ScriptModule):
            super().place(session)
        else:
            session.places.put_plainly(module._forward_hooks, self)

    def __call__(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        scope = self.scope
        if type(output) is not Tensor or scope not in here() or graph_task() != scope.task:
            return super().__call__(module, args, output)
        how, call = self.how, self.calls
        if how.copy:
            if dispatch_modes():
                return super().__call__(module, args, output)
            kept, version = output.detach().clone() if output.requires_grad else output.clone(), None
        else:
            kept = output.detach()
            version = version_of(kept)
            if version < 0:  # an inference tensor does not tell when it is overwritten
                kept, version = kept.clone(), None
        self.calls = call + 1
        how.log.append((self.number, call, kept, version))
        return None


class PlainInner(PlainOutput, InnerTap):
    """A value inside a forward, likewise. Where many are kept, the names of one tensor share a copy."""

    def __call__(self, module: nn.Module | None, args: Any, value: Any) -> Any:
        scope, moment = self.scope, self.scope.moment
        is_plain = moment is not None and self.how.copy and type(value) is Tensor and not dispatch_modes()
        if not is_plain or scope not in here() or graph_task() != scope.task:
            return super().__call__(module, args, value)
        call = self.calls
        self.calls = call + 1
        self.how.log.append((self.number, call, moment.copy(value), None))  # type: ignore[union-attr]
        return None

    def came(self, value: Any, since: CallStart | None) -> Any:
        return self(None, (), value)


class KeepGradients(Keep):
    """Keep gradients: one per call, leaf and backward pass."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.is_simple = how.simple and how.copy
        self._arrivals: list[tuple[int, Path, int, Any, _Versions]] = []
        self._outlines: dict[int, Any] = {}

    def fired(self, tap: Tap) -> int:
        asked = tap.site.address.call
        return self._dropped + sum(covers(asked, call, tap.calls) for call, _ in self._turns())

    def has_come(self, tap: Tap) -> bool:
        return bool(self._arrivals)

    def entries(self, tap: Tap) -> list[Entry]:
        """The leaves put together, by call and then by backward pass."""
        together = [self._together(call, group) for (call, _), group in self._turns().items()]
        return sorted(together, key=lambda entry: entry.call)

    def on_structure(self, tap: Tap, value: Any, call: int) -> None:
        if self.how.last:  # few calls wait for their backward at a time
            self._outlines = dict(list(self._outlines.items())[-100:])
        slots: dict[int, _Slot] = {}  # a tensor that is there twice has one gradient
        outline = rebuild(value, lambda path, t: slots.setdefault(id(t), _Slot(path)), opaque=lambda _: None)
        self._outlines[call] = outline

    def on_gradient(self, tap: Tap, grad: Tensor | None, call: int, path: Path) -> None:
        copy = None
        if self.is_simple and type(grad) is Tensor:
            try:
                copy = grad.detach().clone()
            except RuntimeError:  # torch's older vmap, which `keep` tells of
                copy = None
        if copy is not None:
            self.take(tap, copy, call, path)
        else:
            self._keep(tap, grad, call, path)

    def take(self, tap: Tap, copy: Any, call: int, path: Path, versions: _Versions = ()) -> None:
        """A gradient that is copied already."""
        if not self._arrivals:
            self.how.log.note(tap)
        self._arrivals.append((call, path, graph_task(), copy, versions))

    def _keep(self, tap: Tap, grad: Tensor | None, call: int, path: Path) -> None:
        try:
            kept = None if grad is None else self.how.keep(grad, tap.site.wide)
        except Exception as error:
            if "Batching rule not implemented" in str(error):  # torch's older vmap, which can neither copy nor detach
                tap.missed = "it came from a vectorised jacobian, whose gradients cannot be kept"
                return
            error.add_note(f"while keeping {tap.site}")
            raise
        if isinstance(kept, Failed):
            tap.note = f"reduce failed with {kept.error}"
            tap.missed = f"its gradient {kept.why}"
            return
        versions: list[tuple[Tensor, int]] = []
        if not self.how.copy:
            _note_version(kept, versions)
        if not self.how.last or self._drop_older(call):
            self.take(tap, kept, call, path, tuple(versions))

    def _drop_older(self, call: int) -> bool:
        """Forget all but the backward pass of the last call that runs now; False if a later call has been kept."""
        turns, this = self._turns(), (call, graph_task())
        if any(known > call for known, _ in turns):
            return False
        self._dropped += len(turns.keys() - {this})
        self._arrivals = [old for old in self._arrivals if (old[0], old[2]) == this]
        self._outlines = {k: outline for k, outline in self._outlines.items() if k >= call}
        return True

    def _turns(self) -> dict[tuple[int, int], list[_Arrival]]:
        turns: dict[tuple[int, int], list[_Arrival]] = {}
        for arrival in map(_Arrival._make, self._arrivals):
            turns.setdefault((arrival.call, arrival.task), []).append(arrival)
        return turns

    def _together(self, call: int, group: list[_Arrival]) -> Entry:
        by_path: dict[Path, Any] = {}
        for arrival in group:  # two at one path: the shares of an input before and after it was written into
            before, now = by_path.get(arrival.path), arrival.value
            by_path[arrival.path] = before if now is None else now if before is None else before + now
        outline = self._outlines.get(call, _Slot(()) if () in by_path else {path: _Slot(path) for path in by_path})

        def fill(x: Any) -> Any:
            return by_path.get(x.path) if isinstance(x, _Slot) else x

        value = fill(outline) if isinstance(outline, _Slot) else rebuild(outline, lambda _, t: t, opaque=fill)
        return Entry(call, value, tuple(version for arrival in group for version in arrival.versions))


class PlainGradient(OutputTap):
    """The gradient of a module's whole output, at every call, without a detour where that is one tensor."""

    action: KeepGradients

    def __call__(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        scope = self.scope
        is_plain = type(output) is Tensor and scope in here() and graph_task() == scope.task
        if not is_plain or (node := output.grad_fn) is None:
            return super().__call__(module, args, output)
        self.born = sequence_number(node)
        call = self.calls
        self.calls = call + 1
        self.is_view = self.is_view or is_view(output)
        if scope.moment is not None and self.action.is_simple and len(here()) == 1:
            self._join(output, call)
            return None
        scope.add(hook_gradient(output, Unsaved(self.arrive, call, ())))
        if len(here()) > 1 and len(output._backward_hooks or ()) > 1:  # another session may edit it
            later_site_first(output, self)
        return None

    def _join(self, tensor: Tensor, call: int) -> None:
        """Take the gradient together with the taps that know the tensor by other names, unless somebody is between."""
        newest = next(reversed(tensor._backward_hooks.values()), None) if tensor._backward_hooks else None
        if isinstance(newest, _Together) and newest.taps[0][0].scope is self.scope:
            newest.taps.append((self, call))
        else:
            self.scope.add(tensor.register_hook(_Together(self, call)))


class PlainInnerGradient(PlainGradient, InnerTap):
    """The gradient of a value inside a forward, likewise."""

    def came(self, value: Any, since: CallStart | None) -> Any:
        return self(None, (), value)


class _Together:
    """A hook on a tensor that has several names: its gradient is copied once."""

    __torch_unserializable__ = True

    def __init__(self, tap: PlainGradient, call: int) -> None:
        self.func = tap.arrive  # by which it is known whose hook this is
        self.taps = [(tap, call)]

    def __call__(self, grad: Tensor | None) -> None:
        try:
            with without_function_modes():  # the session need not look at what we do
                copy = grad.detach().clone() if type(grad) is Tensor and not dispatch_modes() else None
        except RuntimeError:
            copy = None
        for tap, call in self.taps:
            if copy is not None:
                tap.action.take(tap, copy, call, ())
            else:
                tap.arrive(call, (), grad)


def _note_version(kept: Any, versions: list[tuple[Tensor, int]]) -> None:
    if isinstance(kept, Tensor) and not kept.is_inference():
        versions.append((kept, kept._version))


def _own_array(x: Any) -> Any:
    """A NumPy array may be a window on a tensor's memory."""
    return x.copy() if hasattr(x, "__array_interface__") else x
