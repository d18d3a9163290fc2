"""One operation on each tensor of a list, in one kernel on a GPU.

Relies on: `torch._foreach_sub`, `_foreach_mul` and `_foreach_norm`, which take lists and give lists.
"""

import torch

foreach_sub = torch._foreach_sub
foreach_mul = torch._foreach_mul
foreach_norm = torch._foreach_norm
