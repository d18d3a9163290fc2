"""The taps of values inside a forward.

What an address means there is known when it comes: `WantedTap` stands for the address as it was asked for, and makes an
`InnerTap` for each value that it turns out to mean.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.jit import ScriptModule

from tenterhook.addresses.grammar import split_number
from tenterhook.addresses.sites import Site
from tenterhook.addresses.why import why_never_called
from tenterhook.hooks.gradients import CallStart
from tenterhook.hooks.outputs import SCRIPTED, OutputTap
from tenterhook.hooks.scope import Scope
from tenterhook.hooks.tap import Action, Tap
from tenterhook.inside import told as told  # what the copies call
from tenterhook.inside.engine import Inside
from tenterhook.inside.why import why_silent

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session


class InnerTap(OutputTap):
    """One value inside a forward."""

    asked: "Callable[[], WantedTap | None]" = staticmethod(lambda: None)  # a weak reference

    absent: Set[int] = frozenset()  # the calls in which it did not come, before the last in which it did

    def place(self, session: "Session") -> None:
        """Nothing: the engine calls it."""

    def begin(self, call: int) -> None:
        """It comes in this call."""
        if call > self.calls:
            self.absent |= set(range(self.calls, call))
        self.calls = call

    def own_calls(self) -> Iterable[int]:
        return (call for call in range(self.calls) if call not in self.absent)

    def __call__(self, module: Any, args: Any, value: Any) -> Any:
        return self.handle(value, None)

    def came(self, value: Any, since: CallStart | None) -> Any:
        """A value is assigned. Returns what takes its place, or None."""
        return self.handle(value, since)

    def is_shown(self, others_came: bool) -> bool:
        asked = self.asked()
        return asked is None or self in asked.answers()

    def why_silent(self, model: Any, session: "Session | None" = None) -> str:
        if self.missed or self.site.address.grad:
            return super().why_silent(model, session)
        return "it came, but not in the call that was asked for"


class WantedTap(Tap):
    """An address inside a forward, as it was asked for."""

    _engine: "Callable[[], Inside | None]" = staticmethod(lambda: None)  # a weak reference: it holds the tap

    def __init__(self, site: Site, scope: Scope, action: Action, make: Callable[[Site], InnerTap]) -> None:
        super().__init__(site, scope, action)
        self.values: list[InnerTap] = []
        self._make = make

    def place(self, session: "Session") -> None:
        if isinstance(self.site.owner(), ScriptModule):
            self.missed = SCRIPTED
            return
        engine = next((mode for mode in session.modes if isinstance(mode, Inside)), None)
        if engine is None:
            engine = Inside(session)
            session.modes.append(engine)
            session.scope.session = weakref.ref(session)
        engine.want(self)
        self._engine = weakref.ref(engine)

    @property
    def why_not_compiled(self) -> str:
        """Why compiled code has to run eagerly for it."""
        name = split_number(self.site.address.inner)[0]
        if self.changes:
            return "is edited inside a forward"
        is_plain = name.count("/") == 1 and "*" not in name and isinstance(self.site.owner(), nn.Module)
        return str(self.action.why_not_compiled) if is_plain else "is not a plain variable of a forward"

    def new_value(self, site: Site) -> InnerTap:
        """The tap of one of the values that it means."""
        tap = self._make(site)
        tap.asked = weakref.ref(self)
        self.values.append(tap)
        return tap

    def restart(self) -> None:
        super().restart()
        self.values = []

    def each(self) -> Sequence[Tap]:
        return self.values or (self,)

    def answers(self) -> list[InnerTap]:
        """The taps of the values that its address means, now that all have come: `x#-1` is the last of each name."""
        last = split_number(self.site.address.inner)[1]
        if last is None or last >= 0:
            return self.values
        numbers = [split_number(tap.site.address.inner) for tap in self.values]
        most = Counter(name for name, _ in numbers)
        return [tap for tap, (name, k) in zip(self.values, numbers, strict=True) if (k or 0) == most[name] + last]

    @property
    def has_wide_answers(self) -> bool:  # type: ignore[override]
        return self.site.wide and bool(self.values)

    @property
    def fired(self) -> int:
        return sum(tap.fired for tap in self.answers())

    def is_shown(self, others_came: bool) -> bool:
        return not self.answers() and not (others_came and self.site.wide)

    def why_silent(self, model: Any, session: "Session | None" = None) -> str:
        engine = self._engine()
        if self.missed or engine is None:
            return self.missed
        something_ran = session is None or session.saw_anything()
        return why_silent(engine, self.site) or why_never_called(model, self.site, something_ran)
