"""Another value in a parameter or buffer, for a while.

Blocks may end in another order than they began, as generators and threads do: the value from before all of them comes
back when the last one ends. That is why the swaps that are in force know of each other.
"""

import threading

import torch
from torch import Tensor

_lock = threading.Lock()
_in_force: "list[Swap]" = []


class Swap:
    """One tensor with another value in it."""

    backup: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def put(self, value: Tensor | None) -> None:
        """Write the other value into the tensor. Autograd notices: it is no longer what a graph may have saved."""
        if value is not None and value.requires_grad:
            what = "it is changed once, on entering, so no gradient could reach the tensors that this change uses"
            raise RuntimeError(f"{what}; edit the output of the module instead")
        with _lock:
            self.backup = self.tensor.detach().clone()
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
            was_changed = not torch.equal(self.tensor.detach(), self.value)
            if was_replaced:
                table[name] = self.tensor
            self._write(self.backup)
            return was_replaced or was_changed

    def _write(self, value: Tensor) -> None:
        with torch.inference_mode() if self.tensor.is_inference() else torch.no_grad():
            self.tensor.copy_(value)
        torch.clear_autocast_cache()
