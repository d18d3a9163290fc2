"""The share of time that recording takes."""

from collections import deque

import numpy as np
import torch

from tenterhook.record.step import Step


class Overhead:
    """What recording took of all steps, and of those after the dense start."""

    def __init__(self, dense: int) -> None:
        self._dense = dense
        self._all, self._later = _Cost(), _Cost()

    def add(self, step: Step) -> None:
        """Count a step, but for the first one, which has imports and allocations in it."""
        if step.number:
            self._all.add(step)
        if step.number and step.number >= self._dense:
            self._later.add(step)

    def shares(self) -> dict[str, float | None]:
        """As rank.json has them."""
        return {"overhead": self._all.share(), "overhead_later": self._later.share()}


class _Cost:
    """What recording took of some steps: by its own clock, and on a GPU also by comparing sampled steps with others."""

    def __init__(self) -> None:
        self.seconds = self.spent = 0.0
        self._many = [0, 0]  # steps, sampled or not
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=500), deque(maxlen=500))

    def add(self, step: Step) -> None:
        self.seconds += step.seconds
        self.spent += step.spent
        self._many[step.sampled] += 1
        self._times[step.sampled].append(step.seconds)

    def share(self) -> float | None:
        if not self.seconds:
            return None
        counted = self.spent / max(self.seconds - self.spent, 1e-9)
        if min(map(len, self._times)) < 10 or not torch.cuda.is_initialized():
            return counted
        usual, sampled = (float(np.median(times)) for times in self._times)
        return max(counted, (sampled - usual) * self._many[True] / (usual * sum(self._many)))
