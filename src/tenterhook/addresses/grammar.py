r"""The address grammar: text to `Address` and back, and nothing else.

    address = place | "grad(" place ")"
    place   = path ["<Class>" ["." path]] ["/" inner] [":in" | ":out"] {"[" leaf "]"} ["@" call]

`parse` reads any text or raises AddressError; `str(address)` prints the canonical form, and parsing
that gives an equal Address. A path may hold `*` (within one part), `**` (across parts) and `{2..4,7}` (one of these);
a backslash takes the meaning from the next character, for the rare module whose name contains one of `<>:[]@/#()*{}`.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from tenterhook.errors import AddressError

Leaf = int | str
Call = int | tuple[int | None, int | None]

_PATH = r"(?:\\.|\{[^{}\\<>:\[\]@/#()*]*\}|[^\\<>:\[\]@/#(){}])+"
_NAME = r"(?:\{[^{}\\<>:\[\]@/#()*]*\}|[^\\<>:\[\]@/#(){}])+(?:\#-?[0-9]{1,9})?"
_ADDRESS = re.compile(
    rf"""(?P<path>{_PATH})
         (?:<(?P<cls>[\w.]+)>(?:\.(?P<tail>{_PATH}))?)?
         (?P<inner>(?:/{_NAME})*)
         (?P<role>:in|:out)?
         (?P<leaf>(?:\[[^\[\]]+\])*)
         (?:@(?P<call>-?[0-9]{{1,9}}|(?:-?[0-9]{{1,9}})?:(?:-?[0-9]{{1,9}})?))?""",
    re.VERBOSE | re.DOTALL,
)
_POSITION = re.compile(r"0|-?[1-9][0-9]{0,8}")
_PLAIN = re.compile(r"[\w.]+").fullmatch
_RESERVED = re.compile(r"([\\<>:\[\]@/#()*{}])")
_PIECES = re.compile(r"\\.|\*+|\{[^{}]*\}|\.|[^\\*{.]+|.", re.DOTALL)  # of a path
_BRACES = re.compile(r"\{[^{}]*\}")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_LONGEST_RANGE = 10_000


class Address(NamedTuple):
    """One parsed address. `path` is kept as written, escapes included; `"."` is the model itself."""

    path: str
    cls: str | None = None
    inner: str = ""
    role: str = "out"
    leaf: tuple[Leaf, ...] = ()
    call: Call | None = None
    grad: bool = False
    tail: str = ""  # below each module of the class: `**<LayerNorm>.weight`

    def __str__(self) -> str:
        place = self.path + (f"<{self.cls}>" if self.cls else "") + (self.tail and f".{self.tail}") + self.inner
        if self.role == "in" or self.leaf:
            place += f":{self.role}"
        place += "".join(f"[{key}]" for key in self.leaf) + _call_text(self.call)
        place = place if self.path else place[1:]  # a function has no path, only names inside
        return f"grad({place})" if self.grad else place

    @property
    def is_glob(self) -> bool:
        """Whether it may mean several modules: an unescaped star or brace, or a class to keep."""
        path = self.path
        return self.cls is not None or (("*" in path or "{" in path) and not {"*", "{"}.isdisjoint(_unescaped(path)))

    @property
    def name(self) -> str:
        """The path as `named_modules()` would write it, escapes taken out."""
        path = self.path
        return re.sub(r"\\(.)", r"\1", path, flags=re.DOTALL) if "\\" in path else path

    @property
    def is_whole(self) -> bool:
        """Whether it means a module's whole output at every call, or the gradient of that."""
        return self.role == "out" and not self.leaf and self.call is None

    def path_filter(self) -> Callable[[str], bool]:
        """A function that says whether the path means a canonical name ("." for the root)."""
        whole = path_pattern(self.path).fullmatch
        return lambda name: whole("" if name == "." else f"{name}.") is not None

    def with_name(self, name: str) -> "Address":
        """The address with a module's canonical name for its path; a class filter and a name inside are left out."""
        return Address(escape(name), None, "", self.role, self.leaf, self.call, self.grad)

    def with_grad(self, grad: bool) -> "Address":
        """The address of the gradient, or of the value."""
        return self._replace(grad=grad)

    def at(self, *, call: Call | None = None, leaf: tuple[Leaf, ...] = (), grad: bool = False) -> "Address":
        """The address with another call, leaf and grad."""
        return self._replace(call=call, leaf=leaf, grad=grad)


@lru_cache(maxsize=8192)
def escape(name: str) -> str:
    """A module's name as an address path."""
    return name if _PLAIN(name) else _RESERVED.sub(r"\\\1", name)


@lru_cache(maxsize=8192)
def parse(text: str) -> Address:
    """Read one address.

    >>> parse("grad(encoder.layer.3:in[0]@-1)").leaf
    (0,)
    """
    grad = text.startswith("grad(") and text.endswith(")")
    place = text[5:-1] if grad else text
    match = _ADDRESS.fullmatch(place)
    if match is None or not _is_sound(match):
        raise AddressError(f"cannot read the address {text!r}: {_why_unreadable(text, place)}")
    return Address(
        path=match["path"],
        cls=match["cls"],
        inner=match["inner"],
        role=(match["role"] or ":out")[1:],
        leaf=tuple(_leaf(key) for key in re.findall(r"\[([^\[\]]+)\]", match["leaf"])),
        call=_call(match["call"]),
        grad=grad,
        tail=match["tail"] or "",
    )


def covers(call: Call | None, k: int, total: int) -> bool:
    """Whether a call selection means the k-th of `total` calls."""
    if call is None:
        return True
    if isinstance(call, int):
        return k == (call if call >= 0 else total + call)
    return k in range(*slice(*call).indices(total))


def may_cover(call: Call | None, k: int) -> bool:
    """Whether call k may be meant, as far as can be known before the last call."""
    if call is None:
        return True
    if isinstance(call, int):
        return call < 0 or k == call
    start, stop = call
    return not (start is not None and 0 <= k < start) and not (stop is not None and 0 <= stop <= k)


def split_number(inner: str) -> tuple[str, int | None]:
    """The inner part of an address without its number, and that: `/x#1` is the second assignment of x."""
    name, mark, number = inner.partition("#")
    return name, int(number) if mark else None


@lru_cache(maxsize=1024)
def _inner_pattern(asked: str) -> re.Pattern[str]:
    names = asked.split("/")[1:]
    return re.compile("".join("(?:/[^/]+)*" if name == "**" else f"/{_inner_name_pattern(name)}" for name in names))


def _inner_name_pattern(name: str) -> str:
    return "".join("[^/]*" if piece == "*" else _piece_pattern(piece) for piece in re.findall(r"\*|\{[^{}]*\}|.", name))


def inner_choices(inner: str) -> list[str]:
    """The inner parts of addresses that one with braces stands for."""
    found = _BRACES.search(inner)
    if found is None:
        return [inner]
    rest = inner_choices(inner[found.end() :])
    return [f"{inner[: found.start()]}{one}{tail}" for one in choices(found[0]) for tail in rest]


def matches(asked: str, name: str) -> bool:
    """Whether a name inside a forward, without a number, is what was asked for: `/helper/*` means `/helper/q`."""
    return _inner_pattern(asked).fullmatch(name) is not None


def known_when_made(address: Address) -> bool:
    """Whether it can be told at each value if that one is meant: not by counting from the end."""
    ends = address.call if isinstance(address.call, tuple) else (address.call,)
    return all(end is None or end >= 0 for end in (*ends, split_number(address.inner)[1]))


def _leaf(key: str) -> Leaf:
    return int(key) if _POSITION.fullmatch(key) else key


def _call(text: str | None) -> Call | None:
    if text is None:
        return None
    if ":" not in text:
        return int(text)
    start, stop = (int(end) if end else None for end in text.split(":"))
    return (start, stop)


def _call_text(call: Call | None) -> str:
    if isinstance(call, tuple):
        return "@" + ":".join("" if end is None else str(end) for end in call)
    return "" if call is None else f"@{call}"


def _unescaped(path: str) -> str:
    return re.sub(r"\\.", "", path, flags=re.DOTALL)


def _is_sound(match: re.Match[str]) -> bool:
    paths = [path for path in (match["path"], match["tail"]) if path]
    return all(map(_parts_are_sound, paths)) and all(map(choices, _BRACES.findall(match["inner"])))


def parts(path: str) -> list[str]:
    """The parts of a path, which dots divide; not those within braces."""
    found = [""]
    for piece in _PIECES.findall(path):
        if piece == ".":
            found.append("")
        else:
            found[-1] += piece
    return found


def _parts_are_sound(path: str) -> bool:
    return path == "." or (all(parts(path)) and all(map(_choices_are_sound, _PIECES.findall(path))))


def _choices_are_sound(piece: str) -> bool:
    return piece[0] != "{" or (len(piece) > 1 and bool(choices(piece)))


def choices(braces: str) -> list[str]:
    """What `{0,2..4}` stands for: 0, 2, 3, 4. Nothing, where that cannot be said."""
    found: list[str] = []
    for one in braces[1:-1].split(","):
        span = _RANGE.fullmatch(one.strip())
        if span is not None and 0 <= int(span[2]) - int(span[1]) < _LONGEST_RANGE:
            found += map(str, range(int(span[1]), int(span[2]) + 1))
        elif span is None and one.strip() and ".." not in one:
            found.append(one.strip())
        else:
            return []
    return found


@lru_cache(maxsize=1024)
def path_pattern(path: str) -> re.Pattern[str]:
    """Of the names that a path means, each with a dot at the end; the root is empty."""
    return re.compile("".join(map(_part_pattern, parts(path))), re.DOTALL)


def each_choice(path: str) -> list[tuple[str, str]]:
    """The path with only one of the choices in one of its braces, for each of these, and that choice."""
    pieces = _PIECES.findall(path)
    return [
        ("".join([*pieces[:i], f"{{{choice}}}", *pieces[i + 1 :]]), choice)
        for i, piece in enumerate(pieces)
        if piece[0] == "{"
        for choice in choices(piece)
    ]


def _part_pattern(part: str) -> str:
    """A regular expression for one part of a path, with the dot after it."""
    if part == "**":
        return r"(?:[^.]+\.)*"
    if part == "":  # "." alone splits into two empty parts: the root, whose name is empty
        return ""
    return "".join(map(_piece_pattern, _PIECES.findall(part))) + r"\."


def _piece_pattern(piece: str) -> str:
    if piece[0] == "*":
        return "[^.]*"
    if piece[0] == "{":
        return f"(?:{'|'.join(map(re.escape, choices(piece)))})"
    return re.escape(piece[1:] if piece[0] == "\\" else piece)


def _why_unreadable(text: str, place: str) -> str:
    if not place:
        return "it is empty; the model itself is '.', every module is '**'"
    if text.startswith("grad(") and not text.endswith(")"):
        return "'grad(' is never closed; write grad(layer1)"
    if place.startswith("grad("):
        return "grad(...) cannot be nested; the gradient of a gradient needs create_graph in your own code"
    if not {"{", "}"}.isdisjoint(re.sub(r"\{[^{}]*\}", lambda m: m[0] if not choices(m[0]) else "", _unescaped(place))):
        return "choices are written {0,3,5}, {2..4} or {attn,mlp}: in one part of a path, from low to high, not nested"
    if place.count("[") != place.count("]") or "[]" in place:
        return "a leaf is written [0] or [name], each bracket closed"
    if (role := re.search(r":([^\[\]@]*)", place.split("@")[0])) and role[1] not in ("in", "out"):
        return f"the role ':{role[1]}' does not exist; a module has ':in' and ':out'"
    if "@" in place and not re.search(r"@(-?[0-9]+|-?[0-9]*:-?[0-9]*)$", place):
        return "a call is written last, as @0, @-1 or @2:5"
    if "/" in place or "#" in place:
        return "a value inside a forward is written module/name, module/helper/name or module/name#1"
    if not _parts_are_sound(place):
        return "it has an empty part; the model itself is '.', parts are joined by one dot"
    return "write path, path:in[0], path@0 or grad(path); put a backslash before <>:[]@/#()*{} inside a name"
