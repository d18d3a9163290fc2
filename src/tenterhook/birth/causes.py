"""Why an operation made a value that is not finite: only what its inputs show.

Each rule looks at the inputs of one kind of operation where the output is bad, and says what it saw or None.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook.birth.made import is_checked, where_true

Look = Callable[[Tensor], Tensor]  # which elements of an input


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: what it was given, before it wrote into any of it, and what it made."""

    operation: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: Sequence[Any]
    output: Tensor  # the bad one
    function: Callable[..., Any]  # the operation itself

    @property
    def bad(self) -> Tensor:
        """Which elements are not finite."""
        return ~self.output.isfinite()

    def where(self, wrong: Tensor) -> str | None:
        """Where inputs are wrong and the output is bad; None where that is nowhere."""
        wrong = wrong.expand(self.bad.shape) if _fits(wrong, self.bad) else wrong
        both = wrong & self.bad if wrong.shape == self.bad.shape else wrong
        return f"at {where_true(both)}" if bool(both.any()) else None


def _fits(small: Tensor, large: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(small.shape, large.shape) == large.shape
    except RuntimeError:
        return False


def why(case: Case) -> str:
    """What the inputs show of the reason; empty where they show nothing."""
    for rule in (_out_of_domain, _SPECIAL.get(case.operation), _of_infinities, _too_large):
        with contextlib.suppress(Exception):  # an operation with other arguments than in the torch that we know
            if rule is not None and (text := rule(case)):
                return text
    return ""


# What one argument must not be: which argument, what is wrong with it, in words.
_DOMAINS: dict[str, tuple[tuple[int, Look, str], ...]] = {
    **dict.fromkeys(
        ("log", "log2", "log10"), ((0, lambda x: x < 0, "{} of a negative number"), (0, lambda x: x == 0, "{} of 0"))
    ),
    "log1p": ((0, lambda x: x < -1, "log1p of a number below -1"), (0, lambda x: x == -1, "log1p of -1")),
    "sqrt": ((0, lambda x: x < 0, "sqrt of a negative number"),),
    "rsqrt": ((0, lambda x: x < 0, "rsqrt of a negative number"), (0, lambda x: x == 0, "rsqrt of 0, which is 1 / 0")),
    "reciprocal": ((0, lambda x: x == 0, "division by zero"),),
    **dict.fromkeys(("remainder", "fmod"), ((1, lambda x: x == 0, "remainder of a division by zero"),)),
    **dict.fromkeys(("acos", "asin"), ((0, lambda x: x.abs() > 1, "{} of a number that is not between -1 and 1"),)),
    "acosh": ((0, lambda x: x < 1, "acosh of a number below 1"),),
    **dict.fromkeys(("atanh", "erfinv"), ((0, lambda x: x.abs() >= 1, "{} of a number that is not between -1 and 1"),)),
    "logit": ((0, lambda x: (x <= 0) | (x >= 1), "logit of a number that is not between 0 and 1"),),
    **dict.fromkeys(
        ("lgamma", "digamma"), ((0, lambda x: (x <= 0) & (x == x.floor()), "{} of 0 or a negative integer"),)
    ),
    "xlogy": ((1, lambda x: x < 0, "log of a negative number"), (1, lambda x: x == 0, "log of 0")),
    "binary_cross_entropy": ((0, lambda x: (x < 0) | (x > 1), "a probability that is not between 0 and 1"),),
}


def _out_of_domain(case: Case) -> str | None:
    for which, wrong, words in _DOMAINS.get(case.operation, ()):
        x = _number(case, which)
        if x is not None and (place := case.where(wrong(x))):
            return f"{words.format(case.operation)} {place}"
    return None


def _number(case: Case, which: int) -> Tensor | None:
    """An argument as a tensor; None where there is none, or it is no number."""
    value = case.args[which] if which < len(case.args) else None
    if isinstance(value, Tensor):
        return None if value.is_complex() else value
    if not isinstance(value, int | float):
        return None
    return torch.tensor(value, dtype=torch.float64, device=case.output.device)


def _division(case: Case) -> str | None:
    above, below = _number(case, 0), _number(case, 1)
    if above is None or below is None:
        return None
    if place := case.where((above == 0) & (below == 0)):
        return f"0 / 0 {place}"
    if place := case.where(below == 0):
        return f"division by zero {place}"
    if place := case.where(above.isinf() & below.isinf()):
        return f"inf / inf {place}"
    return None


def _power(case: Case) -> str | None:
    base, exponent = _number(case, 0), _number(case, 1)
    if base is None or exponent is None:
        return None
    if place := case.where((base == 0) & (exponent < 0)):
        return f"0 to a negative power {place}"
    if place := case.where((base < 0) & (exponent != exponent.round())):
        return f"a negative number to a power that is no integer {place}"
    return None


def _softmax(case: Case) -> str | None:
    x, dim = case.args[0], case.args[1]
    if place := case.where((x == -torch.inf).all(dim, keepdim=True)):
        return f"softmax over a row that is -inf throughout, as when a mask hides all of it, {place}"
    if place := case.where((x == torch.inf).any(dim, keepdim=True)):
        return f"softmax over a row with +inf in it {place}"
    return None


def _attention(case: Case) -> str | None:
    for mask in (*case.args, *case.kwargs.values()):
        if isinstance(mask, Tensor) and mask.dim() >= 2 and mask is not case.args[0]:
            hidden = (mask == -torch.inf).all(-1) if mask.is_floating_point() else None
            if hidden is not None and bool(hidden.any()):
                return f"attention with a row of the mask that is -inf throughout, at {where_true(hidden)}"
    return None


def _normalisation(case: Case) -> str | None:
    for inverse in case.outputs[1:]:
        if is_checked(inverse) and bool((inverse == torch.inf).any()):
            return "normalisation of values that are all the same, with an eps of 0: 0 / 0"
    variance = case.args[4] if len(case.args) > 4 else None  # of a batch norm in eval mode
    eps = next((one for one in reversed(case.args) if isinstance(one, float)), 0.0)
    if isinstance(variance, Tensor) and bool((variance + eps <= 0).any()):
        return f"normalisation with a running variance of 0 or below, at {where_true(variance + eps <= 0)}"
    return _squares(case.args[0])


def _squares(x: Tensor) -> str | None:
    """Whether the squares of finite values, which are added up in float32 at least, are more than that can hold."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    most, limit = x.detach().double().abs().max().item(), torch.finfo(dtype).max
    if not most > math.sqrt(limit / x.numel()) or most == math.inf:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"overflow: it adds up squares of values up to {most:.4g}, more than {name} can hold ({limit:.6g})"


def _spread(case: Case) -> str | None:
    x = case.args[0]
    dims = case.args[1] if len(case.args) > 1 else None
    dims = range(x.dim()) if not dims else [dims] if isinstance(dims, int) else dims
    many = 1
    for dim in dims:
        many *= x.shape[dim]
    correction = case.kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    if many <= correction:
        values = "one value" if many == 1 else f"{many} values"
        return f"the {case.operation} of {values}: it divides by {many} - {correction}"
    return None


def _average(case: Case) -> str | None:
    return "the mean of no values: 0 / 0" if case.args[0].numel() == 0 else None


def _likelihood(case: Case) -> str | None:
    weight = case.outputs[1] if len(case.outputs) > 1 else None
    if isinstance(weight, Tensor) and weight.numel() == 1 and weight.item() == 0:
        ignored = case.args[4] if len(case.args) > 4 else None
        if case.args[1].numel() == 0:
            return "a mean over no targets: 0 / 0"
        if bool((case.args[1] == ignored).all()):
            return f"a mean over no targets: all {case.args[1].numel():,} are ignored ({ignored})"
    return None


def _cast(case: Case) -> str | None:
    source = case.args[0]
    if source.shape != case.output.shape or not bool((source.isfinite() & case.bad).any()):
        return None
    return _overflow(case, source.double())


_NORMS = ("native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm", "_native_batch_norm_legit")
_SPECIAL: dict[str, Callable[[Case], str | None]] = {
    **dict.fromkeys(("div", "true_divide", "divide"), _division),
    **dict.fromkeys(("pow", "float_power"), _power),
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), _softmax),
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"), _attention
    ),
    **dict.fromkeys((*_NORMS, "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_with_update"), _normalisation),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _spread),
    "mean": _average,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _likelihood),
    **dict.fromkeys(("_to_copy", "to", "copy"), _cast),
}


_SIGNS = {"add": 1, "sub": -1, "rsub": -1}


def _of_infinities(case: Case) -> str | None:
    """What infinite inputs made together."""
    tensors = [one for one in case.args if is_checked(one)]
    if not any(bool(one.isinf().any()) for one in tensors) or not bool(case.output.isnan().any()):
        return None
    a, b = _number(case, 0), _number(case, 1)
    if case.operation in _SIGNS and a is not None and b is not None:
        opposite = a.isinf() & b.isinf() & (a.sign() == -_SIGNS[case.operation] * b.sign())
        if place := case.where(opposite):
            return f"inf - inf {place}"
    if case.operation == "mul" and a is not None and b is not None:
        nothing = (a.isinf() & (b == 0)) | (b.isinf() & (a == 0))
        if place := case.where(nothing):
            return f"0 × inf {place}"
    return "its inputs have infinite values, and it makes NaN of them: inf - inf or 0 × inf"


def _too_large(case: Case) -> str | None:
    """Whether the same in float64 is finite, and larger than the type can hold."""
    if any(is_checked(one) and not bool(one.isfinite().all()) for one in case.args):
        return None
    try:
        exact = case.function(*map(_double, case.args), **{name: _double(one) for name, one in case.kwargs.items()})
    except Exception:  # not every operation is there for float64
        return None
    made = [one for one in (exact if isinstance(exact, tuple | list) else (exact,)) if isinstance(one, Tensor)]
    which = next((i for i, one in enumerate(case.outputs) if one is case.output), 0)
    if which >= len(made) or made[which].shape != case.output.shape:
        return None
    return _overflow(case, made[which])


def _overflow(case: Case, exact: Tensor) -> str | None:
    dtype = case.output.dtype
    if dtype.is_complex or not bool(case.bad.any()):
        return None
    value, limit = exact[case.bad][0].item(), torch.finfo(dtype).max
    if value != value:
        return None
    if abs(value) <= limit:
        return "overflow of a value in between: the result itself would be finite"
    name = str(dtype).removeprefix("torch.")
    of = ""
    x = _number(case, 0)
    if case.operation in ("exp", "exp2", "expm1", "sinh", "cosh") and x is not None and x.shape == case.bad.shape:
        of = f"{case.operation} of {x[case.bad][0].item():.4g}: "
    exactly = f"{value:.4g}" if abs(value) != torch.inf else "it"
    return f"{of}{exactly} is more than {name} can hold ({limit:.6g}): overflow at {where_true(case.bad)}"


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return [_double(one) for one in value] if isinstance(value, list) else value
