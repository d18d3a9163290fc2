"""The table of a model's addresses, of the variables of a function, or of the nodes of a graph.

sites(model)                      a table; iterating gives a Site each, str(site) is its address
sites(model, x)                   the same after one forward, with every value inside the forwards
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tenterhook import markup
from tenterhook.addresses.grammar import Address, escape
from tenterhook.addresses.graph import Code, Graph, searchable
from tenterhook.addresses.modules import shape_of, tensors_of, walk
from tenterhook.addresses.sites import Selector, Site, resolve
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import Action, Call, Tap
from tenterhook.tables import Table
from tenterhook.values.inputs import call_with
from tenterhook.values.tree import describe
from tenterhook.verbs.taps import tap_for
from tenterhook.verbs.undisturbed import as_before


class Sites:
    """The table of a model's sites. Iterate for rows, print for reading."""

    def __init__(self, model: Any, rows: list[Site], aliases: dict[str, str]) -> None:
        self.model = model  # rows refer to their modules weakly
        self.rows = rows
        self.aliases = aliases

    def __iter__(self) -> Iterator[Site]:
        yield from self.rows  # holding on to self, and with it to a graph that nobody else has

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Site:
        return self.rows[i]

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        what = getattr(self.model, "name", type(self.model).__name__)
        return markup.page(markup.title(f"{what}: {len(self)} addresses"), self._table().html())

    def _table(self) -> Table:
        if isinstance(self.model, Graph):
            return Table(("node", "made by"), [(str(site), site.class_name) for site in self.rows])
        if any(site.seen for site in self.rows):
            rows = [(str(site), _short(site.seen), _where(site), _short(_code(site), 100)) for site in self.rows]
            return Table(("address", "value", "source", "line"), rows)
        rows = [(str(site), site.class_name, _count(site), self._shapes(site)) for site in self.rows]
        return Table(("address", "class", "parameters", "shapes"), rows, right=("parameters",))

    def _shapes(self, site: Site) -> str:
        same = self.aliases.get(str(site))
        if site.kind != "module":
            shape = "" if site.tensor is None else _times(shape_of(site.tensor))
            return f"{shape}, tied to {same}" if same else shape
        if same:
            return f"the same module as {same}"
        return ", ".join(f"{name} {_times(shape)}" for name, shape in site.shapes.items())


def sites(model: Any, *inputs: Any, match: Selector = "**") -> Sites:
    """Every address of a model, as a table that prints well.

        print(sites(model))
        [str(site) for site in sites(model, match="**<Conv2d>")]
        print(sites(model, x))                    # and every value inside the forwards

    The parameters column counts all that are under the module, shared ones once. With inputs (the arguments, or one
    mapping of keyword arguments) the model runs once, and each value has its shape, its dtype and the line that makes
    it; random states and buffers are as before. Of a function: its variables. Of a tensor: the nodes of the graph
    behind it, as in `grad(0.1)`.
    """
    place = searchable(model, "sites")
    if isinstance(place, Graph):
        found = place.resolve("grad(**)" if match == "**" else match)
        return Sites(place, [site.value() for site in found], {})
    if inputs:
        return _of_run(model, place, inputs, match)
    if isinstance(place, Code):
        raise TypeError(f"which values {place.name} has is known when it runs: sites({place.name}, *inputs)")
    return _of_model(place, match)


class _Describe(Action):
    """Note what a value is like."""

    def fired(self, tap: Tap) -> int:
        return int(bool(tap.site.seen))

    def on_value(self, tap: Tap, value: Any, call: Call) -> None:
        tap.site.seen = tap.site.seen or describe(value)


def _of_run(model: Any, place: Any, inputs: tuple[Any, ...], match: Selector) -> Sites:
    session = Session(place, verb="sites", eager=True)
    if isinstance(place, Code):
        asked = place.resolve(match)
    elif match == "**":
        asked = [*resolve(place, "**"), *resolve(place, "**/**")]
    else:
        asked = resolve(place, match)
    session.taps = [tap_for(site.unshared(), session.scope, _Describe) for site in asked]
    with torch.no_grad(), as_before(place), session:
        call_with(model, inputs[0] if len(inputs) == 1 else inputs)
    order = {id(site.module): i for i, site in reversed(list(enumerate(asked)))}
    rows = [tap.site for tap in session.shown_taps() if tap.fired]
    rows.sort(key=lambda site: (order[id(site.module)], site.kind == "inner"))
    return Sites(place, rows, {})


def _where(site: Site) -> str:
    file, _, line = site.source.rpartition(":")
    return f"{Path(file).name}:{line}" if file else ""


def _short(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _code(site: Site) -> str:
    return site.text if site.kind == "inner" else site.class_name


def _of_model(model: nn.Module, match: Selector) -> Sites:
    if match != "**":
        found = resolve(model, match)
        return Sites(model, found, _tied(model, found))
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    rows = []
    for name, module in walk(model):
        first = names.setdefault(id(module), name)
        if first != name:
            aliases[escape(name)] = escape(first)
        rows.append(Site(Address(escape(name)), module, "module", wide=True))
    return Sites(model, rows, aliases)


def _tied(model: nn.Module, found: list[Site]) -> dict[str, str]:
    """For parameters and buffers: the other names of the same tensor."""
    names: dict[int, list[str]] = {}
    for kind in {site.kind for site in found} - {"module"}:
        for name, (_, tensor) in tensors_of(model, kind):
            names.setdefault(id(tensor), []).append(escape(name))
    others = {str(site): [n for n in names.get(id(site.tensor), ()) if n != str(site)] for site in found}
    return {name: ", ".join(tied) for name, tied in others.items() if tied}


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _count(site: Site) -> str:
    if site.kind != "module":
        return "" if site.tensor is None else f"{_numel(site.tensor):,}"
    module = site.module
    total = 0 if module is None else sum(_numel(p) for p in module.parameters())
    return f"{total:,}" if total else ""


def _numel(p: Any) -> int:
    return 0 if isinstance(p, nn.UninitializedParameter | nn.UninitializedBuffer) else int(p.numel())
