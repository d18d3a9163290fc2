"""The loss whose gradients `compare(grad=True)` compares, and what a caller may get wrong about it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tenterhook.values.tree import describe


class WrongCallError(TypeError):
    """What the caller gave makes no sense: no difference between the models."""


def loss_of(loss: Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor]:
    """The loss of what a model gives: `loss`, or the output's own."""

    def own(output: Any) -> Any:
        return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)

    def checked(output: Any) -> Tensor:
        try:
            tensor = (loss or own)(output)
        except Exception as error:
            what = f"loss= raised {type(error).__name__} for an output that is {describe(output)}: {error}"
            raise WrongCallError(what) from error
        if isinstance(tensor, Tensor) and tensor.numel() == 1 and tensor.requires_grad:
            return tensor
        if loss is None:
            what = f"grad=True needs a loss, and the output has none, it is {describe(output)}"
            raise WrongCallError(f"{what}; pass loss=lambda output: ...")
        if isinstance(tensor, Tensor) and tensor.numel() == 1:
            raise WrongCallError("what loss= gives depends on nothing that requires a gradient")
        raise WrongCallError(f"loss= must give a tensor with one number; it gave {describe(tensor)}")

    return checked
