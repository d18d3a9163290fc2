"""FSDP2 and DTensor: the sharded parameter behind a name, and the part of it that this rank holds.

A module under `fully_shard` holds its sharded parameter most of the time, and the gathered one while it runs or
after an evaluation. The optimizer and `.grad` belong to the sharded one, so that is what a name means.

Relies on: a module under `fully_shard` has `_get_fsdp_state()`, with one `_fsdp_param_group` in torch 2.11 or several
`_fsdp_param_groups` from 2.13 on, whose `fsdp_params` have a `sharded_param` and a `_module_info` (the modules and the
names of the parameter there); a DTensor has the tensor of its rank as `_local_tensor`.
"""

import sys
from typing import Any

from torch import Tensor, nn


def sharded_parameters(model: nn.Module) -> dict[tuple[int, str], Tensor]:
    """Every sharded parameter, by the id of its module and its name there; empty where FSDP2 is not in use."""
    found: dict[tuple[int, str], Tensor] = {}
    if "torch.distributed.fsdp" not in sys.modules:
        return found
    for module in model.modules():
        for parameter in _managed(module):
            info = parameter._module_info
            names = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            found.update({(id(owner), name): parameter.sharded_param for owner, name in names})
    return found


def is_sharded(module: nn.Module) -> bool:
    """Whether a module shares its parameters out to processes: FSDP, in either version, or DTensors."""
    if hasattr(module, "_get_fsdp_state"):
        return True
    if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
        return True
    return any(local_part(one) is not None for one in module._parameters.values())


def local_part(tensor: Tensor | None) -> Tensor | None:
    """Of a DTensor: what this rank holds. None for other tensors."""
    return getattr(tensor, "_local_tensor", None)


def _managed(module: nn.Module) -> list[Any]:
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return []
    state = state_of()  # one group in torch 2.11, several from 2.13
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]
