"""capture: keep the values and gradients at some addresses, in the user's own loop.

with capture(model, "layer1", "grad(layer1)") as seen:
    model(x).sum().backward()
seen["layer1"]                # a tensor, or the structure where the value is one
seen.calls("layer1")          # one per call, in order
seen.report()                 # what fired, what never did, and why
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook.addresses.grammar import Address
from tenterhook.addresses.graph import searchable
from tenterhook.addresses.sites import Selector, Site, resolve, resolve_all
from tenterhook.errors import close_matches
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import Tap
from tenterhook.inside.taps import InnerTap
from tenterhook.verbs.captured import Captured
from tenterhook.verbs.keep import (
    Countdown,
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
)
from tenterhook.verbs.taps import tap_for

if TYPE_CHECKING:
    from tenterhook.verbs.each import Batches


class capture:
    """Keep the values and gradients at some addresses while the block runs.

        with capture(model, "layer1", "layer4:in", "grad(layer1)") as seen:
            model(x).sum().backward()
        seen["grad(layer1)"]

    A selector is an address, a module, a module class, or `lambda name, module: bool`; none means every module's
    output. `grad=True` asks for the gradient of each selected value too. `copy=False` keeps the tensor itself and
    raises when it was overwritten since. `detach=False` keeps the graph, for losses on features. `device` and `dtype`
    say where and how to keep it; `reduce` is applied first, so that nothing big is held; a dict of selectors gives each
    a `reduce` of its own, `{"h.*": torch.norm, "ln_f": None}`. `keep="last"` keeps only the last call. `every=50` keeps
    only what belongs to every 50th call of the model; these are the calls @0, @1 … here. `frozen=True` gives values
    that need no gradient one all the same. `eager=True` has compiled code run as it is written.
    """

    _verb = "capture"
    _direct = True  # whether values may be kept without a detour

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
        every: int | None = None,
        frozen: bool = False,
        eager: bool = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise TypeError(_no_such_option(next(iter(unknown)), self._verb))
        model = searchable(model, self._verb)
        session = Session(model, verb=self._verb, frozen=frozen, every=every, eager=eager)
        countdown = None if self._direct else Countdown(session.scope)
        how = How(copy, detach, device, dtype, reduce, keep, session.scope, Log(), countdown)
        direct = self._direct and every is None
        selectors, reduces = _apart(model, selectors)
        sites = _sites(model, selectors, grad)
        hows = [replace(how, reduce=reduces[site.address]) if site.address in reduces else how for site in sites]
        session.taps = [_tap(i, site, own, direct) for i, (site, own) in enumerate(zip(sites, hows, strict=True))]
        self._model = model  # what was captured does not hold on to it, but the session must
        self._session = session
        self._how, self._hows = how, hows
        self._seen = Captured(session, how.log)

    def __enter__(self) -> Captured:
        self._session.__enter__()
        return self._seen

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._session.__exit__(kind, error, trace)

    @staticmethod
    def once(
        model: nn.Module,
        inputs: Any,
        *selectors: Selector,
        loss: Callable[[Any], Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """One forward, and the value (with several selectors: what was captured).

            features = capture.once(model, x, "layer4")
            early = capture.once(model, x, "layer1@0")                      # does not run what comes after
            seen = capture.once(model, x, "layer4", "grad(layer4)", loss=lambda out: out[:, 3].sum())

        `inputs` is the model's argument, a tuple of arguments, or a mapping of keyword arguments. The forward ends
        early where each address says which call it means; without that, only its end tells that there is no second
        one. `loss` makes a number of the output, of which one backward pass follows, as far as it has to go; no
        `.grad` is touched, and values that need no gradient have one all the same. The options are those of `capture`.
        """
        from tenterhook.verbs.once import once

        return once(model, inputs, selectors, loss, options)

    @staticmethod
    def each(
        model: nn.Module,
        loader: Iterable[Any],
        *selectors: Selector,
        inputs: Callable[[Any], Any] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> "Batches":
        """A forward for each batch of a loader, without gradients, and what was captured in it.

            for seen in capture.each(model, loader, "layer4"):
                features.append(seen["layer4"].mean((2, 3)))
                labels.append(seen.batch[1])

        The model is called with a batch that is a tensor, with the first of a tuple or list, or with what a mapping
        has as keyword arguments; `inputs=lambda batch: ...` makes something else of it: an argument, a tuple of them or
        a mapping. The model stays in the mode that it is in; say `model.eval()` before. A forward ends when all that
        was asked for has come, as far as an earlier one, with inputs of the same shapes, has shown what that is. One
        batch is held at a time: `seen` is empty when the next one begins. `progress` is shown on a terminal only. The
        options are those of `capture`, but for those of gradients.
        """
        from tenterhook.verbs.each import Batches

        return Batches(model, loader, selectors, inputs, progress, options)


_OPTIONS = ("grad", "copy", "detach", "device", "dtype", "reduce", "keep", "every", "frozen", "eager")


def _no_such_option(name: str, verb: str) -> str:
    if name == "stop":
        what = "a `with` block cannot go on where its forward ended early, and all that follows in it would be lost"
        calls = 'capture.once(model, x, "layer@0") or, for many batches, capture.each(model, loader, "layer")'
        return f"{verb} has no stop=: {what}; use {calls}"
    near = " or ".join(close_matches(name, _OPTIONS)) or ", ".join(_OPTIONS)
    return f"{verb} has no option {name!r}; did you mean {near}?"


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


def _tap(number: int, site: Site, how: How, direct: bool) -> Tap:
    """The tap of a site, for which there may be a faster one; `direct`: the session allows it."""
    if direct and how.simple and site.is_whole_output:
        return PlainOutput(number, site, how)
    is_whole = direct and site.address.is_whole
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
