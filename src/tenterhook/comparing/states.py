"""What belongs to a whole process, and is another for each side: random numbers, and what a condition sets.

The sides run in turn. Whoever is about to run gets what it had when it stopped.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Random = tuple[Any, ...]


class Cell(NamedTuple):
    """One such thing."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def random_cells(everything: bool) -> list[Cell]:
    """Torch's generators; `everything`: Python's and NumPy's too, which take longer."""
    cells = [Cell(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cells.append(Cell(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    if everything:
        cells.append(Cell(random.getstate, random.setstate))
        if (numpy := sys.modules.get("numpy")) is not None:
            cells.append(Cell(numpy.random.get_state, numpy.random.set_state))
    return cells


def taken(cells: Sequence[Cell]) -> list[Any]:
    """What they are now."""
    return [cell.get() for cell in cells]


def put(cells: Sequence[Cell], values: Sequence[Any]) -> None:
    """Have them be something else."""
    for cell, value in zip(cells, values, strict=True):
        cell.set(value)


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two random states are the same, as far as torch's generators go."""
    return bool(torch.equal(some[0], others[0])) and all(map(_equal, some[1:2], others[1:2]))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):  # of each CUDA device
        return all(map(torch.equal, a, b))
    return bool(a == b)
