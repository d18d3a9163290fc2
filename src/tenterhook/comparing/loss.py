"""The loss whose gradients `compare(grad=True)` compares, and what a caller may get wrong about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tenterhook.comparing.following import Found
from tenterhook.comparing.in_turn import Parameter
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


def without_gradient(found: Sequence[Found], parameters: Sequence[Parameter]) -> list[str]:
    """A note on the parameters that have got no gradient in either model; an error where no gradient came at all."""
    came = {one.key.name for one in found if one.key.role == "grad"}
    missing = [name for name, a, b in parameters if name not in came and a.requires_grad and b.requires_grad]
    if not any(one.key.role.startswith("grad") for one in found):
        what = "grad=True, and no gradient came: nothing that requires one leads to the loss"
        raise WrongCallError(f"{what}; in a checkpoint none comes with use_reentrant=True")
    more = f" … ({len(missing)} in all)" if len(missing) > 4 else ""
    return [f"without a gradient in both: {', '.join(missing[:4])}{more}"] if missing else []
