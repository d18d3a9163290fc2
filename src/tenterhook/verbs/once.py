"""capture.once: one forward, and with a loss one backward, of which nothing stays."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from tenterhook.addresses.graph import searchable
from tenterhook.addresses.sites import Selector, Site
from tenterhook.addresses.why import is_container
from tenterhook.errors import NotSeenError
from tenterhook.values.inputs import call_with
from tenterhook.values.tree import describe
from tenterhook.verbs.capture import capture
from tenterhook.verbs.keep import Countdown, Stop

Loss = Callable[[Any], Tensor]


class OwnCall(capture):
    """A capture of calls that we make ourselves, so that they may end early."""

    _verb = "capture.once"
    _direct = False

    @property
    def sites(self) -> list[Site]:
        """What was asked for."""
        return [tap.site for tap in self._session.taps]

    @property
    def countdown(self) -> Countdown:
        """What ends a forward."""
        assert self._how.countdown is not None
        return self._how.countdown

    def want_sources(self) -> None:
        """From entering on, have the taps say where in the graph their gradients are."""
        self._session.scope.sources = []

    def sources(self) -> list[GradientEdge]:
        """Where they are, each once."""
        edges = self._session.scope.sources or ()
        return list({(edge.node, edge.output_nr): edge for edge in edges}.values())

    def call(self, model: Any, inputs: Any) -> Any:
        """The model's output; None where the forward ended early."""
        try:
            return call_with(model, inputs)
        except Stop as stop:
            if stop.scope is not self._session.scope:
                raise
            return None


def once(
    model: nn.Module, inputs: Any, selectors: tuple[Selector, ...], loss: Loss | None, options: dict[str, Any]
) -> Any:
    """What `capture.once` does."""
    searchable(model, "capture.once")
    if loss is not None:
        options = {"frozen": True, **options}
    kept = OwnCall(model, *selectors, **options)
    asked = kept.sites
    _check_gradients(asked, loss)
    if loss is None:
        with kept as seen:
            kept.countdown.awaited = values_in_named_calls(asked)
            kept.call(model, inputs)
    else:
        kept.want_sources()
        with torch.inference_mode(False), torch.enable_grad(), kept as seen:
            _run(kept, model, inputs, loss)
    one = len(selectors) == 1 and len(asked) == 1 and not asked[0].wide and not isinstance(selectors[0], Mapping)
    return seen[selectors[0]] if one else seen


def _check_gradients(sites: list[Site], loss: Loss | None) -> None:
    wanted = [site for site in sites if site.address.grad]
    if wanted and loss is None:
        hint = "give the loss, as in loss=lambda out: out.sum()"
        raise ValueError(f"capture.once: a gradient needs a backward pass, and {wanted[0]} was asked for; {hint}")
    if loss is not None and not wanted:
        raise ValueError("capture.once: loss= is for gradients, and none was asked for; ask for grad(...) or grad=True")


def _run(kept: OwnCall, model: Any, inputs: Any, loss: Loss) -> None:
    """A forward and a backward, which goes only as far as the values whose gradients are wanted."""
    result = loss(call_with(model, inputs))
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise TypeError(f"capture.once: loss makes one number of the model's output, and this is {describe(result)}")
    sources = kept.sources()
    if sources and not result.requires_grad:
        wanted = next(site for site in kept.sites if site.address.grad)
        what = "the loss does not need it: it has no graph, as after detach() or under torch.no_grad()"
        raise NotSeenError(f"{wanted} never came: {what}")
    if sources:
        torch.autograd.grad(result, sources, torch.ones_like(result), allow_unused=True)


def values_in_named_calls(sites: list[Site]) -> int | None:
    """How many values will come where each address says which call it means; None where that is not known."""
    return len(sites) if all(map(_is_one_call, sites)) else None


def _is_one_call(site: Site) -> bool:
    call, module = site.address.call, site.module
    return site.kind == "module" and isinstance(call, int) and call >= 0 and not is_container(module)
