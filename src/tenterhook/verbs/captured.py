"""Captured: what a session kept, by address."""

import functools
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from pathlib import Path as File
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tenterhook import markup
from tenterhook.addresses.grammar import Address, covers
from tenterhook.addresses.sites import Selector
from tenterhook.changes.change import Change
from tenterhook.changes.function import Function
from tenterhook.errors import AddressError, AmbiguousError, NotSeenError, OverwrittenError
from tenterhook.hooks.report import Report, zeros_in
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import part_of
from tenterhook.platform.functorch import usable
from tenterhook.say import counted
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Omitted, Path, describe, leaves, paths_of, rebuild_live
from tenterhook.verbs.joined import joined, stacked
from tenterhook.verbs.keep import Entry, Log
from tenterhook.verbs.lookup import Lookup, means_many, pass_of
from tenterhook.verbs.past import Past
from tenterhook.verbs.patch import put_back

if TYPE_CHECKING:
    from tenterhook.verbs.figures import Figures

_SHOWN = 20  # rows of a repr


class One(NamedTuple):
    """One value: its name in full, the address of it alone, and where it is kept."""

    name: str
    address: Address
    entry: Entry


class Captured(Mapping[Any, Any]):
    """What a session kept: a mapping from addresses to values, each value once and named in full.

    `seen["layer1"]` is the value there, `seen["layer*"]` a dict of all that match. `calls`, `stack` and `cat` put the
    calls together; `stats` and `show` look at the numbers; `to`, `save` and `patch` take them elsewhere; `report` says
    what fired.
    """

    def __init__(self, session: Session | Past, log: Log) -> None:
        self._session = session
        self._log = log

    __hash__ = object.__hash__
    __eq__ = object.__eq__  # comparing tensors gives tensors

    @functools.cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._session)

    @property
    def _taps(self) -> list[Any]:
        return self._lookup.taps

    def __getitem__(self, address: Selector) -> Any:
        found = self._find(address)
        if means_many(address, found[0][0].address):
            return {one.name: _shown(value) for one, value in found}
        if len(found) == 1:
            return _shown(found[0][1])
        raise AmbiguousError(_ambiguous(str(address), found))

    def get(self, address: Selector, default: Any = None) -> Any:
        """The value at an address, or the default where none came."""
        try:
            return self[address]
        except (AddressError, NotSeenError):
            return default

    def calls(self, address: Selector) -> list[Any]:
        """Every value at an address, one per call (and, for a gradient, per backward pass), in order.

        Of a call in which nothing came where something did in others, None: a call that no backward reached, say.
        """
        return [_shown(value) for _, value in self._find(address, every_call=True)]

    def stack(self, address: Selector, dim: int = 0) -> Tensor:
        """The values of a wildcard, or of the calls at an address, as one tensor with a new dimension.

            seen.stack("h.*")                 # layers × batch × …

        Unequal shapes are an error that lists them.
        """
        return stacked({one.name: _shown(value) for one, value in self._find(address)}, dim)

    def cat(self, address: Selector, dim: int = 0) -> Tensor:
        """The values of all calls at one address, joined along a dimension: the features of a data set, say."""
        found = self._find(address)
        if len({one.address._replace(call=None) for one, _ in found}) > 1:
            names = ", ".join(one.name for one, _ in found[:4])
            what = f"{address} means several places ({names} …), and cat joins the calls of one"
            raise AmbiguousError(f"{what}; cat each, or use seen.stack({str(address)!r})")
        return joined({one.name: _shown(value) for one, value in found}, dim)

    def stats(self, *addresses: Selector) -> "Figures":
        """Shape, dtype, mean, std, largest magnitude, zeros and non-finite values of each tensor; print it.

        `seen.stats().rows` is a list of dicts, as `pandas.DataFrame` takes them. Without an address: everything.
        """
        from tenterhook.verbs.figures import Figures

        return Figures(self._chosen(addresses))

    def show(self, *addresses: Selector, kind: str | None = None) -> Any:
        """Draw the values: feature maps, attention, images, vectors or histograms, as their shapes suggest.

            seen.show("conv1").savefig("conv1.png")

        Returns a matplotlib figure, which a notebook shows. `kind` ("maps", "attention", "image", "vector",
        "histogram") overrules the shape. Without an address: everything that was captured, up to a dozen values.
        """
        from tenterhook.verbs.show import show

        return show(self._chosen(addresses), kind)

    def to(self, device: torch.device | str) -> "Captured":
        """The same on another device: a capture of its own, which no longer changes."""
        device = torch.device(device)
        past = self._past(lambda tensor: tensor.to(device))
        return Captured(past, past.log)

    def save(self, file: str | File) -> None:
        """Write it to a safetensors file, for `load_capture`. No pickle; each value is a tensor under its address."""
        from tenterhook.verbs.capture_file import save

        save(file, self._past(lambda tensor: tensor))

    def patch(self, *addresses: Selector, at: Any = None) -> dict[str, Change | Function]:
        """What was captured, as changes: `edit(model, seen.patch("layer3"))` puts it into another run.

        Without an address: everything. Each leaf and each call goes where it came from; what was captured at one call
        only goes into every call. `at` limits it to an index, as in `seen.patch("layer3", at=(slice(None), 5))`.
        """
        changes: dict[str, Change | Function] = {}
        for asked in addresses or [str(tap.site) for tap in self._reached()]:
            found = self._find(asked)
            names_a_call = isinstance(asked, str) and "@" in asked
            calls = Counter(one.address._replace(call=None) for one, _ in found)
            for one, value in found:
                every = one.address._replace(call=None)
                goes_to = every if calls[every] == 1 and not names_a_call else one.address
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
        """The addresses of single values, site by site in the order in which something first came."""
        return iter(dict.fromkeys(one.name for one in self._all()))

    def __len__(self) -> int:
        return len({one.name for one in self._all()})

    def __contains__(self, address: object) -> bool:
        try:
            return bool(self._find(address))  # type: ignore[arg-type]
        except (AddressError, NotSeenError, TypeError):
            return False

    def items(self) -> ItemsView[str, Any]:
        """Each value with its address."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Each value."""
        return _Values(self)

    def __repr__(self) -> str:
        report = self.report()
        silent = report.silent if len(report.rows) > _SHOWN else []
        more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        never = [f"never came: {', '.join(silent[:4])}{more}"] if silent else []
        notes = [f"note: {note}" for note in report.notes]
        return "\n".join([self._head(), report.table().text(_SHOWN), *never, *notes])

    def _repr_html_(self) -> str:
        report = self.report()
        return markup.page(markup.title(self._head()), report.html())

    def _head(self) -> str:
        reached = len(self._reached())
        tensors = {id(t): t for one in self._all() for _, t in leaves(one.entry.value)}.values()
        size = sum(t.numel() * t.element_size() for t in tensors if t.layout is torch.strided and not t.is_nested)
        where = "address" if len(self._taps) == 1 else "addresses"
        return f"captured {counted(len(self), 'value')} ({_bytes(size)}) at {reached} of {len(self._taps)} {where}"

    def _reached(self) -> list[Any]:
        """The taps at which something came, in the order in which it first did."""
        known = {tap.number for tap in self._taps}
        return [self._session.taps[number] for number in self._log.order() if number in known]

    def _all(self) -> Iterator[One]:
        """Everything that was kept; what two selectors meant comes twice, under one name."""
        for tap in self._reached():
            yield from self._named(tap.site.address, tap, [])

    def _each(self) -> Iterator[tuple[str, Any]]:
        """Each value once, under its name in full."""
        known = set()
        for one in self._all():
            if one.name not in known:
                known.add(one.name)
                yield one.name, _shown(_part(one.entry, (), one.address))

    def _chosen(self, addresses: tuple[Selector, ...]) -> dict[str, Any]:
        """The values at some addresses, or all, by their names in full."""
        if not addresses:
            return dict(self._each())
        return {one.name: _shown(value) for address in addresses for one, value in self._find(address)}

    def _past(self, change: Callable[[Tensor], Tensor]) -> Past:
        """What is here now, with other tensors, apart from the session."""
        for one in self._all():
            _part(one.entry, (), one.address)  # none must have been overwritten
        return Past.of(self._session, self._taps, self._reached(), change)

    def _find(self, selector: Selector, every_call: bool = False) -> list[tuple[One, Any]]:
        """The values that a selector means; `every_call`: None for those of its calls in which none came."""
        selector, turn = pass_of(selector)
        silent: list[str] = []
        meant = self._lookup.meant(selector)
        found = [one for address, taps in meant for one in self._values_at(address, taps, silent, every_call)]
        if turn:
            found = [(one, value) for one, value in found if one.name.endswith(turn)]
            silent.append(f"{selector}{turn}: there was no such backward pass, or only one")
        if not found:
            raise NotSeenError("\n  ".join(silent))
        return found

    def _values_at(
        self, address: Address, taps: list[Any], silent: list[str], every_call: bool
    ) -> list[tuple[One, Any]]:
        """The values of some taps that an address means; `silent` gets a line for each tap that has none."""
        found: dict[tuple[int, int, int], tuple[One, Any]] = {}
        ranks = {inner: i for i, inner in enumerate(dict.fromkeys(tap.site.address.inner for tap in taps))}
        for tap in taps:
            kept, turns = tap.site.address, Counter[int]()  # the backward passes of each call
            for one in self._named(address, tap, silent):
                call = one.entry.call
                turns[call] += 1
                try:
                    value = _part(one.entry, address.leaf[len(kept.leaf) :], one.address)
                except NotSeenError as error:
                    silent.append(str(error))
                else:
                    found.setdefault((call, ranks[kept.inner], turns[call]), (one, value))
        if every_call:
            came = {(call, rank) for call, rank, _ in found}
            for tap in taps:
                inner, rank = tap.site.address.inner, ranks[tap.site.address.inner]
                for call in _meant_calls(tap, address) if any(rank == other for _, other in came) else ():
                    if (call, rank) not in came:
                        exact = address._replace(call=call, inner=inner)
                        found[call, rank, 0] = One(str(exact), exact, Entry(call, None, ())), None
        return [found[key] for key in sorted(found)]

    def _named(self, address: Address, tap: Any, silent: list[str]) -> Iterator[One]:
        """What a tap kept of what an address means: with the call, where there are several; with the backward pass."""
        entries = self._entries_at(address, tap, silent)
        turns, passed = Counter(entry.call for entry in entries), Counter[int]()
        asked = tap.site.address
        for entry in entries:
            exact = address._replace(call=entry.call, inner=asked.inner)
            name = str(exact if tap.calls > 1 or asked.call is not None else exact._replace(call=None))
            if turns[entry.call] > 1:
                name += f"#{passed[entry.call]}"
                passed[entry.call] += 1
            yield One(name, exact, entry)

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


class _Items(ItemsView[str, Any]):
    """All of it in one walk; a lookup for each would take as long as there are values."""

    _mapping: Captured

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._mapping._each()


class _Values(ValuesView[Any]):
    _mapping: Captured

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._mapping._each())


def _meant_calls(tap: Any, address: Address) -> Iterator[int]:
    """The calls of a tap that an address means, and of which a value is kept where one comes."""
    for call in tap.action.expected(tap):
        if all(covers(asked, call, tap.calls) for asked in (tap.site.address.call, address.call)):
            yield call


def _part(entry: Entry, path: Path, address: Address) -> Any:
    """The part of a kept value that an address means; NotSeenError where there is none."""
    try:
        value = part_of(entry.value, path)
    except LookupError:
        there = f"it is {describe(entry.value)}, with leaves {paths_of(entry.value)}"
        raise NotSeenError(f"{address}: no such leaf; {there}") from None
    if isinstance(value, Omitted):
        raise NotSeenError(f"{address} {value.why}")
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


def _ambiguous(asked: str, found: list[tuple[One, Any]]) -> str:
    lines = [f"  {one.name}  {describe(_shown(value))}" for one, value in found[:12]]
    more = [f"  … {len(found) - 12} more"] if len(found) > 12 else []
    head = f"{asked} means {len(found)} values:"
    return "\n".join([head, *lines, *more, f"index one of them, or use seen.calls({asked!r}) for all"])


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"
