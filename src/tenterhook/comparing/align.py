"""Which module of b is the partner of which module of a.

In turn: what `rename` says; the same name; then, for what is left, the same parameters in the same order (a weight may
be transposed), the same class in the same place below partners; and a module without parameters of its own is the
partner of one that holds the partners of all that it holds, and nothing else that has one. What is left over is listed.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from torch import nn

from tenterhook.addresses.modules import own_tensors, shape_of, walk
from tenterhook.errors import AddressError, close_matches

Names = dict[str, nn.Module]


class Alignment:
    """Partners, by name: `pairs` maps each name of a to one of b; the rest is in `only_a` and `only_b`."""

    def __init__(self, a: nn.Module, b: nn.Module, rename: Mapping[str, str] | None = None) -> None:
        self.a, self.b = _once(a), _once(b)
        self.pairs: dict[str, str] = {".": "."}
        self._taken = {"."}
        self.how: dict[str, str] = {".": "name"}
        self._by_rename(rename or {})
        for name in self.a:
            if name in self.b:
                self._pair(name, name, "name")
        if a is not b:
            self._by_order(_signature, "parameters")
            self._by_what_they_hold()
            self._by_place()
        self.only_a = [name for name in self.a if name not in self.pairs]
        taken = set(self.pairs.values())
        self.only_b = [name for name in self.b if name not in taken]

    def __str__(self) -> str:
        lines = [f"{a} = {b}   by {self.how[a]}" for a, b in self.pairs.items() if a != b]
        lines += [f"{name}   only in a" for name in self.only_a] + [f"{name}   only in b" for name in self.only_b]
        return "\n".join(lines) or f"all {len(self.pairs)} modules have the same names"

    __repr__ = __str__

    def _pair(self, a: str, b: str, how: str) -> bool:
        if a in self.pairs or b in self._taken:
            return False
        self.pairs[a], self.how[a] = b, how
        self._taken.add(b)
        return True

    def _by_rename(self, rename: Mapping[str, str]) -> None:
        for pattern, wanted in rename.items():
            found = [(name, new) for name in self.a if (new := _renamed(name, pattern, wanted)) is not None]
            if not found:
                near = close_matches(pattern, self.a)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise AddressError(f"rename: nothing in a answers to {pattern!r}{hint}")
            if not any(new in self.b for _, new in found):
                near = close_matches(found[0][1], self.b)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise AddressError(f"rename: {pattern!r} became {found[0][1]!r}, which b does not have{hint}")
            for name, new in found:
                if new in self.b:
                    self._pair(name, new, "rename")

    def _left(self, names: Iterable[str], taken: Iterable[str]) -> list[str]:
        known = set(taken)
        return [name for name in names if name not in known]

    def _by_order(self, sign: Any, how: str) -> None:
        """The longest common sequence of those with the same signature."""
        mine = [name for name in self._left(self.a, self.pairs) if sign(self.a[name])]
        theirs = [name for name in self._left(self.b, self._taken) if sign(self.b[name])]
        matcher = SequenceMatcher(
            None, [sign(self.a[n]) for n in mine], [sign(self.b[n]) for n in theirs], autojunk=False
        )
        for block in matcher.get_matching_blocks():
            for k in range(block.size):
                self._pair(mine[block.a + k], theirs[block.b + k], how)

    def _by_what_they_hold(self) -> None:
        """Parents, from the outside in: those that hold partners of the very same modules."""
        theirs: dict[frozenset[str], list[str]] = {}
        for name in self._left(self.b, self._taken):
            theirs.setdefault(frozenset(_below(name, self._taken)), []).append(name)
        for name in self._left(self.a, self.pairs):
            held = frozenset(self.pairs[other] for other in _below(name, self.pairs))
            if held and theirs.get(held):
                self._pair(name, theirs[held].pop(0), "what they hold")

    def _by_place(self) -> None:
        """Modules without parameters: of the children of two partners, those of one class in the same order."""
        for a, b in list(self.pairs.items()):
            mine, theirs = self._children(self.a, a, self.pairs), self._children(self.b, b, self._taken)
            for kind in {_kind(self.a[n]) for n in mine}:
                some = [n for n in mine if _kind(self.a[n]) == kind]
                others = [n for n in theirs if _kind(self.b[n]) == kind]
                if len(some) == len(others):
                    for x, y in zip(some, others, strict=True):
                        self._pair(x, y, "class and place")

    def _children(self, names: Names, parent: str, taken: Iterable[str]) -> list[str]:
        prefix = "" if parent == "." else f"{parent}."
        inside = [n for n in names if n != "." and n.startswith(prefix) and "." not in n[len(prefix) :]]
        return [n for n in self._left(inside, taken) if not _signature(names[n])]


def _once(model: nn.Module) -> Names:
    """The modules by name, each once."""
    found: dict[int, str] = {}
    for name, module in walk(model):
        found.setdefault(id(module), name)
    modules = dict(walk(model))
    return {name: modules[name] for name in found.values()}


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """What a module holds itself: the shapes of its parameters, whichever way round."""
    own = own_tensors(module, "parameter").values()
    return tuple(sorted(tuple(sorted(map(str, shape_of(p)))) for p in own if p is not None))


def _kind(module: nn.Module) -> str:
    """The class, in the words that libraries have in common."""
    name = type(module).__name__.lower()
    return next((kind for kind in ("dropout", "gelu", "relu", "silu", "tanh", "identity") if kind in name), name)


def is_below(name: str, other: str) -> bool:
    """Whether a module is inside another one, by their names."""
    return other == "." or name.startswith(f"{other}.")


def _below(name: str, names: Iterable[str]) -> list[str]:
    """Those of some names that are below another."""
    return [other for other in names if other.startswith(f"{name}.")]


def _renamed(name: str, pattern: str, wanted: str) -> str | None:
    """A name of a as rename has it: `*` stands for the same on both sides, and what is below goes along."""
    if pattern == "." or wanted == ".":
        prefix = "" if pattern == "." else f"{pattern}."
        if pattern != "." and name == pattern:
            return "."
        if name == "." or not name.startswith(prefix):
            return None
        rest = name[len(prefix) :]
        return rest if wanted == "." else f"{wanted}.{rest}"
    pieces = re.split(r"(\*\*|\*)", pattern)
    text = "".join("(.*)" if p == "**" else "([^.]*)" if p == "*" else re.escape(p) for p in pieces)
    match = re.fullmatch(rf"{text}(?P<rest>\..*)?", name)
    if match is None:
        return None
    stars = iter(match.groups()[: pieces.count("*") + pieces.count("**")])
    new = re.sub(r"\*\*|\*", lambda _: next(stars, ""), wanted)
    return new + (match["rest"] or "")
