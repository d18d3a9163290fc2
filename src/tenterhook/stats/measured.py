"""One tensor measured with torch alone, wherever it is: for a table that somebody asks for, not for every step."""

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from tenterhook.stats.plain import plain
from tenterhook.stats.summary import Stats

_PIECE = 1 << 22  # elements that are in float64 at a time


def measured(tensor: Tensor) -> Stats | None:
    """The statistics of a tensor, without a histogram; None where its values cannot be had, or are complex."""
    values = None if tensor.is_complex() else plain(tensor)
    if values is None:
        return None
    with torch.no_grad():
        return functools.reduce(operator.add, map(_of, values.split(_PIECE)), Stats())


def _of(piece: Tensor) -> Stats:
    values = piece.double()
    finite = values[values.isfinite()]
    numbers: dict[str, Any] = {
        "count": torch.tensor(values.numel(), dtype=torch.int64, device=values.device),
        "nan": values.isnan().sum(),
        "pos_inf": (values == torch.inf).sum(),
        "neg_inf": (values == -torch.inf).sum(),
        "zeros": (values == 0).sum(),
        "sum": finite.sum(),
        "sumsq": finite.square().sum(),
    }
    if finite.numel():
        numbers |= {"min": finite.min(), "max": finite.max()}
    known: dict[str, Any] = {name: number.item() for name, number in numbers.items()}
    return Stats(**known)
