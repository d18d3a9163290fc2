"""How much a change changed: the largest and the mean absolute difference, kept on the device until read.

Measuring takes longer than most changes, so it is put off: what is needed for it is kept until the next call comes or
somebody asks, and after the first few calls only those are measured whose number is a power of two. A ready-made
change can be made again on the old value, so that alone is kept; of what a function made, a copy.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenterhook.platform.functorch import is_within_vmap
from tenterhook.platform.modes import unrecorded
from tenterhook.platform.tensors import has_numbers
from tenterhook.values.numbers import difference, largest
from tenterhook.values.tree import Omitted, leaves, noted, rebuild, version_of

_MEASURE_ALL = 8


class _Found(NamedTuple):
    """At one call: the largest and the mean absolute difference, and over how many numbers."""

    largest: Tensor | float
    mean: Tensor | float
    size: int


class Difference:
    """What one edit did, over its calls."""

    calls = 0
    _made_with = 0  # the version of the change
    unknown = ""
    _put_off: Any = None

    def __init__(self, change: Any) -> None:
        self._change = change
        self._found: list[_Found] = []

    def put_off(self, old: Tensor, version: int) -> None:
        """The first call, of a change that can be made again: the value before, as it was at a version."""
        self.calls = 1
        self._put_off = [(old, version, None)]

    def note(self, old: Any, new: Any) -> None:
        """One call: the value before and after; None for after where it stayed as it was."""
        self.calls = n = self.calls + 1
        if self._put_off is not None:
            self._settle()
        if (n > _MEASURE_ALL and n & (n - 1)) or not self._change.is_measured:
            return
        if new is None:
            self._found.append(_Found(0.0, 0.0, 1))
            return
        with unrecorded():
            self._keep(old, new)

    def _keep(self, old: Any, new: Any) -> None:
        if self._change.is_pure and isinstance(old, Tensor):
            self._put_off = ((*_kept(old), None),)
            self._made_with = self._change.version()
        elif type(old) is type(new) is Tensor:
            self._put_off = ((*_kept(old), new.detach().clone()),)
        else:
            before, after = dict(leaves(old)), dict(leaves(new))
            if before.keys() != after.keys():
                self.unknown = "its leaves are not those that it had before"
            elif _holds_objects(old):
                self.unknown = "what is no tensor in it was not compared"
            pairs = [(t, after.get(path)) for path, t in before.items()]
            self._put_off = [(*_kept(a), b.detach().clone()) for a, b in pairs if b is not None]

    def _settle(self) -> None:
        pairs, self._put_off = self._put_off, None
        with unrecorded(), torch.no_grad():
            for old, version, new in pairs or ():
                if version_of(old) != version or (new is None and self._change.version() != self._made_with):
                    self.unknown = "the value or the change was overwritten before they could be compared"
                    continue
                try:
                    found = _compared(old, self._change(old) if new is None else new)
                    if not all(_can_be_read(one.largest) for one in found):
                        raise NotImplementedError
                    self._found += found
                except (NotImplementedError, RuntimeError):  # sparse, or without numbers
                    self.unknown = f"{_kind(old)} cannot be compared"

    @property
    def measured(self) -> list[_Found]:
        """What was found at each call that was measured."""
        if self._put_off is not None:
            self._settle()
        return self._found

    @property
    def max(self) -> float:
        """The largest absolute difference; reading it waits for the device."""
        largest = [float(one.largest) for one in self.measured]
        return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)

    @property
    def mean(self) -> float:
        """The mean absolute difference."""
        total = sum(one.size for one in self.measured)
        return sum(float(one.mean) * one.size for one in self.measured) / total if total else 0.0

    def figures(self) -> tuple[str, str]:
        """The largest and the mean difference, as a report shows them."""
        return (f"{self.max:.3g}", f"{self.mean:.3g}") if self.measured else ("–", "–")

    def remark(self) -> str:
        """What there is to say of them."""
        if not self.measured:
            return self.unknown or ("there was nothing to compare" if self.calls else "")
        some = f"in the {len(self.measured)} of {self.calls} calls that were measured"
        if self.unknown:
            return self.unknown
        if self.max == 0.0:
            if len(self.measured) < self.calls:
                return f"this edit changed nothing {some}"
            why = "" if getattr(self._change, "returned", True) else ": its function returned None and wrote nothing"
            return f"this edit changed nothing{why}"
        if not math.isfinite(self.max):
            return "what it made, or what it replaced, is not finite"
        return f"the differences are those {some}" if len(self.measured) < self.calls else ""


def _holds_objects(value: Any) -> bool:
    """True if there is something in a structure that is neither a tensor nor a constant, such as a cache."""
    found: list[Any] = []
    rebuild(value, lambda _, tensor: tensor, opaque=lambda x: found.append(noted(x)))
    return any(isinstance(x, Omitted) for x in found)


def _kept(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor to keep, and its version."""
    if tensor.is_inference():
        tensor = tensor.clone()  # it would not tell if it were overwritten
    return tensor.detach() if tensor.requires_grad else tensor, version_of(tensor)


def _kind(tensor: Tensor) -> str:
    return "a sparse tensor" if tensor.layout != torch.strided else "such a tensor"


def _can_be_read(tensor: Tensor) -> bool:
    """Whether a tensor has numbers; one of vmap has not, once that is over."""
    return has_numbers(tensor) and not is_within_vmap(tensor)


def _compared(old: Tensor, new: Tensor) -> list[Any]:
    if old.shape != new.shape or not old.numel():
        return []
    apart = difference(old, new)
    return [_Found(largest(apart), apart.abs().mean(), apart.numel())]
