"""A session: the taps of one `with` block, placed when it is entered, removed when it is left, whatever happens."""

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.modules import walk
from tenterhook.addresses.sites import Site
from tenterhook.errors import EditError, TenterhookWarning
from tenterhook.hooks.every import Every
from tenterhook.hooks.missing import Passes, Raised, raised
from tenterhook.hooks.opened import Line, forget, note
from tenterhook.hooks.places import Places
from tenterhook.hooks.report import Report, notes_on
from tenterhook.hooks.scope import Scope
from tenterhook.hooks.tap import Tap
from tenterhook.hooks.tensors import TensorTap
from tenterhook.platform import compiler
from tenterhook.platform.fsdp import sharded_parameters
from tenterhook.platform.hook_tables import begin_hiding, end_hiding

lock = threading.RLock()  # what is collected while it is held may close a session, too


class Session:
    """Hooks for some taps, from entering to leaving. Not to be entered twice."""

    compiled: Any = None  # what it has in compiled code, once that was called
    ended_by: type[BaseException] | None = None
    raised: Raised | None = None
    passes: Passes | None = None
    was_entered = False
    entered: Line | None = None  # by which line of the user's code
    every: Every | None = None
    _is_open = False
    _asked = 0  # how many taps there were on entering
    _recomputing = 0  # how many checkpoints run again under it, after it was left

    def __init__(
        self,
        model: Any,
        *,
        verb: str,
        frozen: bool = False,
        changes: bool = False,
        reduced: bool = False,
        every: int | None = None,
        eager: bool = False,
    ) -> None:
        self.model = weakref.ref(model)
        self.verb = verb
        self.scope = Scope(frozen)
        if every is not None:
            self.every = Every(every, model, self.scope)
        if frozen or changes:
            self.scope.session = weakref.ref(self)
        self.eager = eager  # whether compiled code is to run as it is written
        self.reduced = reduced  # whether a parameter's gradient is wanted when the pass is over, and DDP has reduced it
        self.taps: list[Any] = []
        self.modes: list[Any] = []
        self.places = Places()
        self.refused: list[TensorTap] = []  # parameters and buffers that cannot be had
        self.swapped: list[TensorTap] = []  # those that have another value meanwhile

    def __enter__(self) -> "Session":
        if self.was_entered:
            raise RuntimeError("a session can be entered once; make a new one for the next block")
        self.was_entered = self._is_open = True
        self._asked = len(self.taps)
        try:
            self._begin_placing()
            self.entered = note(self)
            for tap in self.taps:
                tap.place(self)
            if self.every is not None:
                self.every.place(self)
            for mode in self.modes:
                mode.place_hooks(self)
                mode.switch_on()
            self.scope.open()
            if self.swapped and torch.is_grad_enabled() and self.scope.is_recomputed():
                what = "a checkpoint that runs again computes gradients with what is there when the block is over"
                raise EditError(f"{_names(self.swapped)}: {what}; open the block around the checkpoint")
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.ended_by = kind
        if rest and isinstance(rest[0], Exception):
            self.raised = raised(*rest)
        try:
            self._leave()
        except KeyboardInterrupt:  # which came in between
            self._leave()
            raise

    def __del__(self) -> None:
        """Nobody can leave it any more."""
        if not self._is_open or sys.is_finalizing():
            return
        self.ended_by = GeneratorExit
        self._leave()
        what = f"a session of {self.verb} was entered here and never left, so its hooks stayed until it was collected"
        if self.entered is not None:
            hint = f"{what}; use it in a `with` block"
            warnings.warn_explicit(hint, TenterhookWarning, self.entered.file, self.entered.number)

    def rest(self) -> None:
        """From here on it sees nothing, until `batch`; its hooks stay."""
        self.scope.rests = True
        self.scope.close()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """While the block runs it sees what runs, with nothing counted before."""
        del self.taps[self._asked :]  # of values inside a forward
        for one in (*self.taps, *self.modes):
            one.restart()
        self.scope.rests = False
        self.scope.open()
        try:
            with self._modes_in_this_thread():
                yield
        finally:
            self.rest()

    @contextmanager
    def again(self) -> Iterator[None]:
        """While a checkpoint runs again: what changed something the first time is there, even after the session."""
        if self._is_open:
            with self._modes_in_this_thread():
                yield
            return
        if self.swapped:
            what = "it ran with a changed value under a checkpoint, which now runs it again"
            raise EditError(
                f"{_names(self.swapped)}: {what}, and has been restored since; run the backward inside the block"
            )
        try:
            with lock:
                self._recomputing += 1
                if self._recomputing == 1:
                    self._begin_placing()
                    self.places.put_back()
            with self._modes_in_this_thread():
                yield
        finally:
            with lock:
                self._recomputing -= 1
                if self._recomputing == 0:
                    self._remove()

    @contextmanager
    def _modes_in_this_thread(self) -> Iterator[None]:
        with ExitStack() as stack:
            for mode in self.modes:
                own = mode.for_this_thread()
                if own is not None and own.switch_on():
                    stack.callback(own.switch_off)
            yield

    def _begin_placing(self) -> None:
        compiler.force_eager(self, _choose)
        begin_hiding(self)

    def _leave(self) -> None:
        try:
            for mode in self.modes:
                mode.finish(failed=self.ended_by is not None)
        finally:
            self.scope.close()
            with lock:
                self._is_open = False
                self._remove(remember=self.scope.is_awaited)
            if self.swapped:
                with ExitStack() as stack:  # the last first, and each even if another fails
                    for tap in self.swapped:
                        stack.callback(tap.put_back)

    def _remove(self, remember: bool = False) -> None:
        for mode in self.modes:
            mode.switch_off()
        self.places.remove(remember)
        self.scope.remove_hooks()
        forget(self)
        end_hiding(self)
        if self.compiled is not None:
            self.compiled.over()
        compiler.allow_compiled(self)

    def module_of(self, site: Site) -> Any:
        """The module, or the graph node, that a site belongs to."""
        owner = site.owner()
        if owner is None:
            raise ReferenceError(f"the module of {site} is gone")
        return owner

    @functools.cached_property
    def modules(self) -> list[Any]:
        """References to the modules of the model, each once."""
        model = self.model()
        found = {id(m): weakref.ref(m) for _, m in walk(model)} if isinstance(model, nn.Module) else {}
        return list(found.values())

    @functools.cached_property
    def sharded(self) -> dict[tuple[int, str], Tensor]:
        """The parameters that FSDP2 has sharded, by the id of their module and their name there."""
        model = self.model()
        return {} if model is None else sharded_parameters(model)

    def wait_for_gradient(self, tap: Tap) -> None:
        """From here on, note the backward passes that do not bring what a tap waits for."""
        passes = self.passes
        if passes is None:
            passes = self.passes = Passes(self)
            passes.start()
            self.places.at_end(passes.stop)
        passes.pending.append(tap)

    def saw_anything(self) -> bool:
        """Whether any of its sites was reached, as far as that is known."""
        return any(tap.calls or tap.elsewhere for tap in self.taps if tap.site.kind in ("module", "inner"))

    def add(self, tap: Tap) -> None:
        """One more tap, for a value that an address inside a forward turned out to mean."""
        tap.number = len(self.taps)
        self.taps.append(tap)
        if tap.site.address.grad:
            self.wait_for_gradient(tap)

    def shown_taps(self) -> list[Any]:
        """The taps that a report shows, those inside a forward under the names that they have got."""
        others_came = any(tap.has_wide_answers for tap in self.taps)
        return [tap for tap in self.taps if tap.is_shown(others_came)]

    def why_silent(self, tap: Tap) -> str:
        """The most likely reason that a tap never fired."""
        if not self.was_entered:
            return "the session was never entered; use it in a `with` block"
        if self.raised is not None and tap.site.kind in ("module", "inner") and not tap.born:
            if (given := self.raised.given.get(tap.site.module)) is not None:
                return f"it was called with {given} and did not return: {self.raised.what}"
            if not tap.calls and (inside := self.raised.innermost(self.model())):
                return f"not reached before {self.raised.what} (in {inside})"
        return tap.why_silent(self.model(), self)

    def report(self, rows: Iterable[tuple[Tap, str]]) -> Report:
        """What fired and what did not; each row is a tap and what it saw, in words."""
        return report_of(((tap, what if tap.fired else self.why_silent(tap)) for tap, what in rows), self.notes())

    def notes(self) -> list[str]:
        """What a report says under its table."""
        return [*notes_on(self), *([] if self.every is None else [self.every.note()])]


def _choose(callback: Any) -> Any:
    """What Dynamo calls back while sessions are open. Who decides needs the compiler, which is there by now."""
    from tenterhook.hooks.compiled import choose

    return choose(callback)


def _names(taps: Iterable[Tap]) -> str:
    return ", ".join(str(tap.site) for tap in taps)


def report_of(rows: Iterable[tuple[Any, str]], notes: list[str]) -> Report:
    """What came at some taps, or why nothing did, in words."""
    lines = [(str(tap.site), times(tap), what) for tap, what in rows]
    return Report(("address", "fired", "value, or why there is none"), lines, notes, ("fired",))


def times(tap: Any) -> str:
    """How often a tap fired, as reports say it."""
    return f"{tap.fired}×" if tap.fired else "never"
