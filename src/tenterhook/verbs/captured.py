"""Captured: what a session kept, by address."""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tenterhook.addresses.grammar import Address, covers
from tenterhook.addresses.sites import Selector
from tenterhook.changes.change import Change
from tenterhook.changes.function import Function
from tenterhook.errors import AddressError, AmbiguousError, NotSeenError, OverwrittenError
from tenterhook.hooks.report import Report, zeros_in
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import part_of
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Omitted, Path, describe, paths_of, rebuild_live
from tenterhook.verbs.keep import Entry, Log, usable
from tenterhook.verbs.lookup import Lookup
from tenterhook.verbs.patch import put_back

Found = list[tuple[Address, Any]]  # values, each with the address of that one alone


class Captured:
    """What a session kept. Index it with an address; `calls` gives a list, `report` says what fired."""

    def __init__(self, session: Session, log: Log) -> None:
        self._session = session
        self._log = log

    @functools.cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._session)

    @property
    def _taps(self) -> list[Any]:
        return self._lookup.taps

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
            names_a_call = isinstance(asked, str) and "@" in asked
            calls = Counter(address._replace(call=None) for address, _ in found)
            for address, value in found:
                every = address._replace(call=None)
                goes_to = every if calls[every] == 1 and not names_a_call else address
                shown = _shown(value)
                for key, change in put_back(goes_to, shown if isinstance(shown, Tensor) else value, at):
                    if key in changes:
                        raise AmbiguousError(f"{key} was captured more than once (several backward passes?)")
                    changes[key] = change
        return changes

    def report(self) -> Report:
        """Per address: how often it fired, or that it never did and the most likely reason."""
        return self._session.report((tap, _last_in_words(tap)) for tap in self._taps)

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

    def _find(self, selector: Selector) -> Found:
        """The values that a selector means."""
        silent: list[str] = []
        meant = self._lookup.meant(selector)
        found = [one for address, taps in meant for one in self._values_at(address, taps, silent)]
        if not found:
            raise NotSeenError("\n  ".join(silent))
        return found

    def _values_at(self, address: Address, taps: list[Any], silent: list[str]) -> Found:
        """The values of some taps that an address means; `silent` gets a line for each tap that has none."""
        found: dict[tuple[int, int, int], tuple[Address, Any]] = {}
        ranks = {inner: i for i, inner in enumerate(dict.fromkeys(tap.site.address.inner for tap in taps))}
        for tap in taps:
            kept, turns = tap.site.address, Counter[int]()  # the backward passes of each call
            for entry in self._entries_at(address, tap, silent):
                turns[entry.call] += 1
                exact = address._replace(call=entry.call, inner=kept.inner)
                try:
                    value = _part(entry, address.leaf[len(kept.leaf) :], exact)
                except NotSeenError as error:
                    silent.append(str(error))
                else:
                    found.setdefault((entry.call, ranks[kept.inner], turns[entry.call]), (exact, value))
        return [found[key] for key in sorted(found)]

    def _entries_at(self, address: Address, tap: Any, silent: list[str]) -> list[Entry]:
        """What a tap kept of the calls that an address means."""
        kept: Path = tap.site.address.leaf
        if address.leaf[: len(kept)] != kept:
            silent.append(f"{address}: only {tap.site} was captured; ask for the whole value or that leaf")
            return []
        entries = [entry for entry in tap.action.entries(tap) if covers(tap.site.address.call, entry.call, tap.calls)]
        wanted = [entry for entry in entries if covers(address.call, entry.call, tap.calls)]
        if not wanted:
            silent.append(self._why_none(address, tap))
        return wanted

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


def _part(entry: Entry, path: Path, address: Address) -> Any:
    """The part of a kept value that an address means; NotSeenError where there is none."""
    try:
        value = part_of(entry.value, path)
    except LookupError:
        there = f"it is {describe(entry.value)}, with leaves {paths_of(entry.value)}"
        raise NotSeenError(f"{address}: no such leaf; {there}") from None
    if isinstance(value, Omitted):
        raise NotSeenError(f"{address} is a {value.kind}: no tensor, so it was not kept")
    if any(tensor._version != version for tensor, version in entry.versions):
        what = "was kept with copy=False and has been changed in place since, so the value at that point is gone"
        raise OverwrittenError(f"{address} {what}; capture it with copy=True")
    return value


def _shown(value: Any) -> Any:
    """A kept value as it is handed out."""
    value = value.plain() if isinstance(value, Inputs) else value
    return rebuild_live(value, lambda _, tensor: usable(tensor))


def _last_in_words(tap: Any) -> str:
    entries = tap.action.entries(tap)
    if not entries:
        return ""
    value = _shown(entries[-1].value)
    return describe(value) + (zeros_in(value) if tap.site.address.grad else "")


def _ambiguous(asked: str, found: Found) -> str:
    lines = [f"  {address}  {describe(_shown(value))}" for address, value in found[:12]]
    more = [f"  … {len(found) - 12} more"] if len(found) > 12 else []
    head = f"{asked} means {len(found)} values:"
    return "\n".join([head, *lines, *more, f"index one of them, or use seen.calls({asked!r}) for all"])
