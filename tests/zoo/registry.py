"""What the zoo holds: each training by its name, with what a watcher should find in it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

FILES = (
    *("rates", "stepping", "by_hand", "losses", "beginnings", "batches", "cuts", "layers", "transfer"),
    *("generative", "agents", "language", "twins"),
)


@dataclass(frozen=True)
class Training:
    """A function that trains something, as a stranger would write it, and returns what it trained."""

    name: str
    style: str
    train: Callable[[], Any]
    rules: frozenset[str]  # any of them names the fault; none for a healthy one
    needs: tuple[str, ...] = ()  # packages

    @property
    def about(self) -> str:
        return (self.train.__doc__ or "").strip()

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if find_spec(package) is None]


_ALL: dict[str, Training] = {}


def fault(style: str, *rules: str, needs: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Registers a training with a planted fault, which any of these rules names."""
    return lambda train: _add(train, style, frozenset(rules), needs)


def healthy(style: str, needs: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Registers a training in which nothing is wrong."""
    return lambda train: _add(train, style, frozenset(), needs)


def _add(train: Callable, style: str, rules: frozenset[str], needs: tuple[str, ...]) -> Callable:
    if train.__name__ in _ALL:
        raise ValueError(f"there are two trainings named {train.__name__}")
    _ALL[train.__name__] = Training(train.__name__, style, train, rules, needs)
    return train


def trainings() -> dict[str, Training]:
    """All of them, by name."""
    for file in FILES:
        importlib.import_module(f"tests.zoo.trainings.{file}")
    return _ALL
