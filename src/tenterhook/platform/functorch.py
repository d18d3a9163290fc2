"""Tensors inside vmap or grad of torch.func, which have no values to read.

Relies on: `torch._C._functorch.is_functorch_wrapped_tensor`.
"""

import torch

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
