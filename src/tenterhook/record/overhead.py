"""The time that recording takes, and its share."""

from collections import deque

import numpy as np
import torch

from tenterhook.record.step import Step

_LEAST = 0.1  # of the time has to be the training's own: shares of less say nothing


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
        later = self._later.share()
        return {"overhead_seconds": self._all.took(), "overhead": self._all.share(), "overhead_later": later}


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

    def took(self) -> float:
        share = self.share()
        return self.spent if share is None else self.seconds * share / (1 + share)

    def share(self) -> float | None:
        own = self.seconds - self.spent  # less than nothing where threads have worked for us at the same time
        if own <= _LEAST * self.seconds:
            return None
        counted = self.spent / own
        if min(map(len, self._times)) < 10 or not torch.cuda.is_initialized():
            return counted
        usual, sampled = (float(np.median(times)) for times in self._times)
        return max(counted, (sampled - usual) * self._many[True] / (usual * sum(self._many)))
