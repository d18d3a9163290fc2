"""Batches: what a model and a loss function were given, targets among the inputs, and rows far from all others."""

import weakref
from typing import Any

import torch
from torch import Tensor

_MOST_COLUMNS, _MOST_CLASSES, _FEWEST = 4096, 64, 8
_OFTEN = 3  # times, at least, a class is among the targets to be compared
_TINY = 1e-6  # the variance of a column that is the same everywhere, but for rounding
_FAR = 1e4  # times the usual size of a row
TARGET = "target"


class Given:
    """The tensors that models and loss functions were called with in a micro-batch, which it does not keep alive."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[tuple[tuple[str, str], Any]] = []

    def add(self, where: tuple[str, str], value: object) -> None:
        """A model, or a loss function, and which of its arguments; what a model has computed is no part of a batch."""
        if isinstance(value, Tensor) and value.grad_fn is None and len(self._all) < 64:
            self._all.append((where, weakref.ref(value)))

    def all(self) -> list[tuple[tuple[str, str], Tensor]]:
        """Those that are there still."""
        return [(where, tensor) for where, reference in self._all if (tensor := reference()) is not None]

    def inputs(self) -> list[Tensor]:
        """Those of models."""
        return [tensor for (_, site), tensor in self.all() if site != TARGET]


def leak_of(inputs: list[Tensor], y: Tensor, family: str, classes: int, ignored: int) -> Tensor:
    """How well one number of the inputs alone tells the targets: 1 where it does without fail, NaN if not compared."""
    targets = y.detach().reshape(-1)
    found = [torch.full((), torch.nan, dtype=torch.float32, device=y.device)]
    for one in inputs if len(targets) >= _FEWEST and (family == "values" or not (classes and y.dim() > 2)) else ():
        if one.device != y.device:
            continue
        if family == "classes" and not one.is_floating_point() and one.numel() == len(targets) and len(inputs) == 1:
            counts = targets != ignored
            found.append(((one.reshape(-1) == targets) & counts).float().sum() / counts.float().sum())
        elif one.is_floating_point() and one.dim() > 1 and len(one) == len(targets):
            columns = one.detach().reshape(len(one), -1).float()
            if 1 < columns.shape[1] <= _MOST_COLUMNS:
                found.append(_best_column(columns, targets, family, classes))
    return torch.stack([one.float() for one in found]).nan_to_num(-1.0).amax() if found[1:] else found[0]


def _best_column(columns: Tensor, targets: Tensor, family: str, classes: int) -> Tensor:
    """Whether a column has the values as they are; of classes, the share of its variance that is between them: 1 if it
    is the same for all of a class, and not for all classes.
    """
    if family == "values":
        return ((columns == targets[:, None].float()).all(0) & (columns.std(0) > 0)).any().float()
    if classes > _MOST_CLASSES:
        return torch.full((), torch.nan, dtype=torch.float32, device=columns.device)
    members = (targets[:, None] == torch.arange(classes, device=targets.device)).double()
    members = members * (members.sum(0) >= _OFTEN)  # a rare one is told by any number, by chance
    counted = members.sum(1, keepdim=True)
    columns = (columns - columns.mean(0)).double() * counted
    often = members.sum(0).clamp(min=1)[:, None]
    sums = members.T @ columns
    whole = columns.square().sum(0) - columns.sum(0).square() / counted.sum().clamp(min=1)
    between = (sums.square() / often).sum(0) - columns.sum(0).square() / counted.sum().clamp(min=1)
    return torch.where(whole > _TINY, between / whole, 0.0).amax()


def bad_row(values: Tensor) -> tuple[Tensor, Tensor]:
    """Which row of a batch has a number that is not finite, or is far larger than the others, -1 for none; its size."""
    sizes = values.detach().float().reshape(len(values), -1).abs().amax(1).nan_to_num(torch.inf)
    usual, far = sizes.median(), sizes.argmax()
    limit = torch.where((usual > 0) & usual.isfinite(), _FAR * usual, torch.inf)
    return torch.where(sizes.amax() >= limit, far, -1), sizes.amax()
