"""Trainings without an optimizer of torch: parameters that change from one backward pass to the next tell of them.

    p -= lr * p.grad  ·  p.data.sub_(…)  ·  autograd.grad and an update by hand  ·  an optimizer of another library

Once that is known, the parameters and gradients are measured after each pass, and the update before the next call.
"""

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tenterhook.platform.modes import unrecorded
from tenterhook.record.gather import Gather, some_values
from tenterhook.record.models import Models
from tenterhook.record.places import Places
from tenterhook.record.weights import Weights

_PASSES = 5  # of micro-batches, so many may come before an optimizer steps
_LOOKS = 20  # each has to wait for a device
_PARAMETERS, _VALUES = 8, 16  # of each model that are compared, and of each of these
Some = dict[tuple[str, str], Tensor]


class ByHand:
    """Notices such a training, and measures its weights."""

    def __init__(self, models: Models, places: Places, what: Iterable[str]) -> None:
        self.passes = 0  # all that there were
        self.noticed = False  # whether there was such a training
        self._models = models
        self._weights = Weights(models, places, frozenset(what), everything=False)
        self._since = self._looks = 0  # passes since an optimizer stepped, and how often parameters were compared
        self._before: Some = {}
        self._measured = False  # whether the update is still to be measured

    def notices(self, has_stepped: bool) -> bool:
        """A backward pass begins: whether parameters have changed since the last one. A device is seldom waited for."""
        self.passes += 1
        self._since += 1
        if self._looks >= _LOOKS or self._since < (_PASSES if has_stepped else 1) or _is_capturing():
            return False
        self._looks += 1
        before, self._before = self._before, self._some_values()
        changed = any(_differ(one, before[key]) for key, one in self._before.items() if key in before)
        self.noticed |= changed
        return changed

    def optimizer_steps(self) -> None:
        """What changes now is not by hand."""
        self._since, self._before = 0, {}

    def after_pass(self, gather: Gather, asked: Mapping[int, Tensor]) -> None:
        """Measure parameters and gradients; of autograd.grad() these are what it gave, by the ids of its inputs."""
        self.measure_update(gather)
        self._weights.look([p for model in self._models.all for _, p in model.each_parameter() if p.requires_grad])
        self._weights.before(gather, asked)
        self._measured = True

    def measure_update(self, gather: Gather) -> None:
        """Measure what was added to the parameters since the pass."""
        if self._measured:
            self._measured = False
            self._weights.after(gather)

    def _some_values(self) -> Some:
        found: Some = {}
        with torch.no_grad(), unrecorded():
            for model in self._models.all:
                trained = ((site, some_values(p, _VALUES)) for site, p in model.each_parameter() if p.requires_grad)
                readable = ((site, some) for site, some in trained if some is not None)
                for site, some in itertools.islice(readable, _PARAMETERS):
                    found[model.name, site] = some.clone()
        return found


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.device != other.device or one.dtype != other.dtype:
        return False  # it was exchanged
    with torch.no_grad(), unrecorded():
        return not torch.allclose(one, other, 0.0, 0.0, equal_nan=True)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
