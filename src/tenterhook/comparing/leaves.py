"""Which tensor of one structured value is the partner of which tensor of another."""

from typing import Any

from torch import Tensor

from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Path, leaves, rebuild_live, shape_of

Pairs = dict[Path, tuple[Path, Tensor]]  # by the path in b: the path and the tensor in a


def tensors_of(value: Any) -> dict[Path, Tensor]:
    """The tensors of a value, by path; arguments by name, however they were passed."""
    found = dict(leaves(value))
    if isinstance(value, Inputs):
        return {(_argument(value, path[0]), *path[1:]): tensor for path, tensor in found.items()}
    return found


def partners(a: dict[Path, Tensor], b: dict[Path, Tensor]) -> tuple[Pairs, list[Path], list[Path]]:
    """The pairs, by the same path, else by shape and order; and what is left of a and of b."""
    pairs: Pairs = {path: (path, a[path]) for path in b if path in a}
    left = [path for path in a if path not in pairs]
    if len(a) == len(b) == 1 and left:  # whatever they are in
        (path,) = b
        return {path: (left[0], a[left[0]])}, [], []
    for path, tensor in b.items():
        if path in pairs:
            continue
        like = next((p for p in left if shape_of(a[p]) == shape_of(tensor)), None)
        if like is not None:
            left.remove(like)
            pairs[path] = (like, a[like])
    return {path: pairs[path] for path in b if path in pairs}, left, [path for path in b if path not in pairs]


def with_tensors(value: Any, new: dict[Path, Tensor]) -> Any:
    """A value with other tensors at some paths, as `tensors_of` names them."""

    def change(path: Path, tensor: Tensor) -> Tensor:
        named = (_argument(value, path[0]), *path[1:]) if isinstance(value, Inputs) else path
        return new.get(named, tensor)

    return rebuild_live(value, change)


def _argument(inputs: Inputs, key: int | str) -> int | str:
    return inputs.names[key] if isinstance(key, int) and key < len(inputs.names) else key
