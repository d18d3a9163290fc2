"""GradScaler: its scale, what it has scaled, and whether it has left out a step.

Relies on: `GradScaler._scale` is a tensor that it keeps; `scale(outputs)` gives what it was given, times that;
`_maybe_opt_step(optimizer, state, …)` steps unless one of `state["found_inf_per_device"]` is set; nodes of a graph have
`metadata`.
"""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

_NEAR = 50  # nodes to look at
_KEY = "tenterhook.scale"  # in the metadata of a node


def scaler_classes() -> list[Any]:
    """GradScaler and its subclasses: that for FSDP has a scale() of its own."""
    classes: list[Any] = [GradScaler]
    for one in classes:
        classes += one.__subclasses__()
    return classes


def scale_of(scaler: Any) -> Tensor | None:
    """The scale that a scaler uses, if it does."""
    scale = getattr(scaler, "_scale", None)
    return scale if scale is not None and scaler.is_enabled() else None


def has_overflowed(state: Any) -> bool:
    """Whether gradients had; torch has read these numbers just before, so nobody waits for them."""
    found = state.get("found_inf_per_device", {}) if isinstance(state, dict) else {}
    return any(one.item() for one in found.values())


def note_scale(output: Any, scale: Tensor) -> None:
    """Have the graph know that something was scaled: that lasts as long as it does, and goes where it goes."""
    for one in output if isinstance(output, list | tuple) else (output,):
        node: Any = getattr(one, "grad_fn", None)
        if node is not None:
            node.metadata[_KEY] = scale
        elif one is not output:
            note_scale(one, scale)


def noted_scale(outputs: Iterable[Any]) -> Tensor | None:
    """With which scale a GradScaler has scaled something, or what was made of that: it is not far."""
    nodes: list[Any] = [getattr(one, "grad_fn", None) for one in outputs]
    for node in nodes:
        if node is not None and _KEY in node.metadata:
            return cast(Tensor, node.metadata[_KEY])
        if node is not None and len(nodes) < _NEAR:
            nodes += [one for one, _ in node.next_functions]
    return None
