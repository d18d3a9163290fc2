"""Conditions under which one model may be compared with itself: `compare(model, x, under=in_dtype(torch.bfloat16))`."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.comparing.states import Cell
from tenterhook.values.tree import can_have_gradient, leaves, rebuild_live

TF32 = 2.0**-10
_ROUNDING = "rounding alone"


def twin(model: nn.Module) -> nn.Module:
    """A copy that has the same parameters, and buffers of its own."""
    shared = {id(p): p for p in model.parameters()}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        what = f"this model cannot be copied ({type(error).__name__}: {error})"
        raise TypeError(f"{what}; make the other one yourself, and compare(a, b, inputs)") from error


@dataclass(frozen=True)
class Condition:
    """What is different for b."""

    name: str
    expects: str = _ROUNDING  # what may differ, in words
    model: Callable[[nn.Module], nn.Module] = twin
    inputs: Callable[[Any], Any] = lambda inputs: inputs
    cells: tuple[tuple[Cell, Any], ...] = ()  # settings of the process, and what they are for b
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    eps: float = 0.0  # the precision of what is computed, where the dtype does not say it
    view: Callable[[Tensor, Tensor], Tensor] | None = None  # the part of a value of a that b has, too
    same_random: bool = True
    compiles: Callable[[nn.Module], Any] | None = None

    def __str__(self) -> str:
        return self.name


def in_dtype(dtype: torch.dtype) -> Condition:
    """The model, and what it is given, in another dtype."""

    def cast(inputs: Any) -> Any:
        return rebuild_live(inputs, lambda _, t: t.to(dtype) if t.is_floating_point() else t)

    name = str(dtype).removeprefix("torch.")
    return Condition(f"in {name}", model=lambda m: copy.deepcopy(m).to(dtype), inputs=cast)


def on_device(device: torch.device | str) -> Condition:
    """The model on another device."""

    def move(inputs: Any) -> Any:
        return rebuild_live(inputs, lambda _, t: t.to(device))

    return Condition(f"on {device}", model=lambda m: copy.deepcopy(m).to(device), inputs=move)


def autocast(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Condition:
    """Under torch.autocast."""
    name = f"autocast to {str(dtype).removeprefix('torch.')}"
    return Condition(name, around=lambda: torch.autocast(device, dtype), eps=torch.finfo(dtype).eps)


def matmul_precision(precision: str) -> Condition:
    """With torch.set_float32_matmul_precision."""
    cell = Cell(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    eps = {"highest": 0.0, "high": TF32, "medium": 2.0**-7}[precision]
    return Condition(f"float32 matmul precision {precision}", cells=((cell, precision),), eps=eps)


def deterministic(on: bool = True) -> Condition:
    """With torch.use_deterministic_algorithms."""
    cell = Cell(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms)
    return Condition(f"deterministic algorithms {'on' if on else 'off'}", cells=((cell, on),))


def threads(many: int) -> Condition:
    """With another number of threads."""
    return Condition(f"{many} threads", cells=((Cell(torch.get_num_threads, torch.set_num_threads), many),))


def attention(implementation: str) -> Condition:
    """A model of transformers with another implementation of attention: "eager", "sdpa" …"""

    def change(model: nn.Module) -> nn.Module:
        if not hasattr(model, "set_attn_implementation"):
            raise TypeError(f"{type(model).__name__} has no set_attn_implementation; it is no model of transformers")
        other = twin(model)
        other.set_attn_implementation(implementation)  # type: ignore[operator]
        return other

    return Condition(f"attention {implementation}", model=change)


def training(on: bool = True) -> Condition:
    """In train mode (or eval mode)."""
    what = "dropout and batch norm" if on else "what was in train mode before"
    return Condition("train mode" if on else "eval mode", what, model=lambda m: twin(m).train(on))


def seed(number: int) -> Condition:
    """With other random numbers."""

    def go_on(state: Tensor | None) -> None:
        if state is None:
            torch.manual_seed(number)
        else:
            torch.set_rng_state(state)

    cell = Cell(torch.get_rng_state, go_on)
    return Condition(f"seed {number}", "whatever draws random numbers", cells=((cell, None),), same_random=False)


def batch_of(rows: int = 1) -> Condition:
    """With the first rows of the batch alone."""

    def first(inputs: Any) -> Any:
        sizes = {t.shape[0] for _, t in leaves(inputs) if t.dim()}
        if not sizes or max(sizes) <= rows:
            raise ValueError(f"batch_of({rows}) needs inputs with more than {rows} rows")
        most = max(sizes)
        return rebuild_live(inputs, lambda _, t: t[:rows] if t.dim() and t.shape[0] == most else t)

    name = "the first row of the batch" if rows == 1 else f"the first {rows} rows of the batch"
    return Condition(name, inputs=first, view=partial(_first_rows, rows))


def _first_rows(rows: int, a: Tensor, b: Tensor) -> Tensor:
    """The rows of a that b has; where rows and something else are one dimension, its first part."""
    if a.dim() != b.dim() or not a.dim() or a.shape[1:] != b.shape[1:] or a.shape[0] <= b.shape[0]:
        return a
    return a[: b.shape[0]]


def as_condition(under: Any) -> Condition:
    """What `under` means."""
    if isinstance(under, Condition):
        return under
    if isinstance(under, torch.dtype):
        return in_dtype(under)
    if isinstance(under, torch.device):
        return on_device(under)
    if under is torch.compile or getattr(under, "func", None) is torch.compile:
        return Condition("torch.compile", compiles=under)
    if callable(under):
        name = getattr(under, "__name__", "another model")
        return replace(Condition(name, "what it changes"), model=lambda m: under(twin(m)))
    raise TypeError(
        f"under is a condition of tenterhook.comparing, a dtype, a device, torch.compile, or a function that "
        f"changes the model; got {under!r}"
    )


def float64(model: nn.Module) -> nn.Module:
    """A copy that computes in float64."""
    return copy.deepcopy(model).double()


def double(inputs: Any) -> Any:
    """Inputs in float64."""
    return rebuild_live(inputs, lambda _, t: t.double() if can_have_gradient(t) and not t.is_complex() else t)
