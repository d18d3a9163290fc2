"""Scores: a number, or a small tensor, for each edit of a sweep."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tenterhook.tables import Table
from tenterhook.values.tree import describe
from tenterhook.verbs.edit import Changes

_SHOWN = 40


class Scores:
    """What a metric made of the output under each edit of a sweep: `values` is the tensor, a row for each edit."""

    def __init__(self, edits: Sequence[Changes], values: Sequence[Tensor], metric: Callable[[Any], Any]) -> None:
        self.edits = list(edits)
        self.values = stacked(values)
        self._metric = metric_name(metric)

    def __len__(self) -> int:
        return len(self.edits)

    def __getitem__(self, i: Any) -> Any:
        return self.values[i]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values)

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows = [(str(i), _written(one), figure(x)) for i, (one, x) in enumerate(zip(self.edits, self.values))]  # noqa: B905
        if len(rows) > _SHOWN:
            rows = [*rows[: _SHOWN - 1], ("…", f"{len(rows) - _SHOWN + 1:,} more", "")]
        return Table(("", "edit", self._metric), rows, right=("", self._metric))


def measured(metric: Callable[[Any], Any], outputs: list[Any], edits: list[Changes], first: int) -> list[Tensor]:
    """What a metric makes of each output, in memory of its own."""
    found = []
    for i, (output, one) in enumerate(zip(outputs, edits, strict=True), first):
        try:
            found.append(as_value(metric(output)))
        except Exception as error:
            error.add_note(f"in the metric, at edit {i} of the list: {_written(one)}")
            raise
    return found


def as_value(made: Any) -> Tensor:
    """What a metric has returned, as a tensor that keeps nothing else alive."""
    if isinstance(made, Tensor):
        return made.detach().clone()
    try:
        return torch.tensor(made, dtype=torch.float64 if isinstance(made, float) else None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"a metric returns a number or a small tensor, got {type(made).__name__}") from None


def stacked(values: Sequence[Tensor]) -> Tensor:
    """The values of all edits in one tensor."""
    if not values:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    odd = [x for x in values if x.shape != values[0].shape]
    if odd:
        what = f"{describe(values[0])} of one output and {describe(odd[0])} of another"
        raise ValueError(f"the metric made {what}; a metric has one shape")
    return torch.stack(list(values))


def metric_name(metric: Callable[[Any], Any]) -> str:
    """What a metric is called in a table."""
    name = str(getattr(metric, "__name__", "metric"))
    return "metric" if name == "<lambda>" else name


def figure(x: Tensor) -> str:
    """A value of a metric for reading."""
    return f"{x.item():.4g}" if not x.dim() else describe(x)


def _written(one: Changes) -> str:
    return ", ".join(f"{selector}: {change}" for selector, change in one.items()) or "–"
