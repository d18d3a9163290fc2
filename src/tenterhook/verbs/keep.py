"""How values and gradients are kept: the taps of capture."""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import covers
from tenterhook.addresses.sites import Site
from tenterhook.hooks.scope import Scope, here, not_watching
from tenterhook.hooks.tap import Tap, Unsaved, check_unchanged, later_site_first
from tenterhook.platform.checkpoints import beside_checkpoints, graph_task, modes
from tenterhook.values.tree import Omitted, Path, rebuild, version_of


class Stop(BaseException):
    """Ends a forward pass early. Not an Exception, so that a model's own `except Exception` lets it pass."""

    def __init__(self, scope: Scope) -> None:
        super().__init__("tenterhook: every asked value is there")
        self.scope = scope


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


_SKIPPED = object()


class Log(list[tuple[int, Any, Any]]):
    """What came to all taps of a session, in order: the number of the tap, a value and its version.

    PlainValues keep everything here, since one list is the least that can be done while a model runs; the other
    taps only note that they were reached.
    """

    _read = 0

    @functools.cached_property
    def _of(self) -> defaultdict[int, list[tuple[Any, Any]]]:
        return defaultdict(list)

    def of(self, number: int) -> list[tuple[Any, Any]]:
        """What one tap put here, in order."""
        for tap, value, version in self[self._read :]:
            self._of[tap].append((value, version))
        self._read = len(self)
        return self._of[number]

    def order(self) -> list[int]:
        """The numbers of the taps that were reached, by when they first were."""
        return list(dict.fromkeys(tap for tap, _, _ in self))


@dataclass(slots=True)
class How:
    """How to keep a tensor: the options of capture."""

    copy: bool
    detach: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    reduce: Callable[[Tensor], Any] | None
    last: bool
    scope: Scope
    log: Log
    simple: bool  # whether a tensor is kept just by detaching it, and copying it or not

    def keep(self, tensor: Tensor) -> Any:
        """What is kept of one tensor."""
        if self.reduce is not None:
            return self._reduced(tensor)
        if self.detach:
            tensor = tensor.detach()
        if self.device is None and self.dtype is None:
            # an inference tensor does not tell when it is overwritten, so it is copied in any case
            return tensor.clone() if self.copy or tensor.is_inference() else tensor
        return self._moved(tensor)

    def _moved(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device or tensor.device, dtype, copy=self.copy or tensor.is_inference())

    def _reduced(self, tensor: Tensor) -> Any:
        assert self.reduce is not None
        with not_watching(self.scope), torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            shown = tensor.detach() if self.detach else tensor
            before = [(shown, version_of(shown))]
            small = self.reduce(shown)
            check_unchanged(before, "reduce")
            return rebuild(small, lambda _, part: self._own(part, tensor), opaque=_own_array)

    def _own(self, part: Tensor, whole: Tensor) -> Tensor:
        """A part of what `reduce` gave, in memory of its own."""
        if self.device is not None or self.dtype is not None:
            return self._moved(part)
        return part.clone() if self.copy and _shares_memory(part, whole) else part


class Values(Tap):
    """A tap that keeps values."""

    wait: "Wait | None" = None
    _dropped = 0

    def __init__(self, number: int, site: Site, how: How) -> None:
        super().__init__(site, how.scope)
        self.number = number
        self.how = how
        self.entries: list[Entry] = []

    def twin(self, site: Site) -> "Values":
        return type(self)(0, site, self.how)

    @property
    def fired(self) -> int:
        asked = self.site.address.call
        return self._dropped + sum(covers(asked, entry.call, self.calls) for entry in self.entries)

    def reach(self, part: Any, call: int) -> None:
        versions: list[tuple[Tensor, int]] = []
        with beside_checkpoints():
            kept = rebuild(part, lambda _, tensor: self._keep(tensor, versions))
        if isinstance(kept, Omitted):
            self.missed = f"its value is a {kept.kind}: no tensor, so it was not kept"
            self._skip()
            return
        self._store(call, kept, tuple(versions))
        if self.wait is not None:
            self.wait.came(self)

    def _skip(self) -> None:
        """A call of which nothing could be kept."""

    def _store(self, call: int, kept: Any, versions: _Versions) -> None:
        if not self.entries:
            self.how.log.append((self.number, None, None))
        if self.how.last or self.site.address.call == -1:
            self._dropped += len(self.entries)
            self.entries.clear()
        self.entries.append(Entry(call, kept, versions))

    def _keep(self, tensor: Tensor, versions: list[tuple[Tensor, int]]) -> Any:
        try:
            kept = self.how.keep(tensor)
        except Exception as error:
            error.add_note(f"while keeping the value at {self.site}")
            raise
        if not self.how.copy:
            _note_version(kept, versions)
        return kept


class PlainValues(Values):
    """The common case without a detour: a module's whole value, every call of it, just detached and copied or not."""

    def __init__(self, number: int, site: Site, how: How) -> None:
        self.site = site
        self.scope = how.scope
        self.number = number
        self.how = how

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], last: Any = None) -> Any:
        scope = self.scope
        if type(last) is not Tensor or scope not in here() or graph_task() != scope.task:
            return super().__call__(module, args, last)
        how = self.how
        if how.copy:
            if modes():
                return super().__call__(module, args, last)
            how.log.append((self.number, last.detach().clone() if last.requires_grad else last.clone(), None))
            return None
        last = last.detach()
        try:
            how.log.append((self.number, last, last._version))
        except RuntimeError:  # an inference tensor does not tell when it is overwritten
            how.log.append((self.number, last.clone(), None))
        return None

    def twin(self, site: Site) -> Values:
        return InnerValues(0, site, self.how)

    def _skip(self) -> None:
        self.how.log.append((self.number, _SKIPPED, None))

    def _store(self, call: int, kept: Any, versions: _Versions) -> None:
        self.how.log.append((self.number, kept, versions))

    @property
    def entries(self) -> list[Entry]:  # type: ignore[override]
        return [
            Entry(call, value, ((value, version),) if isinstance(version, int) else version or ())
            for call, (value, version) in enumerate(self.how.log.of(self.number))
            if value is not _SKIPPED
        ]

    @property
    def calls(self) -> int:
        """Every call is kept, so they need not be counted apart."""
        return len(self.how.log.of(self.number))

    @calls.setter
    def calls(self, number: int) -> None: ...


class InnerValues(PlainValues):
    """The same inside a forward, which need not make each value at each call."""

    _at = 0  # the call that is going on

    def __init__(self, number: int, site: Site, how: How) -> None:
        super().__init__(number, site, how)
        self._came_at: list[int] = []  # for each value, the call that made it

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], last: Any = None) -> Any:
        at, before, moment = self._at, len(self.how.log), self.scope.moment
        if moment is None or not self.how.copy or type(last) is not Tensor or not self._is_plainly_ours():
            super().__call__(module, args, last)
        else:
            self.how.log.append((self.number, moment.copy(last), None))
        if len(self.how.log) > before:
            self._came_at.append(at)
        self._at = at + 1

    def _is_plainly_ours(self) -> bool:
        return self.scope in here() and graph_task() == self.scope.task and not modes()

    @property
    def entries(self) -> list[Entry]:  # type: ignore[override]
        return [Entry(self._came_at[call], value, versions) for call, value, versions in super().entries]

    @property
    def calls(self) -> int:
        """How many calls there were, as far as it knows."""
        return self._at

    @calls.setter
    def calls(self, number: int) -> None:
        self._at = number


class Gradients(Tap):
    """A tap that keeps gradients: one per call, leaf and backward pass."""

    _dropped = 0

    def __init__(self, number: int, site: Site, how: How) -> None:
        self.site = site
        self.scope = how.scope
        self.number = number
        self.how = how
        self.arrivals: list[tuple[int, Path, int, Any, _Versions]] = []
        self.outlines: dict[int, Any] = {}
        self._simple = how.simple and how.copy

    def twin(self, site: Site) -> "Gradients":
        return type(self)(0, site, self.how)

    @property
    def fired(self) -> int:
        asked = self.site.address.call
        return self._dropped + sum(covers(asked, call, self.calls) for call, _ in self._turns())

    @property
    def entries(self) -> list[Entry]:
        """The leaves put together, by call and then by backward pass."""
        together = [self._together(call, group) for (call, _), group in self._turns().items()]
        return sorted(together, key=lambda entry: entry.call)

    def expect(self, part: Any, call: int) -> None:
        if self.how.last:  # few calls wait for their backward at a time
            self.outlines = dict(list(self.outlines.items())[-100:])
        slots: dict[int, _Slot] = {}  # a tensor that is there twice has one gradient
        self.outlines[call] = rebuild(part, lambda path, t: slots.setdefault(id(t), _Slot(path)), opaque=lambda _: None)

    def arrive(self, call: int, path: Path, grad: Tensor | None) -> None:
        if not self.arrivals:
            self.how.log.append((self.number, None, None))
        if not self._simple or type(grad) is not Tensor:
            self._arrive(call, path, grad)
            return
        try:
            self.arrivals.append((call, path, graph_task(), grad.detach().clone(), ()))
        except RuntimeError:
            self._arrive(call, path, grad)

    def _arrive(self, call: int, path: Path, grad: Tensor | None) -> None:
        try:
            kept = None if grad is None else self.how.keep(grad)
        except Exception as error:
            if "Batching rule not implemented" in str(error):  # torch's older vmap, which can neither copy nor detach
                self.missed = "it came from a vectorised jacobian, whose gradients cannot be kept"
                return
            error.add_note(f"while keeping {self.site}")
            raise
        versions: list[tuple[Tensor, int]] = []
        if not self.how.copy:
            _note_version(kept, versions)
        task = graph_task()
        if self.how.last:
            turns = self._turns()
            if any(known > call for known, _ in turns):
                return
            self._dropped += len(turns.keys() - {(call, task)})
            self.arrivals = [old for old in self.arrivals if (old[0], old[2]) == (call, task)]
            self.outlines = {k: outline for k, outline in self.outlines.items() if k >= call}
        self.arrivals.append((call, path, task, kept, tuple(versions)))

    def _turns(self) -> dict[tuple[int, int], list[_Arrival]]:
        turns: dict[tuple[int, int], list[_Arrival]] = {}
        for arrival in map(_Arrival._make, self.arrivals):
            turns.setdefault((arrival.call, arrival.task), []).append(arrival)
        return turns

    def _together(self, call: int, group: list[_Arrival]) -> Entry:
        by_path: dict[Path, Any] = {}
        for arrival in group:  # two at one path: the shares of an input before and after it was written into
            before, now = by_path.get(arrival.path), arrival.value
            by_path[arrival.path] = before if now is None else now if before is None else before + now
        outline = self.outlines.get(call, _Slot(()) if () in by_path else {path: _Slot(path) for path in by_path})

        def fill(x: Any) -> Any:
            return by_path.get(x.path) if isinstance(x, _Slot) else x

        value = fill(outline) if isinstance(outline, _Slot) else rebuild(outline, lambda _, t: t, opaque=fill)
        return Entry(call, value, tuple(version for arrival in group for version in arrival.versions))


class PlainGradients(Gradients):
    """The gradient of a module's whole output, at every call, without a detour where that is one tensor."""

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], last: Any = None) -> Any:
        scope = self.scope
        if type(last) is not Tensor or scope not in here() or graph_task() != scope.task or last.grad_fn is None:
            return super().__call__(module, args, last)
        call = self.calls
        self.calls = call + 1
        self.is_view = self.is_view or last._is_view()
        if scope.moment is not None and self._simple and len(here()) == 1:
            self._join(last, call)
            return None
        scope.add(last.register_hook(Unsaved(self.arrive, call, ())))
        if len(here()) > 1 and len(last._backward_hooks or ()) > 1:  # another session may edit it
            later_site_first(last, self)
        return None

    def _join(self, tensor: Tensor, call: int) -> None:
        """Take the gradient together with the taps that know the tensor by other names, unless somebody is between."""
        newest = next(reversed(tensor._backward_hooks.values()), None) if tensor._backward_hooks else None
        if isinstance(newest, _Together) and newest.taps[0][0].scope is self.scope:
            newest.taps.append((self, call))
        else:
            self.scope.add(tensor.register_hook(_Together(self, call)))

    def take(self, call: int, copy: Tensor) -> None:
        """The gradient, copied."""
        if not self.arrivals:
            self.how.log.append((self.number, None, None))
        self.arrivals.append((call, (), graph_task(), copy, ()))


class _Together:
    """A hook on a tensor that has several names: its gradient is copied once."""

    __torch_unserializable__ = True

    def __init__(self, tap: PlainGradients, call: int) -> None:
        self.func = tap.arrive  # by which it is known whose hook this is
        self.taps = [(tap, call)]

    def __call__(self, grad: Tensor | None) -> None:
        try:
            with torch._C.DisableTorchFunction():  # the session need not look at what we do
                copy = grad.detach().clone() if type(grad) is Tensor and not modes() else None
        except RuntimeError:
            copy = None
        for tap, call in self.taps:
            if copy is not None:
                tap.take(call, copy)
            else:
                tap.arrive(call, (), grad)


class Wait:
    """With stop=True: ends the forward when the last of the awaited values has come."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.taps: set[int] = set()

    def add(self, tap: Values) -> None:
        """Wait for one more."""
        tap.wait = self
        self.taps.add(id(tap))

    def came(self, tap: Values) -> None:
        self.taps.discard(id(tap))
        if not self.taps:
            raise Stop(self.scope)


def _note_version(kept: Any, versions: list[tuple[Tensor, int]]) -> None:
    if isinstance(kept, Tensor) and not kept.is_inference():
        versions.append((kept, kept._version))


def _own_array(x: Any) -> Any:
    """A NumPy array may be a window on a tensor's memory."""
    return x.copy() if hasattr(x, "__array_interface__") else x


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return True
