"""Another value in a parameter or buffer, for a while.

Blocks may end in another order than they began, as generators and threads do: the value from before all of them comes
back when the last one ends. That is why the swaps that are in force know of each other.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

_lock = threading.RLock()  # a change may be a function that edits other parameters
_in_force: "list[Swap]" = []


class Swap:
    """One tensor with another value in it."""

    backup: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.memory = _memory(tensor)

    def put(self, change: Callable[[Tensor], Tensor | None]) -> None:
        """Write what a change makes of the value into the tensor; None leaves it.

        Autograd notices: it is no longer what a graph may have saved.
        """
        if self.tensor.is_meta:
            raise RuntimeError("it is on the meta device and has no values; move the model first")
        with _lock:
            if any(swap.tensor is not self.tensor and swap._overlaps(self.memory) for swap in _in_force):
                what = "it shares its memory with another parameter or buffer that is being edited"
                raise RuntimeError(f"{what}; edit one of them, or make them one tensor")
            self.backup = self.tensor.detach().clone()
            value = change(self.backup)
            if value is not None and value.requires_grad:
                what = "it is changed once, on entering, so no gradient could reach the tensors that this change uses"
                raise RuntimeError(f"{what}; edit the output of the module instead")
            self.value = self.backup if value is None else value
            self._write(self.value)
            _in_force.append(self)

    def put_back(self, table: dict[str, Tensor], name: str) -> bool:
        """Undo `put`, also where another tensor was put under that name since. Whether anybody else had changed it."""
        with _lock:
            if self not in _in_force:
                return False
            place = _in_force.index(self)
            del _in_force[place]
            later = [swap for swap in _in_force[place:] if swap.tensor is self.tensor]
            if later:  # it will put back what was there before us
                later[0].backup = self.backup
                return False
            was_replaced = table.get(name, self.tensor) is not self.tensor
            was_changed = not _are_equal(self.tensor.detach(), self.value)
            if was_replaced:
                table[name] = self.tensor
            self._write(self.backup)
            return was_replaced or was_changed

    def _overlaps(self, memory: tuple[int, int, int]) -> bool:
        (ours, start, end), (storage, first, last) = self.memory, memory
        return ours == storage != 0 and start < last and first < end

    def _write(self, value: Tensor) -> None:
        with torch.inference_mode() if self.tensor.is_inference() else torch.no_grad():
            self.tensor.copy_(value)
        torch.clear_autocast_cache()


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    """Where its storage is, 0 if that is not known, and from which byte to which of it the tensor goes."""
    try:
        storage, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
    except (NotImplementedError, RuntimeError):  # sparse, or a tensor that is made of others
        return 0, 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    size = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    return storage, start * tensor.itemsize, (start + size) * tensor.itemsize


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
