"""From sites to taps: each kind of site has its role."""

from collections.abc import Callable

from tenterhook.addresses.sites import Site
from tenterhook.hooks.inputs import InputTap
from tenterhook.hooks.nodes import NodeTap
from tenterhook.hooks.outputs import OutputTap
from tenterhook.hooks.scope import Scope
from tenterhook.hooks.tap import Action, Tap
from tenterhook.hooks.tensors import TensorTap
from tenterhook.inside.taps import InnerTap, WantedTap

_ROLES: dict[str, type[Tap]] = {"parameter": TensorTap, "buffer": TensorTap, "node": NodeTap}
_MODULE_ROLES: dict[str, type[Tap]] = {"out": OutputTap, "in": InputTap}


def tap_for(
    site: Site, scope: Scope, action: Callable[[], Action], inner: Callable[[Site], InnerTap] | None = None
) -> Tap:
    """The tap of a site. `action` makes what is done there; `inner`, a tap for each value inside a forward."""
    if site.kind == "inner":
        return WantedTap(site, scope, action(), inner or (lambda found: InnerTap(found, scope, action())))
    role = _MODULE_ROLES[site.address.role] if site.kind == "module" else _ROLES[site.kind]
    return role(site, scope, action())
