"""Why a site stayed silent: the most likely reason, from what the model's own code says.

A module's hook fires only when the module is called. Its parent's bytecode shows the usual ways around that:
`self.fc.forward(x)`, and `F.linear(x, self.fc.weight)` where a fused kernel takes the weights.
"""

import dis
import types
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from tenterhook._sites import Site, find

_LOADS = {"LOAD_ATTR", "LOAD_METHOD"}


def why_never_called(model: nn.Module | None, site: Site) -> str:
    """The likeliest reason that no call of a module was seen."""
    module = site.module
    if module is None or model is None:
        return "the model is gone"
    if is_container(module):
        return f"a {type(module).__name__} is a container that is never called; ask for its children"
    if isinstance(module, torch.jit.ScriptModule):
        return "it runs as TorchScript, which calls no Python hooks; ask for the Python module around it"
    head, _, name = site.address.name.rpartition(".")
    found = find(model, head or ".")
    parent = found[1] if found is not None else None
    while parent is not None and is_container(parent):
        head, _, name = head.rpartition(".")
        found = find(model, head or ".")
        parent = found[1] if found is not None and found[1] is not parent else None
    if parent is None or parent is module:
        return "it was not called inside this session"
    where = f"{type(parent).__name__} "
    if isinstance(parent, torch.jit.ScriptModule):
        return f"{where}runs as TorchScript, which calls no Python hooks"
    uses = set(_uses(parent, name))
    if "forward" in uses:
        return f"{where}calls its .forward() directly, which goes around hooks; call the module instead"
    if uses & {"weight", "bias", "in_proj_weight", *module._parameters}:
        return f"{where}uses its weights directly (a fused kernel), so it is never called"
    return f"not reached: {where}did not call it inside this session"


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own, like ModuleList."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _uses(parent: nn.Module, child: str) -> Iterator[str]:
    """The attributes that a module's own methods read from its child: forward, weight, …"""
    for cls in type(parent).__mro__:
        if cls is nn.Module:
            return
        for member in vars(cls).values():
            if isinstance(member, types.FunctionType):
                yield from _reads(member.__code__, child)


def _reads(code: types.CodeType, child: str) -> Iterator[str]:
    loads = [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL")]
    held: set[str] = set()  # locals that hold the child, or an item of the container that is called `child`
    for (op, name), (next_op, next_name) in pairwise(loads):
        reads_child = (op in _LOADS and name == child) or (op == "LOAD_FAST" and name in held)
        if reads_child and next_op in _LOADS:
            yield str(next_name)
        if op in _LOADS and name == child and next_op == "STORE_FAST":
            held.add(next_name)
    if any(op in _LOADS and name == child for op, name in loads):
        yield from _reads_of_items(loads)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _reads(const, child)


def _reads_of_items(loads: list[tuple[str, object]]) -> Iterator[str]:
    """`for layer in self.layers: layer.forward(x)` and `self.layers[0].forward(x)`."""
    items = {n for (op, _), (next_op, n) in pairwise(loads) if op == "FOR_ITER"}
    for (op, name), (next_op, next_name) in pairwise(loads):
        from_item = (op == "LOAD_FAST" and name in items) or op == "BINARY_SUBSCR"
        if from_item and next_op in _LOADS and next_name == "forward":
            yield "forward"
