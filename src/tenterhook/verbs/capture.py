"""capture: keep the values and gradients at some addresses, in the user's own loop.

with capture(model, "layer1", "grad(layer1)") as seen:
    model(x).sum().backward()
seen["layer1"]                # a tensor, or the structure where the value is one
seen.calls("layer1")          # one per call, in order
seen.report()                 # what fired, what never did, and why
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook.addresses.grammar import Address
from tenterhook.addresses.graph import searchable
from tenterhook.addresses.sites import Selector, Site, resolve, resolve_all
from tenterhook.addresses.why import is_container
from tenterhook.hooks.scope import Scope
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import Tap
from tenterhook.inside.taps import InnerTap
from tenterhook.values.inputs import call_with
from tenterhook.verbs.captured import Captured
from tenterhook.verbs.keep import (
    How,
    Keep,
    KeepGradients,
    KeepLastValue,
    KeepValues,
    Log,
    PlainGradient,
    PlainInner,
    PlainInnerGradient,
    PlainOutput,
    Stop,
    Wait,
)
from tenterhook.verbs.taps import tap_for


class capture:
    """Keep the values and gradients at some addresses while the block runs.

        with capture(model, "layer1", "layer4:in", "grad(layer1)") as seen:
            model(x).sum().backward()
        seen["grad(layer1)"]

    A selector is an address, a module, a module class, or `lambda name, module: bool`; none means every module's
    output. `grad=True` asks for the gradient of each selected value too. `copy=False` keeps the tensor itself and
    raises when it was overwritten since. `detach=False` keeps the graph, for losses on features. `device` and `dtype`
    say where and how to keep it; `reduce` is applied first, so that nothing big is held; a dict of selectors gives each
    a `reduce` of its own, `{"h.*": torch.norm, "ln_f": None}`. `keep="last"` keeps only the last
    call. `stop=True` ends the forward once every asked value is there. `frozen=True` gives values that need no gradient
    one all the same.
    """

    def __init__(
        self,
        model: nn.Module | Tensor | Node,
        *selectors: Selector | Mapping[Selector, Callable[[Tensor], Any] | None],
        grad: bool = False,
        copy: bool = True,
        detach: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduce: Callable[[Tensor], Any] | None = None,
        keep: str = "all",
        stop: bool = False,
        frozen: bool = False,
    ) -> None:
        model = searchable(model, "capture")
        session = Session(model, frozen=frozen)
        how = How(copy, detach, device, dtype, reduce, keep, session.scope, Log())
        selectors, reduces = _apart(model, selectors)
        session.taps = []
        for i, site in enumerate(_sites(model, selectors, grad)):
            own = replace(how, reduce=reduces[site.address]) if site.address in reduces else how
            session.taps.append(_tap(i, site, own, own.simple and not stop))
        if stop:
            _wait_for(session.taps, session.scope)
        self._model = model  # what was captured does not hold on to it, but the session must
        self._session = session
        self._seen = Captured(session, how.log)

    def __enter__(self) -> Captured:
        self._session.__enter__()
        return self._seen

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._session.__exit__(kind, error, trace)
        return isinstance(error, Stop) and error.scope is self._session.scope

    @staticmethod
    def once(model: nn.Module, inputs: Any, *selectors: Selector, **options: Any) -> Any:
        """One forward that ends as soon as it can, and the value (with several selectors: what was captured).

            features = capture.once(model, x, "layer4")

        `inputs` is the model's argument, a tuple of arguments, or a mapping of keyword arguments.
        """
        searchable(model, "capture.once")
        if "stop" in options:
            raise TypeError("capture.once always stops as soon as it can; use capture(...) for a whole forward")
        with capture(model, *selectors, stop=True, **options) as seen:
            call_with(model, inputs)
        one = len(selectors) == 1 and not isinstance(selectors[0], Mapping) and not seen._taps[0].site.wide
        return seen[selectors[0]] if one else seen


def _apart(model: Any, selectors: tuple[Any, ...]) -> tuple[tuple[Selector, ...], dict[Address, Any]]:
    """The selectors, those of dicts too, and by address what reduces a value, where it has its own."""
    plain: list[Selector] = []
    reduces: dict[Address, Any] = {}
    for one in selectors:
        if not isinstance(one, Mapping):
            plain.append(one)
            continue
        if not one:
            raise ValueError("an empty dict selects nothing; capture(model) is every module's output")
        plain += one
        for selector, reduce in one.items():
            for site in resolve(model, selector):
                if reduces.setdefault(site.address, reduce) is not reduce:
                    raise ValueError(f"{site} is meant by several selectors of a dict, each with its own reduce")
    return tuple(plain), {**{address.with_grad(True): reduce for address, reduce in reduces.items()}, **reduces}


def _sites(model: Any, selectors: tuple[Selector, ...], grad: bool) -> list[Site]:
    sites = resolve_all(model, selectors or (("**",) if isinstance(model, nn.Module) else ("grad(**)",)))
    return sites + [site.gradient() for site in sites if not site.address.grad] if grad else sites


def _tap(number: int, site: Site, how: How, plain: bool) -> Tap:
    """The tap of a site, for which there may be a faster one; `plain`: how values are kept allows it."""
    if plain and site.is_whole_output:
        return PlainOutput(number, site, how)
    is_whole = site.address.is_whole
    tap: Tap
    if is_whole and site.kind == "module" and site.address.grad:
        tap = PlainGradient(site, how.scope, KeepGradients(how))
    else:
        tap = tap_for(site, how.scope, lambda: _action(site, how), lambda found: _inner_tap(found, how, is_whole))
    tap.number = number
    return tap


def _inner_tap(site: Site, how: How, is_whole: bool) -> InnerTap:
    if is_whole and site.address.grad:
        return PlainInnerGradient(site, how.scope, KeepGradients(how))
    if is_whole and how.simple:
        return PlainInner(0, site, how)
    return InnerTap(site, how.scope, _action(site, how))


def _action(site: Site, how: How) -> Keep:
    if site.address.grad:
        return KeepGradients(how)
    return KeepLastValue(how) if how.last or site.address.call == -1 else KeepValues(how)


def _wait_for(taps: list[Any], scope: Scope) -> None:
    """Have the forward end when all that can come has come; inside a forward that is not known before its end."""
    if any(tap.site.kind == "inner" and not tap.site.address.grad for tap in taps):
        return
    wait = Wait(scope)
    for tap in taps:
        site, call = tap.site, tap.site.address.call
        if site.address.grad:
            what = "no gradient can come where the forward ends early (stop=True, capture.once)"
            raise ValueError(f"{what}; {site} was asked for")
        if call is not None and (not isinstance(call, int) or call < 0):
            raise ValueError(f"stop=True needs to know when to stop; {site} does not say which call is the last")
        if _will_come(site):
            wait.add(tap.action)


def _will_come(site: Site) -> bool:
    module = site.module
    return site.kind == "module" and not (site.wide and module is not None and is_container(module))
