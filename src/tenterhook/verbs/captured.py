"""Captured: what a session kept, by address."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tenterhook.addresses.grammar import Address, covers, matches, parse, split_number
from tenterhook.addresses.sites import Selector, Site, resolve
from tenterhook.changes.change import Change
from tenterhook.changes.function import Function
from tenterhook.changes.ready_made import at as at_index
from tenterhook.changes.ready_made import replace
from tenterhook.errors import AddressError, AmbiguousError, EditError, NotSeenError, OverwrittenError
from tenterhook.hooks.report import Report
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import part_of
from tenterhook.inside.taps import WantedTap
from tenterhook.platform.checkpoints import graph_task
from tenterhook.values.inputs import Inputs, argument_names
from tenterhook.values.tree import Omitted, Path, describe, leaves, paths_of, rebuild_live
from tenterhook.verbs.keep import Entry, Log


class Captured:
    """What a session kept. Index it with an address; `calls` gives a list, `report` says what fired."""

    def __init__(self, session: Session, log: Log) -> None:
        self._session = session
        self._log = log
        self._known = -1  # how many taps are in `_by_place`
        self._by_place: dict[tuple[str, str, bool], list[Any]] = {}

    @property
    def _taps(self) -> list[Any]:
        return list({tap.site.address: tap for tap in reversed(self._session.shown_taps())}.values())[::-1]

    def _at_place(self, address: Address) -> list[Any]:
        """The taps of the place that an address means; where it is inside a forward, there may be several."""
        if len(self._session.taps) != self._known:
            self._known, self._by_place = len(self._session.taps), {}
            for tap in self._taps:
                self._by_place.setdefault(_place(tap.site.address), []).append(tap)
        taps = self._by_place.get(_place(address), [])
        if not any(tap.site.kind == "inner" for tap in taps):
            return [] if address.inner else taps
        return _inner(taps, address.inner)

    def __getitem__(self, address: Selector) -> Any:
        found = self._find(address)
        if len(found) == 1:
            return _shown(found[0][1])
        raise AmbiguousError(_ambiguous(str(address), found))

    def calls(self, address: Selector) -> list[Any]:
        """Every value at an address, one per call (and, for a gradient, per backward pass), in order."""
        return [_shown(value) for _, value in self._find(address)]

    def patch(self, *addresses: Selector, at: Any = None) -> dict[str, Change | Function]:
        """What was captured, as changes: `edit(model, seen.patch("layer3"))` puts it into another run.

        Without an address: everything. Each leaf and each call goes where it came from; what was captured at one call
        only goes into every call. `at` limits it to an index, as in `seen.patch("layer3", at=(slice(None), 5))`.
        """
        changes: dict[str, Change | Function] = {}
        for asked in addresses or tuple(self):
            found = self._find(asked)
            calls = Counter(address._replace(call=None) for address, _ in found)
            for address, value in found:
                if calls[address._replace(call=None)] == 1 and not (isinstance(asked, str) and "@" in asked):
                    address = address._replace(call=None)
                for key, change in self._put_back(address, value, at):
                    if key in changes:
                        raise AmbiguousError(f"{key} was captured more than once (several backward passes?)")
                    changes[key] = change
        return changes

    def _put_back(self, address: Address, value: Any, at: Any) -> Iterator[tuple[str, Change | Function]]:
        """What puts one value where it came from."""
        if isinstance(shown := _shown(value), Tensor):
            value = shown
        found = list(leaves(value))
        made = {path: _replacement(tensor, at, str(_below(address, path))) for path, tensor in found}
        if address.grad and len({id(tensor) for _, tensor in found}) < len(found):
            yield str(address), _by_leaf(made, {path: id(tensor) for path, tensor in found}, len(address.leaf))
            return
        for path, change in made.items():
            key = str(_below(address, path))
            if any(not str(part) or {"[", "]"} & set(str(part)) for part in path):
                raise AddressError(f"{key} cannot be patched: a key of a dict in it cannot be written in an address")
            yield key, change

    def report(self) -> Report:
        """Per address: how often it fired, or that it never did and the most likely reason."""
        return self._session.report((tap, self._summary(tap)) for tap in self._taps)

    def __iter__(self) -> Iterator[str]:
        """The addresses at which something came, in the order in which it first did."""
        known = {tap.number for tap in self._taps}
        return iter([str(self._session.taps[number].site) for number in self._log.order() if number in known])

    def __len__(self) -> int:
        return sum(bool(tap.fired) for tap in self._taps)

    def __contains__(self, address: object) -> bool:
        try:
            return bool(self._find(address))  # type: ignore[arg-type]
        except (AddressError, NotSeenError, TypeError):
            return False

    def __repr__(self) -> str:
        kept = sum(len(tap.action.entries(tap)) for tap in self._taps)
        return f"<captured {kept} values at {len(self)} of {len(self._taps)} addresses>"

    def _summary(self, tap: Any) -> str:
        entries = tap.action.entries(tap)
        return describe(_shown(entries[-1].value)) if entries else ""

    def _find(self, selector: Selector) -> list[tuple[Address, Any]]:
        """The values that a selector means, each with the address of that one value."""
        found: list[tuple[Address, Any]] = []
        silent: list[str] = []
        for address, taps in self._meant(selector):
            found += self._values_at(address, taps, silent)
        if not found:
            raise NotSeenError("\n  ".join(silent))
        return found

    def _meant(self, selector: Selector) -> list[tuple[Address, list[Any]]]:
        if isinstance(selector, str):
            address = _parse_or_none(selector)
            if address is not None and (taps := self._at_place(address)):
                return [(address, taps)]
        model = self._session.model()
        if model is None:
            return self._meant_by_name(selector)
        sites = resolve(model, selector)
        meant = [(site.address, self._taps_of(site)) for site in sites]
        if not any(taps for _, taps in meant):
            raise NotSeenError(f"{selector!r} was not asked for in this session; captured: {self._asked()}")
        return [(address, taps) for address, taps in meant if taps]

    def _meant_by_name(self, selector: Selector) -> list[tuple[Address, list[Any]]]:
        """When the model is gone: a glob among the names that were captured."""
        address = _parse_or_none(selector) if isinstance(selector, str) else None
        if address is not None:
            is_named, sort = address.path_filter(), (address.role, address.grad)
            taps = [tap for tap in self._taps if (tap.site.address.role, tap.site.address.grad) == sort]
            taps = [tap for tap in taps if is_named(tap.site.address.name)]
            if taps and address.cls is None:
                return [
                    (tap.site.address.at(call=address.call, leaf=address.leaf, grad=address.grad), [tap])
                    for tap in taps
                ]
        raise NotSeenError(f"{selector!r} was not captured; captured: {self._asked()}")

    def _taps_of(self, site: Site) -> list[Any]:
        """By the name; else by the module, which may have been asked for under another of its names."""
        named = self._at_place(site.address)
        if named:
            return named
        kind, role, grad = site.kind, site.address.role, site.address.grad
        thing = site.tensor if kind in ("parameter", "buffer") else site.module
        same = []
        for tap in self._taps:
            other = tap.site
            there = other.tensor if other.kind in ("parameter", "buffer") else other.module
            if there is thing and (other.kind, other.address.role, other.address.grad) == (kind, role, grad):
                same.append(tap)
        return _inner(same, site.address.inner) if kind == "inner" else same

    def _values_at(self, address: Address, taps: list[Any], silent: list[str]) -> list[tuple[Address, Any]]:
        """The values of some taps that an address means; `silent` gets a line for each tap that has none."""
        found: dict[tuple[int, int, int], tuple[Address, Any]] = {}
        ranks = {inner: i for i, inner in enumerate(dict.fromkeys(tap.site.address.inner for tap in taps))}
        for tap in taps:
            kept: Path = tap.site.address.leaf
            if address.leaf[: len(kept)] != kept:
                silent.append(f"{address}: only {tap.site} was captured; ask for the whole value or that leaf")
                continue
            asked = tap.site.address.call
            entries = [entry for entry in tap.action.entries(tap) if covers(asked, entry.call, tap.calls)]
            wanted = [entry for entry in entries if covers(address.call, entry.call, tap.calls)]
            if not wanted:
                silent.append(self._why_none(address, tap))
            turns: Counter[int] = Counter()  # the backward passes of each call
            for entry in wanted:
                turns[entry.call] += 1
                exact = address.at(call=entry.call, leaf=address.leaf, grad=address.grad)
                exact = exact._replace(inner=tap.site.address.inner)
                try:
                    value = part_of(entry.value, address.leaf[len(kept) :])
                except LookupError:
                    there = f"it is {describe(entry.value)}, with leaves {paths_of(entry.value)}"
                    silent.append(f"{exact}: no such leaf; {there}")
                    continue
                if isinstance(value, Omitted):
                    silent.append(f"{exact} is a {value.kind}: no tensor, so it was not kept")
                    continue
                _check_versions(entry, exact)
                key = (entry.call, ranks[exact.inner], turns[entry.call])
                found.setdefault(key, (exact, value))
        return [found[key] for key in sorted(found)]

    def _why_none(self, address: Address, tap: Any) -> str:
        if not tap.fired:
            return f"{tap.site} never came: {self._session.why_silent(tap)}"
        if tap.site.address.call is not None and tap.site.address.call != address.call:
            return f"{address}: only {tap.site} was captured"
        if address.grad and isinstance(address.call, int) and -tap.calls <= address.call < tap.calls:
            return f"{address} never came: no backward inside this session reached that call"
        if tap.site.kind == "inner":
            came = ", ".join(f"@{call}" for call in sorted({entry.call for entry in tap.action.entries(tap)}))
            return f"{address}: no such value came in that call; one came in {came}"
        return f"{address}: it was called {tap.calls} times; calls count from @0 to @{tap.calls - 1}"

    def _asked(self) -> str:
        names = [str(tap.site) for tap in self._taps]
        return ", ".join(names[:8]) + (f" … ({len(names)} in all)" if len(names) > 8 else "")


def _place(address: Address) -> tuple[str, str, bool]:
    return address.name, address.role, address.grad


def _below(address: Address, path: Path) -> Address:
    return address._replace(leaf=(*address.leaf, *path))


def _replacement(tensor: Tensor, at: Any, address: str) -> Change:
    tensor = _usable(tensor)
    try:
        return replace(tensor) if at is None else at_index(at, replace(tensor[at]))
    except IndexError as error:
        raise IndexError(f"{address}: {error}; it is {describe(tensor)}") from None


def _by_leaf(changes: dict[Path, Any], tensors: dict[Path, int], depth: int) -> Function:
    """One change of a whole value whose leaves share a gradient, where they are one tensor: it must go in once."""
    came: dict[tuple[int, Any, int], tuple[int, Path]] = {}  # by call and tensor: in which backward, and at which leaf

    def patch(grad: Tensor, site: Site) -> Tensor:
        leaf = site.address.leaf[depth:]
        if (
            leaf not in changes and not depth and leaf and site.address.role == "in"
        ):  # an argument, given in another way
            names = argument_names(site.module)
            same: dict[Any, Any] = {**dict(enumerate(names)), **{name: i for i, name in enumerate(names)}}
            leaf = (same.get(leaf[0], leaf[0]), *leaf[1:])
        if leaf not in changes:
            return grad
        key, now = (id(site.module), site.address.call, tensors[leaf]), (graph_task(), leaf)
        before, came[key] = came.get(key, now), now
        if before[0] == now[0] and before != now:
            what = "several leaves were one tensor where this was captured, with one gradient, and here they are not"
            raise EditError(f"{what}; name the one that it shall go into, as in seen.patch('grad(attn:in[0])')")
        return changes[leaf](grad)

    return Function(patch)


def _inner(taps: list[Any], asked: str) -> list[Any]:
    """Of some taps in one module, those that an address inside its forward means."""
    if unanswered := [tap for tap in taps if isinstance(tap, WantedTap) and tap.site.address.inner == asked]:
        return unanswered
    name, number = split_number(asked)
    of_name = [
        tap for tap in taps if tap.site.kind == "inner" and matches(name, split_number(tap.site.address.inner)[0])
    ]
    if number is None or not of_name:
        return of_name
    numbers = [split_number(tap.site.address.inner)[1] or 0 for tap in of_name]
    wanted = number if number >= 0 else max(numbers) + 1 + number
    return [tap for tap, own in zip(of_name, numbers, strict=True) if own == wanted]


def _shown(value: Any) -> Any:
    """A kept value as it is handed out."""
    value = value.plain() if isinstance(value, Inputs) else value
    return rebuild_live(value, lambda _, tensor: _usable(tensor))


def _usable(tensor: Tensor) -> Tensor:
    """A kept tensor without what tied it to where it was kept: an inference_mode, a torch.func transform."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        dim = functorch.maybe_get_bdim(tensor) if functorch.is_batchedtensor(tensor) else 0
        tensor = functorch.get_unwrapped(tensor)
        tensor = tensor.movedim(dim, 0) if dim else tensor  # what vmap runs over comes first
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def _check_versions(entry: Entry, address: Address) -> None:
    for tensor, version in entry.versions:
        if tensor._version != version:
            what = "was kept with copy=False and has been changed in place since, so the value at that point is gone"
            raise OverwrittenError(f"{address} {what}; capture it with copy=True")


def _ambiguous(asked: str, found: list[tuple[Address, Any]]) -> str:
    lines = [f"  {address}  {describe(_shown(value))}" for address, value in found[:12]]
    more = [f"  … {len(found) - 12} more"] if len(found) > 12 else []
    head = f"{asked} means {len(found)} values:"
    return "\n".join([head, *lines, *more, f"index one of them, or use seen.calls({asked!r}) for all"])


def _parse_or_none(text: str) -> Address | None:
    try:
        return parse(text)
    except AddressError:
        return None
