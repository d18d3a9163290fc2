"""The numbers of captured values, as a table."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tenterhook.addresses.grammar import parse
from tenterhook.errors import AddressError
from tenterhook.stats.measured import measured
from tenterhook.tables import Table
from tenterhook.values.tree import leaves, shape_of

_HEADER = ("address", "shape", "dtype", "mean", "std", "absmax", "zeros", "non-finite")


class Figures:
    """A row for each tensor: shape, dtype; mean, std and absmax of the finite values; how many are zero or not finite.

    Print it, or take `rows`, a list of dicts: `pandas.DataFrame(figures.rows)`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.rows = [row for name, value in values.items() for row in _rows(name, value)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        return Table(_HEADER, [_in_words(row) for row in self.rows], right=_HEADER[3:])


def _rows(name: str, value: Any) -> Iterator[dict[str, Any]]:
    """The row of a number or tensor; those of the leaves of a structure."""
    if isinstance(value, bool | int | float):
        yield {**_row(name, torch.tensor(value, dtype=torch.float64, device="cpu")), "dtype": type(value).__name__}
    for path, tensor in leaves(value):
        yield _row(_leaf(name, path), tensor)


def _row(name: str, tensor: Tensor) -> dict[str, Any]:
    stats = measured(tensor)
    row: dict[str, Any] = {
        "address": name,
        "shape": shape_of(tensor),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if stats is None:  # complex, sparse, quantised …
        return row | dict.fromkeys(("mean", "std", "absmax", "zeros", "nonfinite"))
    nonfinite = stats.count - stats.finite
    return row | {
        "mean": stats.mean,
        "std": stats.std,
        "absmax": stats.absmax,
        "zeros": stats.zeros,
        "nonfinite": nonfinite,
    }


def _leaf(name: str, path: tuple[Any, ...]) -> str:
    if not path:
        return name
    name, mark, turn = name.partition(")#")
    try:
        address = parse(name + mark[:1])
    except AddressError:  # a name that is no address: of a variable of a function
        return name + mark + turn + "".join(f"[{key}]" for key in path)
    return str(address._replace(leaf=(*address.leaf, *path))) + mark[1:] + turn


def _in_words(row: Mapping[str, Any]) -> tuple[str, ...]:
    shape = "×".join(map(str, row["shape"])) or "scalar"
    if row["zeros"] is None:
        return (row["address"], shape, row["dtype"], *["–"] * 5)
    size = math.prod(row["shape"]) if "nested" not in row["shape"] else 0
    zeros = f"{row['zeros'] / size:.1%}" if row["zeros"] and size else "0"
    moments = [_number(row[name]) for name in ("mean", "std", "absmax")]
    return (row["address"], shape, row["dtype"], *moments, zeros, f"{row['nonfinite']:,}")


def _number(x: float) -> str:
    return "–" if math.isnan(x) else f"{x:.3g}"
