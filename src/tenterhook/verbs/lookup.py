"""Which taps of a session a selector means."""

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.addresses.grammar import Address, matches, parse, split_number
from tenterhook.addresses.sites import Selector, Site, resolve
from tenterhook.errors import AddressError, NotSeenError
from tenterhook.hooks.session import Session
from tenterhook.inside.taps import WantedTap

if TYPE_CHECKING:
    from tenterhook.verbs.past import Past

_PASS = re.compile(r"(grad\(.*\))(#[0-9]+)", re.DOTALL)
Meant = list[tuple[Address, list[Any]]]  # addresses without wildcards, and the taps of each


class Lookup:
    """The taps of a session, by selector."""

    def __init__(self, session: "Session | Past") -> None:
        self._session: Any = session
        self._known = -1  # how many taps are in `_by_place`: those inside a forward come while the model runs
        self._by_place: dict[tuple[str, str, bool], list[Any]] = {}

    @property
    def taps(self) -> list[Any]:
        """One for each address, of which the last counts."""
        return list({tap.site.address: tap for tap in reversed(self._session.shown_taps())}.values())[::-1]

    def meant(self, selector: Selector) -> Meant:
        """What a selector means; NotSeenError where nobody asked for it."""
        address = _parse_or_none(selector) if isinstance(selector, str) else None
        if address is not None and (taps := self._at_place(address)):
            return [(address, taps)]
        model = self._session.model()
        if model is None:
            return self._meant_by_name(selector, address)
        meant = [(site.address, self._taps_of(site)) for site in resolve(model, selector)]
        if not any(taps for _, taps in meant):
            raise NotSeenError(f"{selector!r} was not asked for in this session; captured: {self._names()}")
        return [(address, taps) for address, taps in meant if taps]

    def _meant_by_name(self, selector: Selector, address: Address | None) -> Meant:
        """When the model is gone: a glob among the names that were captured."""
        taps = [] if address is None or address.cls is not None else self._matching(address)
        if address is None or not taps:
            raise NotSeenError(f"{selector!r} was not captured; captured: {self._names()}")
        call, leaf, grad = address.call, address.leaf, address.grad
        return [(tap.site.address.at(call=call, leaf=leaf, grad=grad), [tap]) for tap in taps]

    def _matching(self, address: Address) -> list[Any]:
        is_named, sort = address.path_filter(), _place(address)[1:]
        taps = [tap for tap in self.taps if _place(tap.site.address)[1:] == sort]
        named = [tap for tap in taps if is_named(tap.site.address.name)]
        return _inside(named, address.inner) if address.inner else [tap for tap in named if tap.site.kind != "inner"]

    def _at_place(self, address: Address) -> list[Any]:
        """The taps of the place that an address means; where it is inside a forward, there may be several."""
        if len(self._session.taps) != self._known:
            self._known, self._by_place = len(self._session.taps), {}
            for tap in self.taps:
                self._by_place.setdefault(_place(tap.site.address), []).append(tap)
        taps = self._by_place.get(_place(address), [])
        if not any(tap.site.kind == "inner" for tap in taps):
            return [] if address.inner else taps
        return _inside(taps, address.inner)

    def _taps_of(self, site: Site) -> list[Any]:
        """By the name; else by the module, which may have been asked for under another of its names."""
        named = self._at_place(site.address)
        if named:
            return named
        known = _thing(site)
        same = [tap for tap in self.taps if (other := _thing(tap.site))[1:] == known[1:] and other[0] is known[0]]
        return _inside(same, site.address.inner) if site.kind == "inner" else same

    def _names(self) -> str:
        names = [str(tap.site) for tap in self.taps]
        return ", ".join(names[:8]) + (f" … ({len(names)} in all)" if len(names) > 8 else "")


def means_many(selector: Selector, found: Address) -> bool:
    """Whether a selector is one for many values, however many it means; `found`: the address of one of them."""
    if not isinstance(selector, str):
        return isinstance(selector, type) or not isinstance(selector, nn.Module)
    address = _parse_or_none(selector)
    return address is not None and ("*" in address.inner or (address.is_glob and address.path != found.path))


def pass_of(selector: Selector) -> tuple[Selector, str]:
    """A selector without the number of a backward pass, and that: `grad(fc)#1` is what the second one brought."""
    found = _PASS.fullmatch(selector) if isinstance(selector, str) else None
    return (selector, "") if found is None else (found[1], found[2])


def _place(address: Address) -> tuple[str, str, bool]:
    return address.name, address.role, address.grad


def _thing(site: Site) -> tuple[Any, str, str, bool]:
    """What a site belongs to, and what is meant of it."""
    owner = site.tensor if site.kind in ("parameter", "buffer") else site.module
    return owner, site.kind, site.address.role, site.address.grad


def _inside(taps: list[Any], asked: str) -> list[Any]:
    """Of some taps in one module, those that an address inside its forward means."""
    if unanswered := [tap for tap in taps if isinstance(tap, WantedTap) and tap.site.address.inner == asked]:
        return unanswered
    name, number = split_number(asked)
    numbered = _numbered(taps, name)
    if number is not None and number < 0:
        number += 1 + max((own for _, own in numbered), default=0)
    return [tap for tap, own in numbered if number in (None, own)]


def _numbered(taps: list[Any], name: str) -> list[tuple[Any, int]]:
    """The taps of values of a name, each with the number of the assignment."""
    split = [(tap, *split_number(tap.site.address.inner)) for tap in taps if tap.site.kind == "inner"]
    return [(tap, number or 0) for tap, other, number in split if matches(name, other)]


def _parse_or_none(text: str) -> Address | None:
    try:
        return parse(text)
    except AddressError:
        return None
