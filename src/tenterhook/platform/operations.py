"""Torch's operations: where their names are, and what calls of `torch.ops` are.

Relies on: `torch._C._linalg`, `_special`, `_fft`, `_nn` and `_sparse` have the functions of torch.linalg and the like;
`torch.ops.aten.add` is an `OpOverloadPacket` and `torch.ops.aten.add.Tensor` an `OpOverload`.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional

_NATIVE = tuple(getattr(torch._C, f"_{name}") for name in ("linalg", "special", "fft", "nn", "sparse"))
SPACES: tuple[Any, ...] = (Tensor, torch, functional, *_NATIVE)  # where functions are named after operations
OVERLOADS = (OpOverload, OpOverloadPacket)
