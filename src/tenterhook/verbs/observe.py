"""observe: run a function on the values at some addresses, without keeping them."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook.addresses.grammar import known_when_made
from tenterhook.addresses.graph import searchable
from tenterhook.addresses.sites import Selector, Site, resolve
from tenterhook.changes.change import Change
from tenterhook.changes.function import takes_site
from tenterhook.errors import AddressError, TenterhookWarning
from tenterhook.hooks.report import Report
from tenterhook.hooks.scope import not_watching
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import Action, Call, Tap, check_unchanged
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Path, describe, leaves, rebuild_live, version_of
from tenterhook.verbs.taps import tap_for

Observer = Callable[..., object]


class Show(Action):
    """Show each value to a function."""

    def __init__(self, look: Observer) -> None:
        self._look = look
        self._takes_site = takes_site(look)
        self._shown = 0
        self.last = ""  # the last one, in words

    def fired(self, tap: Tap) -> int:
        return self._shown

    def on_value(self, tap: Tap, value: Any, call: Call) -> None:
        self._show(tap, value.plain() if isinstance(value, Inputs) else value, call.number)

    def on_gradient(self, tap: Tap, grad: Tensor | None, call: int, path: Path) -> None:
        self._show(tap, grad, call, path)

    def _show(self, tap: Tap, value: Any, call: int, path: Path = ()) -> None:
        site = tap.site.at(call, path)
        live = rebuild_live(value, lambda _, tensor: tensor.detach())
        before = [(tensor, version_of(tensor)) for _, tensor in leaves(live)]
        self._shown += 1
        self.last = describe(live)
        try:
            with not_watching(tap.scope):
                self._look(live, site) if self._takes_site else self._look(live)
        except Exception as error:
            error.add_note(f"while observing {site}")
            raise
        check_unchanged(before, f"the observer at {site}")


class observe:
    """Run a function on the value at each address while the block runs.

        with observe(model, {"**<ReLU>": lambda value, site: print(site, value.mean())}):
            model(x)

    A function is `f(value)` or `f(value, site)`, as in `edit`. It gets the value itself, detached but not copied: copy
    what you keep, and change nothing. `str(site)` is the address of that one value, `site.module` its module. An
    exception in it carries the address. `every=50` shows only what belongs to every 50th call of the model; these are
    the calls @0, @1 … of the sites. `eager=True` has compiled code run as it is written.
    """

    def __init__(
        self,
        model: nn.Module | Tensor | Node,
        observers: Mapping[Selector, Observer],
        *,
        frozen: bool = False,
        every: int | None = None,
        eager: bool = False,
    ) -> None:
        model = searchable(model, "observe")
        if not isinstance(observers, Mapping):
            kind = type(observers).__name__
            raise TypeError(f"observe needs a dict of selector: function of the value, got {kind}")
        self._model = model  # sites refer to it weakly
        self._session = Session(model, verb="observe", frozen=frozen, every=every, eager=eager)
        self._groups: list[list[Tap]] = []
        for selector, look in observers.items():
            if isinstance(look, Change):
                raise TypeError(f"{selector}: observing changes nothing; {look} is for edit")
            if not callable(look):
                raise TypeError(
                    f"the observer at {selector!r} must be a function f(value) or f(value, site), got {look!r}"
                )
            try:
                takes_site(look)
            except TypeError as error:
                raise TypeError(f"{selector}: {error}") from None
            self._groups.append([self._tap(site, look) for site in resolve(model, selector)])
        self._session.taps = [tap for group in self._groups for tap in group]

    def _tap(self, site: Site, look: Observer) -> Tap:
        if not known_when_made(site.address):
            raise AddressError(f"{site}: which one is the last is known only afterwards; observe counts from 0")
        return tap_for(site, self._session.scope, lambda: Show(look))

    def __enter__(self) -> "observe":
        self._session.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(kind, *rest)
        if kind is None:
            for group in self._groups:
                if not any(one.fired for tap in group for one in tap.each()):
                    why = self._session.why_silent(group[0])
                    warnings.warn(f"{group[0].site} was never observed: {why}", TenterhookWarning, stacklevel=2)

    def __repr__(self) -> str:
        return str(self.report()) if self._session.was_entered else f"<observe at {len(self._session.taps)} addresses>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def report(self) -> Report:
        """Per address: how often it fired, or that it never did and the most likely reason."""
        return self._session.report((tap, tap.action.last) for tap in self._session.shown_taps())
