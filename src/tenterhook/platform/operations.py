"""Torch's operations: where their names are, and what calls of `torch.ops` are.

Relies on: `torch._C._linalg`, `_special`, `_fft`, `_nn` and `_sparse` have the functions of torch.linalg and the like;
`torch.ops.aten.add` is an `OpOverloadPacket` and `torch.ops.aten.add.Tensor` an `OpOverload`, with a `namespace` and
a `_schema`: its `name` (`aten::add`), whether it `is_mutable`, and `arguments`, whose `alias_info` tells those that are
written into.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional

_NATIVE = tuple(getattr(torch._C, f"_{name}") for name in ("linalg", "special", "fft", "nn", "sparse"))
SPACES: tuple[Any, ...] = (Tensor, torch, functional, *_NATIVE)  # where functions are named after operations
OVERLOADS = (OpOverload, OpOverloadPacket)


def name_of(operation: Any) -> str:
    """What an operation is called, without the underscore of those that work in place."""
    name = operation._schema.name.split("::")[-1]
    return str(name[:-1] if name.endswith("_") and not name.endswith("__") else name)


def writes(operation: Any) -> bool:
    """Whether it writes into something that it is given."""
    return bool(operation._schema.is_mutable)


def written_by(operation: Any, args: Sequence[Any]) -> list[Any]:
    """Those arguments that it writes into."""
    kinds = operation._schema.arguments
    return [
        one for one, kind in zip(args, kinds, strict=False) if kind.alias_info is not None and kind.alias_info.is_write
    ]
