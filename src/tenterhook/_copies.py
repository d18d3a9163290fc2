"""Copies of values inside a forward, one for each piece of memory.

A forward gives many names to one tensor and its views. Copied once each, they would take more than twice the memory and
time; here the later ones are views of the first copy, laid out as in the model. That is right only if nobody has
written into the memory in between. PyTorch counts what is written; what it does not know of is kept out: memory that
was there before the operation or that somebody else holds, what a function such as `empty` makes to be filled, and
anything at all once memory was handed out (`.data`, `.numpy()`). On a GPU, kernels of somebody's own write into
tensors without a word, so there every value is copied.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SMALL = 1 << 14  # bytes, which are copied in less time than it takes to ask
_MOST = 4096  # pieces of memory to know of, most of which are gone by then
_holders_of = torch._C._storage_Use_Count


class _Known:
    """A piece of memory that was copied whole: when, and the copy."""

    __slots__ = ("copy", "memory", "of_version", "version")

    def __init__(self, memory: torch.UntypedStorage, version: int, copy: Tensor) -> None:
        self.memory = StorageWeakRef(memory)  # so that its address stays its own
        self.version = version
        self.copy: Callable[[], Tensor | None] = weakref.ref(copy)
        self.of_version = copy._version


class Copies:
    """The copies of one session. It does not hold on to them."""

    new = 0  # the id of what the last operation has made

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def forget(self) -> None:
        """From here on, copy everything anew."""
        self._known.clear()

    def of(self, tensor: Tensor, is_new: bool) -> Tensor:
        """A copy of a tensor, without its graph."""
        with torch._C.DisableTorchFunction():  # our own session's would look at each of these
            tensor = tensor.detach()
            try:
                is_worth_it = tensor.is_cpu and tensor.nbytes >= _SMALL
                return self._of(tensor, is_new) if is_worth_it else tensor.clone()
            except (NotImplementedError, RuntimeError):  # sparse, nested, of inference mode, of a transform
                return tensor.clone()

    def _of(self, tensor: Tensor, is_new: bool) -> Tensor:
        memory, version = tensor.untyped_storage(), tensor._version
        known = self._known.get(memory._cdata)
        if tensor.is_conj() or tensor.is_neg():  # what is in memory is not yet the value
            return tensor.clone()
        if known is not None and known.version == version:
            copy = known.copy()
            if copy is not None and copy.dtype == tensor.dtype and copy._version == known.of_version:
                return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        copy = tensor.clone()
        is_whole = tensor.nbytes == memory.nbytes() and tensor.stride() == copy.stride()
        # Held by the tensor, by its twin without a graph and by `memory`; or found so before.
        is_fresh = is_new and _holders_of(memory._cdata) == 3
        if is_whole and (is_fresh or known is not None):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[memory._cdata] = _Known(memory, version, copy)
        return copy
