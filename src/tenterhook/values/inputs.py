"""What a module is called with."""

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


class Inputs(Mapping[int | str, Any]):
    """The arguments of one call, by position or by name, however they were passed."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.names = names  # of the positional parameters, from the module's signature

    def __getitem__(self, key: int | str) -> Any:
        where = self._where(key)
        return self.args[where] if isinstance(where, int) else self.kwargs[where]

    def __setitem__(self, key: int | str, value: Any) -> None:
        where = self._where(key)
        if isinstance(where, int):
            self.args = (*self.args[:where], value, *self.args[where + 1 :])
        else:
            self.kwargs[where] = value

    def _where(self, key: int | str) -> int | str:
        """An argument's place: its position, or its name in the keyword arguments."""
        if key in self.kwargs:
            return str(key)
        if isinstance(key, str) and key in self.names:
            key = self.names.index(key)
        if isinstance(key, int):
            if -len(self.args) <= key < len(self.args):
                return key % len(self.args)
            if 0 <= key < len(self.names) and self.names[key] in self.kwargs:
                return self.names[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[int | str]:
        yield from range(len(self.args))
        yield from self.kwargs

    def __len__(self) -> int:
        return len(self.args) + len(self.kwargs)

    def __copy__(self) -> "Inputs":
        return Inputs(self.args, dict(self.kwargs), self.names)

    def with_argument(self, key: int | str, value: Any) -> "Inputs":
        """These inputs with another value for one argument."""
        twin = copy.copy(self)
        twin[key] = value
        return twin

    def plain(self) -> Any:
        """The only argument itself; else a tuple; else, where some have names, a dict."""
        if len(self) == 1:
            return next(iter(self.values()))
        return dict(self) if self.kwargs else self.args

    def with_plain(self, plain: Any) -> "Inputs":
        """These inputs with other values for all arguments, given as `plain` gives them."""
        if len(self) == 1:
            (key,) = self
            return Inputs((plain,), {}, self.names) if isinstance(key, int) else Inputs((), {key: plain}, self.names)
        if not self.kwargs:
            return Inputs(tuple(plain), {}, self.names)
        args = tuple(plain[i] for i in range(len(self.args)))
        return Inputs(args, {name: plain[name] for name in self.kwargs}, self.names)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a module's forward takes by position."""
    if "forward" in vars(module):
        return _positional(module.forward)
    return _positional(type(module).forward)[1:]  # less self


@functools.lru_cache(maxsize=1024)
def _positional(forward: Any) -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in positional)


def call_with(model: nn.Module, inputs: Any) -> Any:
    """Call a model with its argument, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
