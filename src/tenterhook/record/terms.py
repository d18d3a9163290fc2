"""What is known of a call of a loss function, as rules see it. No torch here."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# What is measured of a call, before the labels.
MEASURED = ("mean", "many", "least", "most", "off_one", "off_log", "leak")


class Term(NamedTuple):
    """A term of a step's loss: one call of a loss function."""

    function: str  # its name in torch.nn.functional
    family: str  # what its targets are: classes, binary, values or other
    classes: int  # 2 where they are binary, 0 where there are none
    plain: bool  # whether its mean is over all labels alike: no weights, but for those of classes
    smoothing: float
    made_by: str  # the name of the node that gave the inputs, such as SigmoidBackward0
    mean: float  # over the labels, whatever the reduction
    many: float  # labels, without those that are ignored
    least: float  # of some of the inputs, and the largest
    most: float
    off_one: float  # how far the sum of a row of inputs is from one, at most
    off_log: float  # and the logarithm of the sum of their exponentials from zero
    leak: float  # how well one number of the model's inputs alone tells the targets: 1 for without fail
    labels: NDArray[np.float64]  # how often each class; of values their number, their sum and that of their squares

    @property
    def chance(self) -> float | None:
        """What the loss is where all classes are thought equally likely."""
        return math.log(self.classes) if self.classes > 1 and self.plain else None


def best_guess(term: Term, labels: NDArray[np.float64]) -> float | None:
    """What the term would be if the inputs told nothing but these labels were known; None where that is unknown."""
    total = float(labels.sum())
    if not term.plain or not len(labels) or total <= 0:
        return None
    if term.family == "values":
        many, first, second = labels.tolist()
        return max(0.0, second / many - (first / many) ** 2) if term.function == "mse_loss" else None
    shares = labels / total
    shares = shares * (1 - term.smoothing) + term.smoothing / len(shares)
    return entropy(shares)


def entropy(shares: NDArray[np.float64]) -> float:
    """Of a distribution, in nats, as a cross entropy is."""
    some = shares[shares > 0]
    return float(-(some * np.log(some)).sum())
