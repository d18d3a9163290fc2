"""Why a site stayed silent: the most likely reason, from what the model's own code says.

A module's hook fires only when the module is called. Its parent's bytecode shows the usual ways around that:
`self.fc.forward(x)`, and `F.linear(x, self.fc.weight)` where a fused kernel takes the weights.
"""

import types
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from tenterhook.addresses.modules import find
from tenterhook.addresses.sites import Site
from tenterhook.platform.assembler import Assembly
from tenterhook.platform.bytecode import loads

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_LOADS = (*_ATTRIBUTES, "LOAD_FAST")
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_OP")


def why_never_called(model: nn.Module | None, site: Site, something_ran: bool = True) -> str:
    """Why no call of a module was seen; `something_ran`: others of the model's were called."""
    module = site.module
    if module is None or model is None:
        return "the model is gone"
    if is_container(module) and not _goes_around(module):
        return f"a {type(module).__name__} is a container that is never called; ask for its children"
    parent, name, is_in_list = _caller(model, site.address.name)
    around = _way_around(parent, module, name, is_in_list)
    if around and not something_ran:
        return f"no call was seen at any address of this session; if the model ran in it: {around}"
    if around or parent is None or parent is module:
        return around or "it was not called inside this session"
    return f"not reached: {type(parent).__name__} did not call it inside this session"


def _way_around(parent: nn.Module | None, module: nn.Module, name: str, is_in_list: bool) -> str:
    """How the model's code goes around the hooks of a module, if it does."""
    if _goes_around(module):
        return f"{type(module).__name__} has a __call__ of its own, which goes around hooks; they belong in forward"
    if parent is None or parent is module:
        return ""
    where = type(parent).__name__
    if isinstance(parent, torch.jit.ScriptModule):
        return f"{where} runs as TorchScript, which calls no Python hooks"
    reads = {attribute for code in _methods(parent) for attribute in _reads(code, name, is_in_list)}
    if "forward" in reads:
        return f"{where} calls its .forward() directly, which goes around hooks; call the module instead"
    if reads & {"weight", "bias", *module._parameters}:
        return f"{where} uses its weights directly (a fused kernel), so it is never called"
    return ""


def _goes_around(module: nn.Module) -> bool:
    """Whether a module has a __call__ of its own that does not lead to torch's."""
    own = next(vars(cls)["__call__"] for cls in type(module).__mro__ if "__call__" in vars(cls))
    if own is nn.Module.__call__:
        return False
    code = getattr(own, "__code__", None)
    return code is None or not {"__call__", "_call_impl", "_wrapped_call_impl"} & set(code.co_names)


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own, like ModuleList."""
    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module)


def _caller(model: nn.Module, name: str) -> tuple[nn.Module | None, str, bool]:
    """The module whose forward should call the named one, its name in there, and whether that is a list of such."""
    is_in_list = False
    while name not in (".", ""):
        head, _, tail = name.rpartition(".")
        found = find(model, head or ".")
        if found is None or not is_container(found[1]):
            return (found[1] if found is not None else None), tail, is_in_list
        name, is_in_list = head, True
    return None, "", is_in_list


def _methods(module: nn.Module) -> Iterator[types.CodeType]:
    for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        for member in vars(cls).values():
            if isinstance(member, types.FunctionType):
                yield member.__code__


def _reads(code: types.CodeType, child: str, is_in_list: bool) -> Iterator[str]:
    """The attributes that a method reads from `self.child`, or from what comes out of it if it is a list."""
    steps = list(loads(Assembly(code, split=True)))
    names = _names_of(child, steps, is_in_list)
    for (op, name), (following, attribute) in pairwise(steps):
        is_subscript = is_in_list and op in _SUBSCRIPTS
        if following in _ATTRIBUTES and (is_subscript or (op in _LOADS and name in names)):
            yield attribute
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _reads(constant, child, is_in_list)


def _names_of(child: str, steps: list[tuple[str, str]], is_in_list: bool) -> set[str]:
    """What a method calls `self.child`, or the items of that: its own name, and variables."""
    stored = [(op, name, to) for (op, name), (store, to) in pairwise(steps) if store == "STORE_FAST"]
    if not is_in_list:
        return {child, *(to for op, name, to in stored if op in _ATTRIBUTES and name == child)}
    is_read = any(name == child for _, name in steps)
    return {to for op, _, to in stored if is_read and op == "FOR_ITER"}
