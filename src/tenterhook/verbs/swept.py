"""Swept: the outputs of a sweep, a list that shows what each edit made of the model's output."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook import markup
from tenterhook.tables import Table
from tenterhook.values.tree import Path, describe, leaves

_Leaves = Mapping[Path, Tensor]
_SHOWN = 20  # rows of a repr


class Swept(list[Any]):
    """The model's output under each edit, in the order of the edits; `clean` is that of the inputs alone."""

    def __init__(
        self, outputs: Sequence[Any], edits: Sequence[Mapping[Any, Any]], clean: Mapping[Path, Tensor]
    ) -> None:
        super().__init__(outputs)
        self._edits = list(edits)
        self._clean = dict(clean)

    def __repr__(self) -> str:
        return f"{self._head()}\n{self._table().text(_SHOWN)}"

    def _repr_html_(self) -> str:
        return markup.page(markup.title(self._head()), self._table().html())

    def _head(self) -> str:
        return f"the output under each of {len(self)} edits"

    def _table(self) -> Table:
        rows = [self._row(i, one, output) for i, (one, output) in enumerate(zip(self._edits, self, strict=False))]
        header = ("", "edit", "output", "max |Δ|", "mean |Δ|")
        return Table(header, rows, right=("", *header[3:]))

    def _row(self, i: int, edit: Mapping[Any, Any], output: Any) -> tuple[str, ...]:
        made = ", ".join(f"{_name(selector)}: {_name(change)}" for selector, change in edit.items()) or "none"
        apart = [(tensor - self._clean[path]).abs() for path, tensor in leaves(output) if _compare(self._clean, path)]
        every = (
            torch.cat([one.flatten().double() for one in apart])
            if apart
            else torch.empty(0, dtype=torch.float64, device="cpu")
        )
        figures = (f"{every.max():.3g}", f"{every.mean():.3g}") if every.numel() else ("–", "–")
        return str(i), made if len(made) <= 60 else f"{made[:59]}…", describe(output), *figures


def _compare(clean: _Leaves, path: Path) -> bool:
    """Whether there is a number to subtract."""
    return path in clean and clean[path].dtype is not torch.bool


def _name(x: Any) -> str:
    """A selector or a change in a few words."""
    if isinstance(x, Tensor):
        return f"<{describe(x)}>"
    if isinstance(x, nn.Module):
        return type(x).__name__
    if isinstance(x, list):
        return f"[{', '.join(map(_name, x))}]"
    return str(x) if isinstance(x, str) else getattr(x, "__name__", repr(x))
