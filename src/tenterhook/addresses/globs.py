"""What an address with wildcards, choices or a class means in a model, and what there is where it means nothing."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from tenterhook.addresses.grammar import Address, each_choice, parts, path_pattern
from tenterhook.addresses.modules import tensors_of, walk
from tenterhook.errors import AddressError, close_matches

TENSORS = ("parameter", "buffer")


class Thing(NamedTuple):
    """A module, or a parameter or buffer and the module that holds it, by a canonical name."""

    name: str
    owner: nn.Module
    kind: str
    tensor: Any = None

    @property
    def itself(self) -> Any:
        """The module or tensor."""
        return self.owner if self.kind == "module" else self.tensor


def everything(model: nn.Module, kinds: Iterable[str] = ("module", *TENSORS)) -> Iterator[Thing]:
    """All of some kinds, under each of their names."""
    for kind in kinds:
        if kind == "module":
            yield from (Thing(name, module, kind) for name, module in walk(model))
        else:
            yield from (Thing(name, owner, kind, tensor) for name, (owner, tensor) in tensors_of(model, kind))


def meant_by(model: nn.Module, text: str, address: Address) -> list[Thing]:
    """What a glob means: modules, or else parameters and buffers, each once."""
    has_tensors = address.role == "out" and not address.leaf
    owners = _of_class(everything(model), address) if address.tail else []
    found: list[Thing] = []
    for kinds in (("module",), TENSORS) if has_tensors else (("module",),):
        if address.tail:
            found = [thing for owner in owners for thing in _below(owner, address.tail, kinds)]
        else:
            found = _of_class(everything(model, kinds), address)
        if found:
            break
    if not found:
        raise unknown(model, text, address)
    _check_choices(model, text, address.path, [thing.name for thing in owners or found])
    each: dict[int, Thing] = {}
    for thing in found:
        each.setdefault(id(thing.itself), thing)
    return list(each.values())


def goes_by(thing: Any, name: str) -> bool:
    """Whether a class of this name, or of this end of its full name, is among those of an object."""
    dotted = "." in name  # tells two classes of one name apart
    return any(
        cls.__name__ == name or (dotted and f".{cls.__module__}.{cls.__qualname__}".endswith(f".{name}"))
        for cls in type(thing).__mro__
    )


def _of_class(things: Iterable[Thing], address: Address) -> list[Thing]:
    """Those whose name the path means, and that are of the class, if there is one."""
    is_named, cls = address.path_filter(), address.cls
    return [thing for thing in things if is_named(thing.name) and (cls is None or goes_by(thing.itself, cls))]


def _below(owner: Thing, tail: str, kinds: Iterable[str]) -> list[Thing]:
    """What the rest of an address means below a module of the class, by full names."""
    if owner.kind != "module":
        return []
    is_named = Address(tail).path_filter()
    prefix = "" if owner.name == "." else f"{owner.name}."
    below = (thing for thing in everything(owner.owner, kinds) if is_named(thing.name))
    return [thing._replace(name=owner.name if thing.name == "." else prefix + thing.name) for thing in below]


def _check_choices(model: nn.Module, text: str, path: str, names: list[str]) -> None:
    """Raise if a path names one by one what is not there: `h.{2..14}` of twelve."""
    dotted = [_dotted(name) for name in names]
    missing = [choice for one, choice in each_choice(path) if not any(map(path_pattern(one).fullmatch, dotted))]
    if missing:
        more = f" … ({len(missing)} in all)" if len(missing) > 6 else ""
        what = f"{text!r}: nothing there is called {', '.join(missing[:6])}{more}"
        raise AddressError("\n  ".join([what, *_what_exists(model, path)]))


def _what_exists(model: nn.Module, path: str) -> list[str]:
    """What there is in the place of the first choices in a path."""
    names = list(dict.fromkeys(_dotted(thing.name) for thing in everything(model)))
    pieces = parts(path)
    for i, piece in enumerate(pieces):
        above = path_pattern(".".join(pieces[:i]) or ".").fullmatch
        if "{" in piece and (owner := next(filter(above, names), None)) is not None:
            below = dict.fromkeys(name[len(owner) :].partition(".")[0] for name in names if name.startswith(owner))
            return [f"{owner[:-1] or type(model).__name__} has {_some([name for name in below if name])}"]
    return []


def unknown(model: nn.Module, text: str, address: Address) -> AddressError:
    """The error that nothing answers to an address, with what there is instead."""
    lines = [f"nothing in {type(model).__name__} answers to {text!r}"]
    modules = [module for _, module in walk(model)]
    of_class = [module for module in modules if goes_by(module, address.cls)] if address.cls else []
    near: list[str] = []
    if address.tail and of_class:
        below = dict.fromkeys(thing.name for thing in everything(of_class[0]) if thing.name != ".")
        lines.append(f"a {type(of_class[0]).__name__} has {_some(list(below))}")
    elif address.cls is not None:
        classes = [type(module).__name__ for module in modules]
        lines.append(f"its classes are {', '.join(sorted(set(classes)))}")
        near = [f"{address.path}<{name}>" for name in close_matches(address.cls, classes)]
    elif "{" in address.path:
        lines += _what_exists(model, address.path)
    else:
        near = close_matches(address.name, [thing.name for thing in everything(model)])
    if address.name in getattr(getattr(type(model).forward, "__code__", None), "co_varnames", ()):
        near = [f"./{address.name}", *near]  # a variable in its own forward
    if near:
        lines.append(f"did you mean {', '.join(near)}?")
    lines.append("all addresses: print(tenterhook.sites(model)), or `tenterhook sites FILE.py:factory`")
    return AddressError("\n  ".join(lines))


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 12 else [*names[:8], "…", names[-1]]) or "nothing below it"


def _dotted(name: str) -> str:
    """As path patterns have it."""
    return "" if name == "." else f"{name}."
