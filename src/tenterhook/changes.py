"""Ready-made changes for `edit`: data, not code, so that they can be printed, compared and saved.

    from tenterhook.changes import add, at, clip_norm, scale, zero

    edit(model, {"layer3": scale(0.5), "h.5": add(vector), "grad(layer2)": clip_norm(1.0)})
    edit(model, {"attn": at((..., slice(0, 64)), zero())})           # one head's columns

Each is a function of one tensor that returns a new one of the same shape and dtype. What they replace stays in
the graph with a gradient of zero, so that a backward pass finds every parameter that it would find otherwise.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from contextlib import nullcontext
from numbers import Real
from types import FunctionType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from tenterhook.addresses.sites import Site
from tenterhook.errors import EditError
from tenterhook.platform.checkpoints import beside_checkpoints, modes
from tenterhook.values.tree import can_have_gradient, describe, leaves, rebuild_live, version_of

Number = int | float
Dims = int | tuple[int, ...]
P = ParamSpec("P")
KINDS: dict[str, Callable[..., "Change"]] = {}


# As functions of a value and one more thing, which are called in half the time.
_OPERATORS: dict[str, Callable[..., Tensor]] = {"scale": operator.mul}
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # which a number leaves as they are


@functools.cache
def _of_all(function: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    return lambda value, values: function(value, *values)


def _by_dtype(operand: Any, is_factor: bool) -> dict[torch.dtype, Any]:
    """What the operator takes beside a value of some dtype.

    Of a factor torch would make a tensor each time, which takes longer than to multiply. In half precision it would
    not round it first, so it stays a number there, and where what is made belongs to a trace or a transform.
    """
    operands = dict.fromkeys(_FLOATING, operand)
    if is_factor and type(operand) is float and not modes() and torch._C._functorch.peek_interpreter_stack() is None:
        with torch.inference_mode(False):
            operands.update((dtype, torch.tensor(operand, dtype=dtype, device="cpu")) for dtype in _FLOATING[:2])
    return operands


class Change:
    """One ready-made change: its name and its arguments. Call it with a tensor."""

    def __init__(self, name: str, function: Callable[..., Tensor], arguments: dict[str, Any]) -> None:
        self.name = name
        self.arguments = arguments
        self.values = tuple(arguments.values())  # in the order in which the function takes them
        self.function = function
        self.is_plain = name != "noise"  # made of numbers alone, and always the same
        for argument in self.values:
            if type(argument) not in _PLAIN:
                self.is_plain = False
        _check(name, arguments)
        if self.is_plain:
            is_of_one = len(self.values) == 1
            self.operator = _OPERATORS.get(name, function) if is_of_one else _of_all(function)
            self.operands = _by_dtype(self.values[0] if is_of_one else self.values, name in _OPERATORS)
        else:
            self.takes_site = "change" in arguments or "changes" in arguments
            self._has_tensors = any(isinstance(x, Tensor) for x in arguments.values())

    takes_site = _has_tensors = False
    is_measured = True  # whether somebody may ask how much it changed

    @property
    def inner(self) -> list[Any]:
        """The changes that it is made of."""
        return [x for key in ("change", "changes") if key in self.arguments for x in _as_tuple(self.arguments[key])]

    @property
    def keeps_shape(self) -> bool:
        """Whether its result must have the shape of the value."""
        return self.name != "any_shape" and all(change.keeps_shape for change in self.inner)

    def version(self) -> int:
        """A number that changes when one of its tensors is written into."""
        own = sum(version_of(x) for x in self.arguments.values() if isinstance(x, Tensor))
        return own + sum(change.version() for change in self.inner)

    @property
    def is_pure(self) -> bool:
        """Whether it makes the same of the same value at any time."""
        if self.name not in KINDS:
            return False
        if self.is_plain or self.name == "noise":
            return self.is_plain or self.arguments["seed"] is not None
        learns = any(isinstance(x, Tensor) and x.requires_grad for x in self.arguments.values())
        return not learns and all(change.is_pure for change in self.inner)

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
        key = (id(x), value.device, dtype)
        if self._moved.get(key, (None,))[0] != x._version:
            with torch.inference_mode(False), beside_checkpoints():  # others may need it, in another mode
                moved = x.to(value.device, dtype)
                if modes() or torch._C._functorch.is_functorch_wrapped_tensor(moved):  # of a trace, say
                    return moved
            self._moved[key] = (x._version, moved)
        return self._moved[key][1]

    def __repr__(self) -> str:
        defaults = inspect.signature(KINDS[self.name]).parameters if self.name in KINDS else {}
        shown: list[str] = []
        for i, (key, x) in enumerate(self.arguments.items()):
            default = getattr(defaults.get(key), "default", _NONE)
            if x is not default and not (type(x) is type(default) in _PLAIN and x == default):
                shown.append(_short(x) if i == len(shown) else f"{key}={_short(x)}")
        return f"{self.name}({', '.join(shown)})"


class Function:
    """Somebody's own function as a change. It gets a copy, so that writing into it reaches nobody else."""

    is_pure = False
    is_measured = True
    keeps_shape = True
    returned = True  # whether the function returned something, the last time

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.takes_site = _takes_site(function)
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

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


_NONE = object()
_PLAIN = {float, int, bool, type(None)}
_CHANGES = (Change, Function)
_CONSTANTS = (Tensor, int, float)
_SEQUENCES = (list, tuple)
_KINDS_OF_ARGUMENTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("by", "vector", "std", "max_norm", "times"), _CONSTANTS),
    **dict.fromkeys(("rows", "direction"), (Tensor,)),
}


def _check(name: str, arguments: dict[str, Any]) -> None:
    for key in arguments.keys() & _KINDS_OF_ARGUMENTS.keys():
        kinds, x = _KINDS_OF_ARGUMENTS[key], arguments[key]
        if not isinstance(x, kinds):
            what = "a tensor or a number" if len(kinds) > 1 else "a tensor"
            raise TypeError(f"{name}: {key} is {what}, got {type(x).__name__}")
    limit = arguments.get("max_norm", 0)
    if not isinstance(limit, Tensor) and limit < 0:
        raise ValueError(f"{name}: no norm is below 0, so max_norm cannot be {limit}")
    if name == "clamp" and arguments["min"] is arguments["max"] is None:
        raise ValueError("clamp: give it min, max or both")


def ready(function: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[P, Change]:
    """Turn a function of a tensor and some arguments into one of the arguments that gives a Change."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.name != "site"][1:]
    rest = signature.replace(parameters=known, return_annotation=Change)
    kind, names = function.__name__, [p.name for p in known]
    holds_changes = {"change", "changes"} & set(names)
    is_of_one = len(names) == 1 and not holds_changes

    @functools.lru_cache(maxsize=256, typed=True)  # a change is data, so that there need be one scale(2.0) only
    def of_number(number: Any) -> Change:
        return Change(kind, function, {names[0]: number})

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Change:
        if is_of_one and not kwargs and len(args) == 1 and type(args[0]) in _PLAIN and args[0]:  # 0.0 is -0.0
            return of_number(*args)
        try:
            bound = rest.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {name: _own_number(x) for name, x in bound.arguments.items()}
            for name in holds_changes:
                inner = arguments[name]
                arguments[name] = as_change(inner) if name == "change" else tuple(map(as_change, inner))
        except TypeError as error:
            raise TypeError(f"{kind}{str(rest).partition(' ->')[0]}: {error}") from None
        return Change(kind, function, arguments)

    make.__signature__ = rest  # type: ignore[attr-defined]
    KINDS[function.__name__] = make
    return make


def as_change(change: Any) -> Change | Function:
    """What may stand for a change, as one: a tensor, a number, a list of changes, a function."""
    if isinstance(change, _CHANGES):
        return change
    if isinstance(change, _CONSTANTS):
        return replace(change)
    if isinstance(change, _SEQUENCES):
        return in_turn(change)
    factory = KINDS.get(getattr(change, "__name__", ""))
    if factory is not None and factory is change:
        try:
            return factory()  # zero in place of zero()
        except TypeError:
            needs = str(inspect.signature(factory)).partition(" ->")[0]
            raise TypeError(f"{change.__name__} needs its arguments: {change.__name__}{needs}") from None
    if callable(change):
        return Function(change)
    if isinstance(change, Real):
        return replace(change)  # type: ignore[arg-type]
    what = "a function of the value, a tensor, a number or one of tenterhook.changes"
    raise TypeError(f"a change is {what}, got {type(change).__name__}")


def _own_number(x: Any) -> Any:
    """A number of NumPy's as one of Python's, which can be printed and saved."""
    return x.item() if isinstance(x, Real) and hasattr(x, "item") else x


def _takes_site(function: Callable[..., Any]) -> bool:
    if type(function) is FunctionType and function.__defaults__ is None:
        return function.__code__.co_argcount >= 2
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # many of torch's own
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    return len(needed) >= 2 or any(p.name == "site" for p in positional[1:2])


@ready
def zero(value: Tensor) -> Tensor:
    """Nothing but zeros."""
    return _filled(value, 0)


@ready
def ones(value: Tensor) -> Tensor:
    """Nothing but ones."""
    return _filled(value, 1)


@ready
def replace(value: Tensor, by: Tensor | Number) -> Tensor:
    """Another tensor, or a number everywhere. A tensor that broadcasts to the value's shape will do."""
    if not isinstance(by, Tensor):
        if not can_have_gradient(value) and by != int(by):
            raise ValueError(f"{by} is no {str(value.dtype).removeprefix('torch.')}, which the value is")
        return _filled(value, by)
    try:
        whole = (by.to(value.dtype) if can_have_gradient(value) else by).expand(value.shape)
    except RuntimeError:
        what = f"the replacement has shape {_times(by)}, the value {_times(value)}"
        raise ValueError(f"{what}; give single positions with at(...)") from None
    return _instead(value, whole)


@ready
def scale(value: Tensor, by: Tensor | Number) -> Tensor:
    """The value times a number, or times a tensor that broadcasts."""
    return value * by


@ready
def add(value: Tensor, vector: Tensor | Number, times: Tensor | Number = 1.0) -> Tensor:
    """The value plus a vector, as in steering; `times` says how much of it."""
    return value + (vector * times if isinstance(times, Tensor) or times != 1.0 else vector)


@ready
def clamp(value: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """The value held between two bounds."""
    return value.clamp(min, max)


@ready
def noise(value: Tensor, std: Number, seed: int | None = None) -> Tensor:
    """The value plus normal noise: with a seed the same each time, without one from torch's own generator."""
    if seed is None:
        return value + torch.randn_like(value) * std
    generator = torch.Generator(value.device).manual_seed(seed)
    return value + torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device) * std


@ready
def mean(value: Tensor, dim: Dims) -> Tensor:
    """The mean over some dimensions, in place of each value along them; `mean(0)`: over the rows of the batch."""
    return value.mean(dim, keepdim=True).expand_as(value).clone()


@ready
def resample(value: Tensor, rows: Tensor, seed: int = 0) -> Tensor:
    """For each row of the value a random row of another capture; the same ones at each call with the same seed."""
    if rows.shape[1:] != value.shape[1:] or not len(rows):
        raise ValueError(f"the rows to draw from have shape {_times(rows)}, the value {_times(value)}")
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same rows on every device
    drawn = torch.randint(len(rows), (len(value),), generator=generator)
    return _instead(value, rows[drawn.to(value.device)].to(value.dtype))


def project_out(direction: Tensor, dim: int = -1) -> Change:
    """The value without its part along a direction, or along the plane of several (one a row)."""
    _check("project_out", {"direction": direction})
    if direction.dim() > 2:
        raise ValueError(f"project_out: several directions are the rows of a matrix, got {_times(direction)}")
    rows = torch.atleast_2d(direction)
    if not direction.requires_grad:  # else found anew each time, so that it can be learnt
        rows = _basis(rows)
    return Change("project_out", _project_out, {"direction": rows, "dim": dim})


KINDS["project_out"] = project_out


def _basis(rows: Tensor) -> Tensor:
    """Orthonormal rows for the same space, in float64; those that are so already stay as they are, bit for bit."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float64), copy=True)
    eps = torch.finfo(wide.dtype).eps
    if torch.allclose(wide @ wide.mH, torch.eye(len(rows)).to(wide), rtol=0, atol=64 * eps):
        return wide
    _, size, basis = torch.linalg.svd(wide, full_matrices=False)
    return basis[size > size.max() * len(rows) * torch.finfo(_at_least_float32(rows)).eps]


def _project_out(value: Tensor, direction: Tensor, dim: int) -> Tensor:
    along = value.movedim(dim, -1)
    if direction.shape[-1] != along.shape[-1]:
        raise ValueError(f"the direction has {direction.shape[-1]} entries, the value {along.shape[-1]} along {dim}")
    device = value.device.type
    off = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
    with off:  # in less than the value's own precision, much would remain
        inverse = torch.linalg.pinv(direction) if direction.requires_grad else direction.mH
        return (along - along @ inverse @ direction).movedim(-1, dim)


@ready
def clip_norm(value: Tensor, max_norm: Number, dim: Dims | None = None) -> Tensor:
    """Scaled down where its 2-norm is over a limit; with `dim` each row by itself."""
    norm = torch.linalg.vector_norm(value, dim=dim, keepdim=dim is not None, dtype=_at_least_float32(value))
    tiny = torch.finfo(norm.dtype).tiny
    return value * (max_norm / norm.clamp(min=tiny)).clamp(max=1.0).to(value.dtype.to_real())


@ready
def reverse(value: Tensor, times: Number = 1.0) -> Tensor:
    """Times −1, or −`times`: at a gradient, the reversal layer of domain-adversarial training."""
    return value * -times


@ready
def at(value: Tensor, index: Any, change: Any, site: Site | None = None) -> Tensor:
    """A change at some positions only: `at((slice(None), 5), zero())` is `value[:, 5] = 0` on a copy."""
    out, part = value.clone(), value[index]
    new = change(part, site)
    if isinstance(new, Tensor) and (new.shape, new.dtype) != (part.shape, part.dtype):
        raise ValueError(f"at these positions it made {describe(new)} of {describe(part)}")
    out[index] = new
    return out


@ready
def in_turn(value: Tensor, changes: Any, site: Site | None = None) -> Tensor:
    """Several changes, one after the other; a list in place of a change means this."""
    for change in changes:
        value = change(value, site)
    return value


@ready
def any_shape(value: Tensor, change: Any, site: Site | None = None) -> Tensor:
    """A change whose result may have another shape or dtype than the value."""
    return change(value, site)


def _filled(value: Tensor, number: Number) -> Tensor:
    return value.masked_fill(torch.ones((), dtype=torch.bool, device=value.device), number)


def _instead(value: Tensor, other: Tensor) -> Tensor:
    """The other tensor, in memory of its own; the value keeps its place in the graph."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return other.clone(memory_format=torch.contiguous_format)
    return torch.where(torch.ones((), dtype=torch.bool, device=value.device), other, value)


def _at_least_float32(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _times(x: Tensor) -> str:
    return "×".join(map(str, x.shape)) or "scalar"


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


__all__ = sorted([*KINDS, "Change"])
