"""The table of a model's addresses, or of the nodes of a graph.

sites(model)                      a table; iterating gives a Site each, str(site) is its address
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook._address import Address, escape
from tenterhook._graph import Graph, searchable
from tenterhook._sites import Selector, Site, resolve, shape_of, tensors_of, walk
from tenterhook._table import Table


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
        return self._table()._repr_html_()

    def _table(self) -> Table:
        if isinstance(self.model, Graph):
            return Table(("node", "made by"), [(str(site), site.class_name) for site in self.rows])
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


def sites(model: nn.Module | Tensor | Node, *, match: Selector = "**") -> Sites:
    """Every address of a model, as a table that prints well.

        print(sites(model))
        [str(site) for site in sites(model, match="**<Conv2d>")]

    The parameters column counts all that are under the module, shared ones once. Of a tensor: the nodes of the graph
    behind it, as in `grad(0.1)`.
    """
    place = searchable(model, "sites")
    if isinstance(place, Graph):
        found = place.resolve("grad(**)" if match == "**" else match)
        return Sites(place, [site.value() for site in found], {})
    return _of_model(place, match)


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
