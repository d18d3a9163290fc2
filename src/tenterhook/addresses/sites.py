"""Where things are in a model: names to modules, selectors to sites.

    resolve(model, "**<ReLU>:in")     the sites that a selector means, or an AddressError that helps

Names are canonical: the parts that DDP, FSDP, torch.compile and checkpoint wrappers add never show. Modules in
plain lists, tuples and dicts, which `named_modules()` does not see, have names too (`layers.0`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.grammar import Address, escape, parse
from tenterhook.errors import AddressError, close_matches

Selector = str | nn.Module | type[nn.Module] | Callable[[str, nn.Module], bool]

_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
_MODULE_WRAPPERS = {"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"}
WHOLE_OUTPUT = Address(".")[3:]
_TORCH_OWN = tuple(vars(nn.Module()))
_PLAIN_CONTAINERS = (list, tuple, dict)
_LONGEST_LIST = 10_000  # a longer plain list on a module holds data, not modules


class Site:
    """A place in a model where a value exists: a module's input or output, a parameter, a buffer, their gradients."""

    __slots__ = ("address", "kind", "owner", "seen", "spot", "wide")

    def __init__(self, address: Address, owner: Any, kind: str, wide: bool) -> None:
        self.address = address
        self.kind = kind
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
        return self._with(Address(*self.address[:6], True))

    def value(self) -> "Site":
        """The site of the value, of its gradient's."""
        return self._with(Address(*self.address[:6], False))

    def at(self, call: int, path: tuple[int | str, ...] = ()) -> "Site":
        """The site of one call, and of one leaf below."""
        return self._with(self.address._replace(call=call, leaf=(*self.address.leaf, *path)))

    def _with(self, address: Address) -> "Site":
        twin = Site.__new__(Site)
        twin.address, twin.owner, twin.kind, twin.wide = address, self.owner, self.kind, self.wide
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
        return _own(module, self.kind).get(self.address.name.rpartition(".")[2])

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
        own = {} if module is None else _own(module, "parameter")
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
        site = plainly(model, selector)
        if site is not None:
            found.append(site)
        else:
            overlap = True
            found += resolve(model, selector)
    return list({site.address: site for site in found}.values()) if overlap and len(selectors) > 1 else found


def plainly(model: Any, selector: Selector, whole: bool = False) -> Site | None:
    """The site of a module by its plain name, the fast way; None where `resolve` should look.

    `whole`: only if it is the whole output, of every call.
    """
    if type(selector) is not str or (plain := _plain(selector)) is None or not isinstance(model, nn.Module):
        return None
    if whole and not plain.is_whole:
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


def resolve(model: Any, selector: Selector) -> list[Site]:
    """The sites that a selector means, each module once; AddressError where there are none."""
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


def find(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The module with a name, written with wrapper parts or without, and the name without them."""
    module, parts = unwrap(model), []
    for part in () if name == "." else name.split("."):
        child = dict(module._modules.items()).get(part)  # a ScriptModule's is no dict
        if child is not None:
            parts.append(part)
            module = unwrap(child)
        elif part not in _WRAPPER_PARTS:
            return None
    return ".".join(parts) or ".", module


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP, torch.compile and checkpoint wrappers."""
    while len(module._modules) == 1:
        ((part, child),) = module._modules.items()
        if part not in _WRAPPER_PARTS or child is None:
            return module
        if part == "module" and _MODULE_WRAPPERS.isdisjoint(c.__name__ for c in type(module).__mro__):
            return module  # somebody's own module that happens to be called "module"
        module = child
    return module


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every canonical name that it has, parents first; modules in plain lists come last."""
    visited: set[int] = set()
    loose: list[tuple[str, nn.Module]] = []
    yield from _walk_from("", unwrap(model), visited, loose)
    while loose:
        name, module = loose.pop(0)
        if id(module) not in visited:
            yield from _walk_from(name, unwrap(module), visited, loose)


def _walk_from(
    name: str, module: nn.Module, visited: set[int], loose: list[tuple[str, nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    stack: list[tuple[str, nn.Module, Any]] = [(name, module, None)]
    while stack:
        name, module, ancestors = stack.pop()
        if id(module) in visited and _is_among(module, ancestors):
            continue  # a child that holds its own parent: named once, never for ever
        visited.add(id(module))
        yield name or ".", module
        prefix = f"{name}." if name else ""
        chain = (module, ancestors)
        for part, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((prefix + part, child if len(child._modules) != 1 else unwrap(child), chain))
        for part, value in own_attributes(module):
            if type(value) in _PLAIN_CONTAINERS and 0 < len(value) <= _LONGEST_LIST:
                loose.extend(_loose_in(prefix + part, value))


def own_attributes(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """What a module's class has put on it, beside what every module has."""
    attributes = vars(module)
    if tuple(islice(attributes, len(_TORCH_OWN))) == _TORCH_OWN:  # nearly always: torch's come first
        return islice(attributes.items(), len(_TORCH_OWN), None)
    return [(name, value) for name, value in attributes.items() if name not in _TORCH_OWN]


def _is_among(module: nn.Module, chain: Any) -> bool:
    while chain is not None:
        ancestor, chain = chain
        if ancestor is module:
            return True
    return False


def _loose_in(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, nn.Module]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        if isinstance(child, nn.Module):
            yield f"{name}.{key}", child
        elif depth and type(child) in _PLAIN_CONTAINERS and len(child) <= _LONGEST_LIST:
            yield from _loose_in(f"{name}.{key}", child, depth - 1)


class _Plain:
    """A text that needs only a canonical name to be looked up, and the site that it meant the last time."""

    __slots__ = ("address", "is_whole", "parts", "site")

    def __init__(self, address: Address, parts: tuple[str, ...]) -> None:
        self.address = address
        self.parts = parts
        self.is_whole = address[3:] == WHOLE_OUTPUT
        self.site: Site | None = None


@lru_cache(maxsize=8192)
def _plain(text: str) -> _Plain | None:
    try:
        address = parse(text)
    except AddressError:
        return None
    parts = () if address.path == "." else tuple(address.path.split("."))
    is_plain = not (address.is_glob or address.inner or "\\" in address.path)
    return _Plain(address, parts) if is_plain and _WRAPPER_PARTS.isdisjoint(parts) else None


def _resolve_text(model: nn.Module, text: str) -> list[Site]:
    # A module may be called "a:b" or "x/y": then its bare name means that module.
    address = parse(text) if find(model, text) is None else Address(escape(text))
    if address.inner:
        return _resolve_inner(model, text, address)
    if address.is_glob:
        return _resolve_glob(model, text, address)
    site = _literal(model, address.name, address) or _literal(model, text, address)
    if site is None:
        raise _unknown(model, text, address)
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
            raise _unknown(model, text, around)
        owners = [site]
    if any(site.kind != "module" for site in owners):
        raise AddressError(f"{text!r}: {owners[0].address.name} is a {owners[0].kind}, which has no forward")
    wide = address.is_glob or "*" in address.inner
    found = []
    for site in owners:
        found.append(Site(site.address._replace(inner=address.inner), site.module, "inner", wide))
    return found


def check_inner(text: str, address: Address) -> None:
    """Raise if an address inside a forward says what cannot be."""
    if address.role == "in":
        raise AddressError(f"{text!r}: ':in' belongs to modules; a value inside a forward has its own name")
    if "#" in address.inner.rpartition("/")[0]:
        raise AddressError(f"{text!r}: a number belongs to the last name, as in attn/softmax#1")


def _literal(model: nn.Module, name: str, address: Address) -> Site | None:
    if (found := find(model, name)) is not None:
        return Site(_named(address, found[0]), found[1], "module", wide=False)
    head, _, tail = name.rpartition(".")
    if (found := find(model, head or ".")) is not None:
        path, owner = found
        for kind in ("parameter", "buffer"):
            if _own(owner, kind).get(tail) is not None:
                full = tail if path == "." else f"{path}.{tail}"
                return Site(_named(address, full), owner, kind, wide=False)
    for known, module in walk(model):  # last, for it is slow: a module in a plain list
        if known == name:
            return Site(_named(address, name), module, "module", wide=False)
    return None


def _named(address: Address, name: str) -> Address:
    """The address with the canonical name, and without a class filter, in place of what was written."""
    if address.path == name:
        return address
    return Address(escape(name), None, "", address.role, address.leaf, address.call, address.grad)


def _site_of(model: nn.Module, module: nn.Module) -> Site:
    wanted = unwrap(module)
    for name, known in walk(model):
        if known is wanted:
            return Site(Address(escape(name)), wanted, "module", wide=False)
    # Not in the model, as far as can be seen: held by a closure, say. The caller has it, so it can be hooked.
    return Site(Address(f"{type(wanted).__name__} at {id(wanted):#x}"), wanted, "module", wide=False)


def _resolve_glob(model: nn.Module, text: str, address: Address) -> list[Site]:
    whole = address.pattern().fullmatch
    every = address.path == "**"
    cls = address.cls

    def wanted(name: str, thing: Any) -> bool:
        named = every or whole("" if name == "." else name + ".") is not None
        return named and (cls is None or any(c.__name__ == cls for c in type(thing).__mro__))

    found = _each_once(walk(model), None if every and cls is None else wanted, address, "module")
    if not found and address.role == "out" and not address.leaf:
        for kind in ("parameter", "buffer"):
            found += _each_once(tensors_of(model, kind), wanted, address, kind)
    if not found:
        raise _unknown(model, text, address)
    return found


def _matching(model: nn.Module, wanted: Callable[[str, nn.Module], bool], what: str) -> list[Site]:
    found = _each_once(walk(model), wanted, Address("."), "module")
    if not found:
        classes = sorted({type(m).__name__ for _, m in walk(model)})
        raise AddressError(f"{what} in {type(model).__name__}; its classes are {', '.join(classes)}")
    return found


def _each_once(
    named: Iterator[tuple[str, Any]], wanted: Callable[[str, Any], bool] | None, address: Address, kind: str
) -> list[Site]:
    found: dict[int, Site] = {}
    rest = address[3:]
    for name, thing in named:
        owner, thing = thing if kind != "module" else (thing, thing)
        if id(thing) not in found and (wanted is None or wanted(name, thing)):
            found[id(thing)] = Site(Address(escape(name), None, "", *rest), owner, kind, True)
    return list(found.values())


def tensors_of(model: nn.Module, kind: str) -> Iterator[tuple[str, tuple[nn.Module, Tensor]]]:
    """Every parameter or buffer, by name, with the module that holds it."""
    for name, module in walk(model):
        prefix = "" if name == "." else f"{name}."
        for part, tensor in _own(module, kind).items():
            if tensor is not None:
                yield prefix + part, (module, tensor)


def _unknown(model: nn.Module, text: str, address: Address) -> AddressError:
    modules = list(walk(model))
    lines = [f"nothing in {type(model).__name__} answers to {text!r}"]
    if address.cls is not None:
        classes = [type(m).__name__ for _, m in modules]
        near = [f"{address.path}<{name}>" for name in close_matches(address.cls, classes)]
        lines.append(f"its classes are {', '.join(sorted(set(classes)))}")
    else:
        names = [name for name, _ in modules]
        names += [name for kind in ("parameter", "buffer") for name, _ in tensors_of(model, kind)]
        near = close_matches(address.name, names)
    if address.name in getattr(getattr(type(model).forward, "__code__", None), "co_varnames", ()):
        near = [f"./{address.name}", *near]  # a variable in its own forward
    if near:
        lines.append(f"did you mean {', '.join(near)}?")
    lines.append("all addresses: print(tenterhook.sites(model)), or `tenterhook sites FILE.py:factory`")
    return AddressError("\n  ".join(lines))


def _own(module: nn.Module, kind: str) -> dict[str, Any]:
    """The parameters or buffers of a module itself, by name."""
    table = module._parameters if kind == "parameter" else module._buffers
    return table if isinstance(table, dict) else dict(table.items())  # a ScriptModule's is no dict


def shape_of(tensor: Any) -> tuple[Any, ...]:
    """The shape of a parameter or buffer, which a lazy one does not have yet."""
    return ("?",) if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) else tuple(tensor.shape)
