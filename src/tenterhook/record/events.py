"""What happens in a training, as the sources tell the assembler: no tensors, only numbers that stand for things.

A backward pass, a loss and an optimizer each have a number that is never used again.
"""

from typing import NamedTuple


class Called(NamedTuple):
    """A model is called, with gradients enabled or not."""

    trains: bool = True


class PartCalled(NamedTuple):
    """A module of a model is called."""


class Backward(NamedTuple):
    """A backward pass that reaches what is trained."""

    number: int
    loss: int | None = None  # None where it was not called on scalars
    in_step: bool = False  # an optimizer's step() is running around it


class Raised(NamedTuple):
    """A backward pass has raised."""

    number: int


class ByHand(NamedTuple):
    """Parameters have changed since the last backward pass, and no optimizer has stepped."""


class Joined(NamedTuple):
    """An optimizer steps for the first time, or again after another one has replaced it."""

    optimizer: int
    others: frozenset[int] = frozenset()  # with the first one of a training: those that have not stepped yet
    replaces: tuple[int, ...] = ()  # those that are gone, or whose parameters it has


class Stepping(NamedTuple):
    """An optimizer's step() is called while another one's runs, or after its own has raised."""

    optimizer: int


class Ready(NamedTuple):
    """The gradients of an optimizer that is stepping are there: with a closure, that has run."""

    optimizer: int


class Stepped(NamedTuple):
    """An optimizer's step() has returned. Where it raises there is no such event."""

    optimizer: int


class Skipped(NamedTuple):
    """A GradScaler has left out the step of an optimizer; None stands for one that only wraps another."""

    optimizer: int | None


class Finished(NamedTuple):
    """The training is over."""


Event = Called | PartCalled | Backward | Raised | ByHand | Joined | Stepping | Ready | Stepped | Skipped | Finished
