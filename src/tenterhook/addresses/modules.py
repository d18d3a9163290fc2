"""The modules, parameters and buffers of a model, by canonical names.

The parts that DDP, FSDP, torch.compile and checkpoint wrappers add to names never show. Modules in plain lists, tuples
and dicts, which `named_modules()` does not see, have names too (`layers.0`).
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
_MODULE_WRAPPERS = {"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"}
_TORCH_OWN = tuple(vars(nn.Module()))
_PLAIN_CONTAINERS = (list, tuple, dict)
_LONGEST_LIST = 10_000  # a longer plain list on a module holds data, not modules


def find(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The module with a name, written with wrapper parts or without, and the name without them."""
    module, parts = unwrap(model), []
    for part in () if name == "." else name.split("."):
        child = dict(module._modules.items()).get(part)  # a ScriptModule's is no dict
        if child is not None:
            parts.append(part)
            module = unwrap(child)
        elif part not in WRAPPER_PARTS:
            return None
    return ".".join(parts) or ".", module


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP, torch.compile and checkpoint wrappers."""
    while len(module._modules) == 1:
        ((part, child),) = module._modules.items()
        if part not in WRAPPER_PARTS or child is None:
            return module
        if part == "module" and _MODULE_WRAPPERS.isdisjoint(c.__name__ for c in type(module).__mro__):
            return module  # somebody's own module that happens to be called "module"
        module = child
    return module


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every canonical name that it has, parents first; modules in plain lists come last."""
    visited: set[int] = set()
    todo = [("", model)]
    for name, module in todo:  # which grows by modules in lists
        if id(module) not in visited:
            yield from _walk_from(name, unwrap(module), visited, todo)


def _walk_from(
    name: str, module: nn.Module, visited: set[int], in_lists: list[tuple[str, nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    stack: list[tuple[str, nn.Module, Any]] = [(name, module, None)]
    while stack:
        name, module, ancestors = stack.pop()
        if id(module) in visited and _is_among(module, ancestors):
            continue  # a child that holds its own parent: named once, never for ever
        visited.add(id(module))
        yield name or ".", module
        prefix = f"{name}." if name else ""
        chain = (module, ancestors)
        for part, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((prefix + part, child if len(child._modules) != 1 else unwrap(child), chain))
        for part, value in own_attributes(module):
            if type(value) in _PLAIN_CONTAINERS:
                in_lists.extend(_modules_in(prefix + part, value))


def own_attributes(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """What a module's class has put on it, beside what every module has."""
    attributes = vars(module)
    if tuple(islice(attributes, len(_TORCH_OWN))) == _TORCH_OWN:  # nearly always: torch's come first
        return islice(attributes.items(), len(_TORCH_OWN), None)
    return [(name, value) for name, value in attributes.items() if name not in _TORCH_OWN]


def _is_among(module: nn.Module, chain: Any) -> bool:
    while chain is not None:
        ancestor, chain = chain
        if ancestor is module:
            return True
    return False


def _modules_in(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a plain list, tuple or dict, and in those inside it."""
    if len(value) > _LONGEST_LIST:
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(child, nn.Module):
            yield f"{name}.{key}", child
        elif depth and type(child) in _PLAIN_CONTAINERS:
            yield from _modules_in(f"{name}.{key}", child, depth - 1)


def tensors_of(model: nn.Module, kind: str) -> Iterator[tuple[str, tuple[nn.Module, Tensor]]]:
    """Every parameter or buffer, by name, with the module that holds it."""
    for name, module in walk(model):
        prefix = "" if name == "." else f"{name}."
        for part, tensor in own_tensors(module, kind).items():
            if tensor is not None:
                yield prefix + part, (module, tensor)


def own_tensors(module: nn.Module, kind: str) -> dict[str, Any]:
    """The parameters or buffers of a module itself, by name."""
    table = module._parameters if kind == "parameter" else module._buffers
    return table if isinstance(table, dict) else dict(table.items())  # a ScriptModule's is no dict


def shape_of(tensor: Any) -> tuple[Any, ...]:
    """The shape of a parameter or buffer, which a lazy one does not have yet."""
    return ("?",) if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) else tuple(tensor.shape)
