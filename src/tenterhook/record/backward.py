"""What a backward pass was called on, found from inside it, without patching anything."""

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import graph

_ENGINE = graph._engine_run_backward.__code__
# What a loss passes through on its way to backward(): scaling, the division by the number of micro-batches, a sum.
_AROUND = ("MulBackward0", "DivBackward0", "ToCopyBackward0", "AddBackward0", "MeanBackward0", "AliasBackward0")
_SCALE = "tenterhook.scale"  # in the metadata of a node
_NEAR = 50  # nodes to look at


def outermost_backward() -> FrameType | None:
    """The frame in which the backward pass that runs now was started; on a GPU that is in another thread."""
    here = _engine_frame(sys._getframe(1))
    if here is not None:
        return here
    for frame in sys._current_frames().values():
        if frame.f_code is _ENGINE:  # the thread that waits for the engine
            return _engine_frame(frame)
    return None


def _engine_frame(frame: FrameType | None) -> FrameType | None:
    found = None
    while frame is not None:
        if frame.f_code is _ENGINE:
            found = frame  # a checkpoint can have started one inside another
        frame = frame.f_back
    return found


def asked_for(frame: FrameType, scales: bool) -> tuple[bool, Tensor | None, Tensor | None]:
    """Whether a backward pass is one of autograd.grad(), as for a penalty; if not, the scalar that it was called on.

    Of several it is their sum, for that is what the gradient is of. And its scale, if it was scaled: `scales` tells
    whether anything was.
    """
    values = frame.f_locals  # of torch's own function, which is over soon
    if not values.get("kwargs", {}).get("accumulate_grad", True):
        return True, None, None
    outputs = values.get("t_outputs", ())
    scale = _scale_of(outputs) if scales else None
    for one in outputs:
        if not isinstance(one, Tensor) or one.numel() != 1 or one.is_complex():
            return False, None, scale
    if len(outputs) == 1:
        return False, outputs[0], scale
    if any(one.device != outputs[0].device for one in outputs):
        return False, None, scale
    return False, torch.stack([one.detach().view(()) for one in outputs]).sum(), scale


def note_scale(output: Any, scale: Tensor) -> None:
    """Have the graph know that something was scaled: that lasts as long as it does, and goes where it goes."""
    for one in output if isinstance(output, list | tuple) else (output,):
        node: Any = getattr(one, "grad_fn", None)
        if node is not None:
            node.metadata[_SCALE] = scale
        elif one is not output:
            note_scale(one, scale)


def _scale_of(outputs: Iterable[Any]) -> Tensor | None:
    """With which scale a GradScaler has scaled something, or what was made of that: it is not far."""
    nodes: list[Any] = [getattr(one, "grad_fn", None) for one in outputs]
    for node in nodes:
        if node is not None and _SCALE in node.metadata:
            return cast(Tensor, node.metadata[_SCALE])
        if node is not None and len(nodes) < _NEAR:
            nodes += [one for one, _ in node.next_functions]
    return None


def classes_of(loss: Tensor) -> int | None:
    """Over how many classes this loss is a mean cross entropy, if it is one."""
    node: Any = loss.grad_fn
    while node is not None and node.name() in _AROUND:
        following = [one for one, _ in node.next_functions if one is not None]
        if len(following) != 1:
            return None
        node = following[0]
    if node is None or not node.name().startswith("NllLoss"):
        return None
    try:
        (shape,) = (before._input_metadata[0].shape for before, _ in node.next_functions[:1])
        return int(shape[1 if len(shape) > 1 else 0]) if node._saved_reduction == 1 else None
    except (AttributeError, RuntimeError, IndexError, ValueError):
        return None
