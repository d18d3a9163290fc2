"""Somebody's own function as a change."""

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.sites import Site
from tenterhook.errors import EditError
from tenterhook.values.tree import leaves, rebuild_live, version_of


class Function:
    """Somebody's own function as a change. It gets a copy, so that writing into it reaches nobody else."""

    is_pure = False
    is_measured = True
    keeps_shape = True
    takes_structures = True
    returned = True  # whether the function returned something, the last time

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.takes_site = takes_site(function)
        self.is_plain = not self.takes_site

    def __call__(self, value: Any, site: Site | None = None) -> Any:
        """What the function returns, or else the copy that it got, into which it may have written."""
        shared: list[tuple[Tensor, int]] = []
        try:
            shown = rebuild_live(value, lambda _, tensor: tensor.clone(), strict=True)
        except EditError:  # it may return another, all the same
            shown = rebuild_live(value, lambda _, tensor: tensor.clone())
            shared = [(tensor, version_of(tensor)) for _, tensor in leaves(value)]
        new = self.function(shown, site) if self.takes_site else self.function(shown)
        if any(version_of(tensor) != version for tensor, version in shared):
            raise EditError("it wrote into a tensor of the model's own, in what cannot be copied; return a new value")
        self.returned = new is not None
        return shown if new is None else new

    @property
    def learns(self) -> bool:
        """Whether it has tensors that require a gradient, as far as that can be seen."""
        function = getattr(self.function, "__func__", self.function)
        code = getattr(function, "__code__", None)
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
        named = [getattr(function, "__globals__", {}).get(name) for name in getattr(code, "co_names", ())]
        held = [*cells, *named, getattr(self.function, "__self__", None), self.function]
        held += getattr(function, "__defaults__", None) or ()
        return any(map(_learns, held))

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


def _learns(thing: Any) -> bool:
    if isinstance(thing, nn.Module):
        return any(parameter.requires_grad for parameter in thing.parameters())
    return isinstance(thing, Tensor) and thing.requires_grad


def takes_site(function: Callable[..., Any]) -> bool:
    """Whether a function given to a verb is `f(value, site)`; else it is `f(value)`."""
    names, needed = _positional(function)
    if names[:1] in (["site"], ["address"]) and len(names) > 1:
        what = "is called with (value, site), the value first"
        raise TypeError(f"a function {what}; this one begins with {names[0]!r}: write ({names[1]}, {names[0]})")
    return needed >= 2 or names[1:2] == ["site"]


def _positional(function: Callable[..., Any]) -> tuple[list[str], int]:
    """The names of what a function takes by position, and how many of them it needs."""
    if type(function) is FunctionType and function.__defaults__ is None:
        code = function.__code__
        return list(code.co_varnames[: code.co_argcount]), code.co_argcount
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # many of torch's own
        return [], 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in positional], sum(p.default is p.empty for p in positional)
