"""Selectors to sites: where the values are that somebody asks for.

resolve(model, "**<ReLU>:in")     the sites that a selector means, or an AddressError that helps
resolve_all(model, selectors)     those of several selectors, each once
"""

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.globs import meant_by, unknown
from tenterhook.addresses.grammar import Address, escape, inner_choices, parse
from tenterhook.addresses.modules import WRAPPER_PARTS, find, own_tensors, shape_of, unwrap, walk
from tenterhook.errors import AddressError

_Filter = Callable[[str, Any], bool]  # of a canonical name and what has it
Selector = str | nn.Module | type[nn.Module] | Callable[[str, nn.Module], bool]


class Site:
    """A place in a model where a value exists: a module's input or output, a parameter, a buffer, their gradients."""

    __slots__ = ("address", "is_whole_output", "kind", "owner", "seen", "spot", "wide")

    def __init__(self, address: Address, owner: Any, kind: str, wide: bool) -> None:
        self.address = address
        self.kind = kind
        self.is_whole_output = kind == "module" and not address.grad and address.is_whole
        self.wide = wide  # found by a selector that may mean many, so one that stays silent is no mistake
        self.owner = weakref.ref(owner)
        self.spot: Any = None  # of a value inside a forward: the instruction that makes it
        self.seen = ""  # what a value was like, where a run was made to see

    def __str__(self) -> str:
        return str(self.address)

    def __repr__(self) -> str:
        return f"<site {self} {self.class_name}>"

    @property
    def class_name(self) -> str:
        """The class of the module; `Parameter` or `Buffer` for a tensor of one; the name of a graph node."""
        if self.kind == "node":
            return str(self.module.name) if self.module is not None else ""
        return self.kind.capitalize() if self.kind in ("parameter", "buffer") else type(self.module).__name__

    def gradient(self) -> "Site":
        """The site of its gradient."""
        return self._with(self.address.with_grad(True))

    def value(self) -> "Site":
        """The site of the value, of its gradient's."""
        return self._with(self.address.with_grad(False))

    def at(self, call: int, path: tuple[int | str, ...] = ()) -> "Site":
        """The site of one call, and of one leaf below."""
        return self._with(self.address._replace(call=call, leaf=(*self.address.leaf, *path)))

    def unshared(self) -> "Site":
        """A copy to write into: `resolve` may give others the same site."""
        return self._with(self.address)

    def _with(self, address: Address) -> "Site":
        twin = Site.__new__(Site)
        twin.address = address
        twin.is_whole_output = self.kind == "module" and not address.grad and address.is_whole
        twin.owner, twin.kind, twin.wide = self.owner, self.kind, self.wide
        twin.spot, twin.seen = self.spot, self.seen
        return twin

    @property
    def module(self) -> Any:
        """The module (for a parameter or buffer: the one that holds it); None when it is gone."""
        return self.owner()

    @property
    def tensor(self) -> Tensor | None:
        """The parameter or buffer itself; None for a module's values, which exist only while it runs."""
        module = self.module
        if self.kind not in ("parameter", "buffer") or module is None:
            return None
        return own_tensors(module, self.kind).get(self.address.name.rpartition(".")[2])

    @property
    def source(self) -> str:
        """Of a value inside a forward: file:line of where it is made."""
        return "" if self.spot is None else str(self.spot.source)

    @property
    def text(self) -> str:
        """That line."""
        return "" if self.spot is None else str(self.spot.text)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that the module itself holds."""
        module = self.module
        own = {} if module is None else own_tensors(module, "parameter")
        return {name: shape_of(p) for name, p in own.items() if p is not None}


def check_model(model: object, verb: str) -> None:
    """Raise a TypeError that helps unless `model` is a module."""
    if isinstance(model, nn.Module):
        return
    hint = "pass the nn.Module itself, or a function that is written in Python"
    if isinstance(model, str):
        hint = "put the model first, then the addresses"
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = f"that is the class; pass an instance, {model.__name__}(...)"
    raise TypeError(f"{verb} needs a model (torch.nn.Module), got {type(model).__name__}: {hint}")


def resolve_all(model: Any, selectors: Sequence[Selector]) -> list[Site]:
    """The sites that some selectors mean, each once."""
    found: list[Site] = []
    overlap = False
    for selector in selectors:
        site = site_named(model, selector)
        if site is not None:
            found.append(site)
        else:
            overlap = True
            found += resolve(model, selector)
    return list({site.address: site for site in found}.values()) if overlap and len(selectors) > 1 else found


def resolve(model: Any, selector: Selector) -> list[Site]:
    """The sites that a selector means, each module once; AddressError where there are none."""
    if (site := site_named(model, selector)) is not None:
        return [site]
    if not isinstance(model, nn.Module):
        return list(model.resolve(selector))  # an autograd graph
    if isinstance(selector, str):
        return _resolve_text(model, selector)
    if isinstance(selector, nn.Module):
        return [_site_of(model, selector)]
    if isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise TypeError(f"a class selector must be a kind of torch.nn.Module, got {selector.__name__}")
        what = f"no module of class {selector.__name__}"
        return _matching(model, lambda _, m: isinstance(m, selector), what)
    if callable(selector):
        what = "no module for which the predicate is true"
        return _matching(model, lambda name, m: bool(selector(name, m)), what)
    if isinstance(selector, (list, tuple, set)):
        raise TypeError(f"a selector is one address; unpack the {type(selector).__name__}: capture(model, *names)")
    kinds = "an address, a module, a module class, or a function (name, module) -> bool"
    raise TypeError(f"a selector is {kinds}; got {type(selector).__name__}")


class _PlainName:
    """A canonical name as it was written, perhaps with a role, leaf or call, and the site that it meant last."""

    __slots__ = ("address", "parts", "site")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.parts = () if address.path == "." else tuple(address.path.split("."))
        self.site: Site | None = None


@lru_cache(maxsize=8192)
def _plain_name(text: str) -> _PlainName | None:
    try:
        plain = _PlainName(parse(text))
    except AddressError:
        return None
    address = plain.address
    is_more = address.is_glob or address.inner or "\\" in address.path or not WRAPPER_PARTS.isdisjoint(plain.parts)
    return None if is_more else plain


def site_named(model: Any, selector: Selector) -> Site | None:
    """The site of a module in the model by its plain name; None where `resolve` has to look further.

    Nearly all selectors are such, and nearly always mean what they meant the last time: that site is given again.
    """
    if type(selector) is not str or (plain := _plain_name(selector)) is None or not isinstance(model, nn.Module):
        return None
    module = model
    for part in plain.parts:
        children = module._modules
        if type(children) is not dict:  # a ScriptModule
            return None
        child = children.get(part)
        if child is None and (child := dict(unwrap(module)._modules.items()).get(part)) is None:
            return None
        module = child
    if len(module._modules) == 1:
        module = unwrap(module)
    site = plain.site
    if site is None or site.owner() is not module:
        site = plain.site = Site(plain.address, module, "module", False)
    return site


def _resolve_text(model: nn.Module, text: str) -> list[Site]:
    # A module may be called "a:b" or "x/y": then its bare name means that module.
    address = parse(text) if find(model, text) is None else Address(escape(text))
    if address.inner:
        return _resolve_inner(model, text, address)
    if address.is_glob:
        return _resolve_glob(model, text, address)
    site = _literal(model, address.name, address) or _literal(model, text, address)
    if site is None:
        raise unknown(model, text, address)
    if site.kind != "module" and (address.role == "in" or address.leaf or address.call is not None):
        what = "inputs, leaves and calls belong to modules"
        raise AddressError(f"{text!r}: {address.name} is a {site.kind}, which is one tensor; {what}")
    return [site]


def _resolve_inner(model: nn.Module, text: str, address: Address) -> list[Site]:
    """The modules whose forwards have such a value, as far as can be said before they run."""
    check_inner(text, address)
    around = address._replace(inner="")
    if address.is_glob:
        owners = _resolve_glob(model, text, around)
    else:
        site = _literal(model, around.name, around)
        if site is None:
            raise unknown(model, text, around)
        owners = [site]
    if any(site.kind != "module" for site in owners):
        raise AddressError(f"{text!r}: {owners[0].address.name} is a {owners[0].kind}, which has no forward")
    wide = address.is_glob or "*" in address.inner
    names = inner_choices(address.inner)
    return [Site(site.address._replace(inner=name), site.module, "inner", wide) for site in owners for name in names]


def check_inner(text: str, address: Address) -> None:
    """Raise if an address inside a forward says what cannot be."""
    if address.role == "in":
        raise AddressError(f"{text!r}: ':in' belongs to modules; a value inside a forward has its own name")
    if "#" in address.inner.rpartition("/")[0]:
        raise AddressError(f"{text!r}: a number belongs to the last name, as in attn/softmax#1")


def _literal(model: nn.Module, name: str, address: Address) -> Site | None:
    if (found := find(model, name)) is not None:
        return Site(address.with_name(found[0]), found[1], "module", wide=False)
    head, _, tail = name.rpartition(".")
    if (found := find(model, head or ".")) is not None:
        path, owner = found
        for kind in ("parameter", "buffer"):
            if own_tensors(owner, kind).get(tail) is not None:
                full = tail if path == "." else f"{path}.{tail}"
                return Site(address.with_name(full), owner, kind, wide=False)
    for known, module in walk(model):  # last, for it is slow: a module in a plain list
        if known == name:
            return Site(address.with_name(name), module, "module", wide=False)
    return None


def _site_of(model: nn.Module, module: nn.Module) -> Site:
    wanted = unwrap(module)
    for name, known in walk(model):
        if known is wanted:
            return Site(Address(escape(name)), wanted, "module", wide=False)
    # Not in the model, as far as can be seen: held by a closure, say. The caller has it, so it can be hooked.
    return Site(Address(f"{type(wanted).__name__} at {id(wanted):#x}"), wanted, "module", wide=False)


def _resolve_glob(model: nn.Module, text: str, address: Address) -> list[Site]:
    if address.path == "**" and address.cls is None:
        return _modules(model, address, None)
    found = meant_by(model, text, address)
    return [Site(address.with_name(thing.name), thing.owner, thing.kind, True) for thing in found]


def _matching(model: nn.Module, wanted: _Filter, what: str) -> list[Site]:
    found = _modules(model, Address("."), wanted)
    if not found:
        classes = sorted({type(m).__name__ for _, m in walk(model)})
        raise AddressError(f"{what} in {type(model).__name__}; its classes are {', '.join(classes)}")
    return found


def _modules(model: nn.Module, address: Address, wanted: _Filter | None) -> list[Site]:
    """The sites of modules, each once; all but the name is as in an address."""
    found: dict[int, Site] = {}
    for name, module in walk(model):
        if id(module) not in found and (wanted is None or wanted(name, module)):
            found[id(module)] = Site(address.with_name(name), module, "module", True)
    return list(found.values())
