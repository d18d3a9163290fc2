"""An operation that made a value which is not finite, and where the first of these came from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenterhook.birth.lines import Line
from tenterhook.platform.modes import wraps_tensors
from tenterhook.say import counted


class Kinds(NamedTuple):
    """What of a value is not finite."""

    nan: bool = False
    plus: bool = False
    minus: bool = False

    def __bool__(self) -> bool:
        return any(self)

    def beyond(self, others: Iterable["Kinds"]) -> bool:
        """Whether there is a kind that none of the others has."""
        return any(mine and not any(theirs) for mine, *theirs in zip(self, *others, strict=True))


FINITE = Kinds()


def kinds_of(value: Tensor) -> Kinds:
    """What of a value is not finite."""
    if not is_checked(value) or bool(value.isfinite().all()):
        return FINITE
    value = as_real(value)
    return Kinds(bool(value.isnan().any()), bool((value == torch.inf).any()), bool((value == -torch.inf).any()))


def as_real(value: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones; other values as they are."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def is_checked(value: Any) -> bool:
    """Whether a value can be anything but finite, and be looked at."""
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
        and not wraps_tensors(value)
    )


@dataclass(eq=False, slots=True)
class Made:
    """One operation, and what it made of what."""

    number: int  # in the order in which they ran
    operation: str  # as in torch: `log`, `_softmax`, `addmm`
    kinds: Kinds
    parents: tuple["Made", ...]  # what made those of its inputs that were not finite before
    line: Line | None
    node: str = ""  # of autograd's graph, in a backward pass: whose gradient it computes
    on_purpose: bool = False  # -inf that was asked for, as in a mask
    is_given: bool = False  # nothing made it here: an input, a parameter, a constant
    why: str = ""
    inputs: list[str] = field(default_factory=list)
    output: str = ""

    def origin(self) -> "Made":
        """The operation that the first bad value came from: NaN before infinity, and nothing that was on purpose."""
        here = self
        while (before := _worst(here)) is not None:
            here = before
        return here


def _worst(made: Made) -> Made | None:
    parents = [one for one in made.parents if one.number < made.number]
    if made.kinds.nan and (with_nan := [one for one in parents if one.kinds.nan]):
        return min(with_nan, key=_number)
    return min((one for one in parents if not one.on_purpose), key=_number, default=None)


def _number(made: Made) -> int:
    return made.number


def described(value: Tensor) -> str:
    """A tensor, in a few words."""
    head = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if not is_checked(value) or value.is_complex():
        return head
    flat = value.detach().reshape(-1)
    finite = flat[flat.isfinite()]
    parts = [head]
    if len(finite):
        low, high = finite.min().item() + 0.0, finite.max().item() + 0.0  # no -0
        parts.append(f"all {low:.4g}" if low == high else f"from {low:.4g} to {high:.4g}")
    zeros = int((flat == 0).sum())
    if 0 < zeros < len(flat):
        parts.append(counted(zeros, "zero"))
    for what, many in (("NaN", flat.isnan()), ("+inf", flat == torch.inf), ("-inf", flat == -torch.inf)):
        if count := int(many.sum()):
            parts.append(f"{count:,} {what}")
    return ", ".join(parts)


def where_true(mask: Tensor) -> str:
    """For how many elements a mask is true, and where the first of them is."""
    many = int(mask.sum())
    if not mask.dim():
        return "its only value"
    first = mask.nonzero()[0].tolist()
    return f"{many:,} of {counted(mask.numel(), 'value')}, the first at {first}"
