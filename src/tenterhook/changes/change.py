"""What a ready-made change is: `ready` declares one where it is defined, in ready_made.py.

    @ready(numbers=("by",))
    def scale(value: Tensor, by: Tensor | Number) -> Tensor:
        return value * by

    scale(0.5)                    a Change: its name, its arguments, and what was declared
    as_change([scale(2), 0.0])    what stands for a change, as one

A change is data: it can be printed, compared and saved. What is done with it follows from what it declares.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from tenterhook.addresses.sites import Site
from tenterhook.changes.function import Function
from tenterhook.platform.checkpoints import beside_checkpoints
from tenterhook.platform.functorch import in_transform, is_of_transform
from tenterhook.platform.modes import dispatch_modes
from tenterhook.values.tree import can_have_gradient, describe, version_of

Number = int | float
Arguments = dict[str, Any]
P = ParamSpec("P")
KINDS: dict[str, Callable[..., "Change"]] = {}  # by name, what makes changes

_PLAIN = {float, int, bool, type(None)}
_NONE = object()
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # which a number leaves as they are
_stand_for_changes: list[tuple[tuple[type, ...], Callable[[Any], "Change"]]] = []


@dataclass(frozen=True, eq=False)
class ready:
    """Declares what a ready-made change is; the function is called with a tensor and the arguments of the change.

    A function that has a parameter `site`, the last one, also gets the site of the value.
    """

    random: bool = False  # each call makes something else, unless there is an argument `seed` that is not None
    any_shape: bool = False  # what it makes may have another shape or dtype than the value
    operator: Callable[[Tensor, Any], Tensor] | None = None  # does the same, if there is one argument, faster
    tensors: tuple[str, ...] = ()  # arguments that must be tensors
    numbers: tuple[str, ...] = ()  # arguments that must be tensors or numbers
    prepare: Callable[[Arguments], Arguments] | None = None  # checks the arguments, and gives those to keep
    stands_for: tuple[type, ...] = ()  # what may be given instead of a change, and means this one

    def __call__(self, function: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[P, "Change"]:
        """Turn the function into one of the arguments that gives a Change."""
        name, signature = function.__name__, inspect.signature(function)
        known = [p for p in signature.parameters.values() if p.name != "site"][1:]
        rest = signature.replace(parameters=known, return_annotation=Change)
        takes_site = "site" in signature.parameters
        is_of_one = len(known) == 1 and self.prepare is None

        @functools.lru_cache(maxsize=256, typed=True)  # a change is data, so that there need be one scale(2.0) only
        def of_number(number: Any) -> Change:
            arguments = {known[0].name: number}
            self._check(name, arguments)
            return Change(name, function, arguments, self, takes_site)

        @functools.wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> Change:
            if is_of_one and not kwargs and len(args) == 1 and type(args[0]) in _PLAIN and args[0]:  # 0.0 is -0.0
                return of_number(*args)
            bound = _with_usage(name, rest, rest.bind, *args, **kwargs)
            bound.apply_defaults()
            arguments = {key: _own_number(x) for key, x in bound.arguments.items()}
            self._check(name, arguments)
            if self.prepare is not None:
                arguments = _with_usage(name, rest, self.prepare, arguments)
            return Change(name, function, arguments, self, takes_site)

        make.__signature__ = rest  # type: ignore[attr-defined]
        KINDS[name] = make
        if self.stands_for:
            _stand_for_changes.append((self.stands_for, make))
        return make

    def _check(self, name: str, arguments: Mapping[str, Any]) -> None:
        for key in (*self.tensors, *self.numbers):
            is_number = key in self.numbers and isinstance(arguments[key], Number)
            if not is_number and not isinstance(arguments[key], Tensor):
                what = "a tensor or a number" if key in self.numbers else "a tensor"
                raise TypeError(f"{name}: {key} is {what}, got {type(arguments[key]).__name__}")


class Change:
    """One ready-made change: its name and its arguments. Call it with a tensor."""

    is_measured = True  # whether somebody may ask how much it changed

    def __init__(
        self, name: str, function: Callable[..., Tensor], arguments: Arguments, declared: ready, takes_site: bool
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.values = tuple(arguments.values())  # in the order in which the function takes them
        self.function = function
        self.declared = declared
        # The changes that it is made of.
        self.inner = [x for value in self.values for x in _as_tuple(value) if isinstance(x, (Change, Function))]
        self.takes_site = takes_site
        self._has_tensors = any(isinstance(x, Tensor) for x in self.values)
        # Made of numbers alone, and always the same: such a one is an operator and what it takes beside a value.
        is_simple = not (declared.random or declared.any_shape or takes_site)
        self.is_plain = is_simple and all(type(x) in _PLAIN for x in self.values)
        if self.is_plain:
            is_of_one = len(self.values) == 1
            self.operator = (declared.operator or function) if is_of_one else _of_all(function)
            self.operands = _by_dtype(self.values[0] if is_of_one else self.values, declared.operator is not None)

    @property
    def keeps_shape(self) -> bool:
        """Whether its result must have the shape of the value."""
        return not self.declared.any_shape and all(change.keeps_shape for change in self.inner)

    @property
    def takes_structures(self) -> bool:
        """Whether it may be given a value that is no tensor."""
        return self.declared.any_shape and bool(self.inner) and all(change.takes_structures for change in self.inner)

    def version(self) -> int:
        """A number that changes when one of its tensors is written into."""
        own = sum(version_of(x) for x in self.values if isinstance(x, Tensor))
        return own + sum(change.version() for change in self.inner if isinstance(change, Change))

    @property
    def is_pure(self) -> bool:
        """Whether it makes the same of the same value at any time."""
        if self.declared.random and self.arguments.get("seed") is None:
            return False
        return not self.learns and all(change.is_pure for change in self.inner)

    @property
    def learns(self) -> bool:
        """Whether it has tensors that require a gradient."""
        own = any(isinstance(x, Tensor) and x.requires_grad for x in self.values)
        return own or any(change.learns for change in self.inner)

    @functools.cached_property
    def _moved(self) -> dict[Any, tuple[int, Tensor]]:
        """Tensors among the arguments, where the values are, and of which version."""
        return {}

    def __call__(self, value: Tensor, site: Site | None = None) -> Tensor:
        """What it makes of a value."""
        if self.takes_site:
            return self.function(value, **self.arguments, site=site)
        if self._has_tensors:
            return self.function(value, **{name: self._to(x, value) for name, x in self.arguments.items()})
        return self.function(value, *self.values)

    def _to(self, x: Any, value: Tensor) -> Any:
        """An argument on the device and in the dtype of the value; what can be kept is moved once."""
        if not isinstance(x, Tensor):
            return x
        dtype = value.dtype if can_have_gradient(x) and can_have_gradient(value) else x.dtype
        if (x.device, x.dtype) == (value.device, dtype):
            return x
        if x.requires_grad or x.is_inference():
            return x.to(value.device, dtype)
        key, version = (id(x), value.device, dtype), version_of(x)
        if self._moved.get(key, (None,))[0] != version:
            with torch.inference_mode(False), beside_checkpoints():  # others may need it, in another mode
                moved = x.to(value.device, dtype)
                if dispatch_modes() or is_of_transform(moved):  # of a trace, say
                    return moved
            self._moved[key] = (version, moved)
        return self._moved[key][1]

    def __repr__(self) -> str:
        defaults = inspect.signature(KINDS[self.name]).parameters if self.name in KINDS else {}
        shown: list[str] = []
        for i, (key, x) in enumerate(self.arguments.items()):
            default = getattr(defaults.get(key), "default", _NONE)
            if x is not default and not (type(x) is type(default) in _PLAIN and x == default):
                shown.append(_short(x) if i == len(shown) else f"{key}={_short(x)}")
        return f"{self.name}({', '.join(shown)})"


def as_change(change: Any) -> Change | Function:
    """What may stand for a change, as one: a tensor, a number, a list of changes, a function."""
    if isinstance(change, (Change, Function)):
        return change
    if callable(change):
        is_factory = KINDS.get(getattr(change, "__name__", "")) is change
        return _without_arguments(change) if is_factory else Function(change)
    for types, make in _stand_for_changes:
        if isinstance(change, types):
            return make(change)
    what = "a function of the value, a tensor, a number or one of tenterhook.changes"
    raise TypeError(f"a change is {what}, got {type(change).__name__}")


def _without_arguments(factory: Callable[..., Change]) -> Change:
    """What `zero()` gives, for `zero`."""
    try:
        return factory()
    except TypeError:
        name = factory.__name__
        needs = _plain(inspect.signature(factory))
        raise TypeError(f"{name} needs its arguments: {name}{needs}") from None


@functools.cache
def _of_all(function: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    return lambda value, values: function(value, *values)


def _by_dtype(operand: Any, is_for_operator: bool) -> dict[torch.dtype, Any]:
    """What the operator takes beside a value of some dtype.

    Of a number torch would make a tensor each time, which takes longer than to multiply. In half precision it would
    not round it first, so it stays a number there, and where what is made belongs to a trace or a transform.
    """
    operands = dict.fromkeys(_FLOATING, operand)
    if is_for_operator and type(operand) is float and not dispatch_modes() and not in_transform():
        with torch.inference_mode(False):
            operands.update((dtype, torch.tensor(operand, dtype=dtype, device="cpu")) for dtype in _FLOATING[:2])
    return operands


def _with_usage(
    name: str, signature: inspect.Signature, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What a function returns; in a TypeError, how the change is written."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}{_plain(signature)}: {error}") from None


def _plain(signature: inspect.Signature) -> str:
    """A signature without what is returned."""
    return str(signature).partition(" ->")[0]


def _own_number(x: Any) -> Any:
    """A number of NumPy's as one of Python's, which can be printed and saved."""
    return x.item() if isinstance(x, Real) and hasattr(x, "item") else x


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _short(x: Any) -> str:
    """An argument for reading; an index as it is written between brackets."""
    if isinstance(x, Tensor):
        return f"<{describe(x)}>"
    if isinstance(x, tuple):
        return f"({', '.join(map(_short, x))})"
    if isinstance(x, slice):
        ends = [x.start, x.stop] + [x.step] * (x.step is not None)
        return ":".join("" if end is None else str(end) for end in ends)
    return "..." if x is Ellipsis else repr(x)
