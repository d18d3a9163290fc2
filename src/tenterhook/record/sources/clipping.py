"""How gradients are clipped, and with which probability values are dropped, in sampled steps."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tenterhook.record.guard import Guard, guarded
from tenterhook.record.measuring import Measuring

_MOST = 64  # gradients that are looked at


class Dropouts:
    """Notes with which probability dropout is called, and behind which module."""

    def __init__(self, guard: Guard, measuring: Measuring) -> None:
        self.guard, self._measuring = guard, measuring

    def called(self, args: Any, kwargs: Any) -> None:
        """Dropout is called with these."""
        if not self._measuring.sampled or not self.guard.on or not torch.is_grad_enabled():
            return
        p, training = _given(args, kwargs, 1, "p", 0.5), _given(args, kwargs, 2, "training", True)
        if training is True and isinstance(p, float | int):
            self._measuring.micro.sample.dropouts.setdefault(self._measuring.micro.sample.last or "", float(p))


class Clipping:
    """Notes how much the gradients are clipped."""

    def __init__(self, guard: Guard, measuring: Measuring) -> None:
        self.guard, self._measuring = guard, measuring

    @guarded
    def begins(self, function: str, args: Any, kwargs: Any) -> None:
        """Gradients are about to be clipped: of their values, the share that is beyond the limit."""
        limit = _limit(args, kwargs)
        if function != "clip_grad_value_" or not self._measuring.sampled or limit is None:
            return
        parameters = _given(args, kwargs, 0, "parameters", ())
        each = [parameters] if isinstance(parameters, Tensor) else parameters
        grads = [p.grad for p in each if p.grad is not None][:_MOST]
        if grads and all(type(grad) is Tensor and grad.layout is torch.strided for grad in grads):
            with torch.no_grad():
                shares = [(grad.abs() > limit).double().mean().to(grads[0].device) for grad in grads]
                self._measuring.micro.scalars.add(("clip", "value", limit), torch.stack(shares).mean())

    @guarded
    def ends(self, function: str, args: Any, kwargs: Any, result: object) -> None:
        """They have been: how large their norm was, by the limit."""
        limit = _limit(args, kwargs)
        if function == "clip_grad_norm_" and self._measuring.sampled and limit and type(result) is Tensor:
            self._measuring.micro.scalars.add(("clip", "norm", limit), result.detach() / limit)


def listed(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same arguments, with the parameters in a list."""
    if args:
        return (_as_list(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "parameters": _as_list(kwargs["parameters"])} if "parameters" in kwargs else kwargs


def _as_list(parameters: Any) -> Any:
    return list(parameters) if isinstance(parameters, Iterator) else parameters


def _limit(args: Any, kwargs: Any) -> float | None:
    limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
    return float(limit) if isinstance(limit, float | int) else None


def _given(args: Any, kwargs: Any, at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)
