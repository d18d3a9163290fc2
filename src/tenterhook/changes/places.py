"""Ready-made places for `at(...)`, and what an index means in a value."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, repr=False)
class head:
    """The k-th of several heads, which lie side by side in the last dimension: `at(head(3, of=12), zero)`."""

    k: int
    of: int

    def __post_init__(self) -> None:
        if not (isinstance(self.k, int) and isinstance(self.of, int) and -self.of <= self.k < self.of):
            raise ValueError(f"{self!r}: a head is a whole number from 0 to one less than how many there are")

    def __repr__(self) -> str:
        return f"head({self.k!r}, of={self.of!r})"

    def index(self, value: Tensor) -> Any:
        """Where that is in a value."""
        width = value.shape[-1] if value.dim() else 0
        size, rest = divmod(width, self.of)
        if not size or rest:
            raise ValueError(f"{self}: the last dimension of {'×'.join(map(str, value.shape))} is not {self.of} heads")
        start = self.k % self.of * size
        return (..., slice(start, start + size))


def token(k: Any) -> Any:
    """The k-th token (or those of a list or slice) of every row: `value[:, k]`."""
    return (slice(None), k)


def index_in(value: Tensor, index: Any) -> Any:
    """An index as tensors take it."""
    return index.index(value) if isinstance(index, head) else index
