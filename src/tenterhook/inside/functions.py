"""The Python functions that run when something is called: a module's forward, what a decorator wraps, and so on."""

import functools
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tenterhook.inside.copies import original
from tenterhook.platform.bytecode import COMPREHENSIONS
from tenterhook.platform.layers import no_forward

_OURS = str(Path(__file__).parents[1] / "_")[:-1]
_TORCH = re.escape(str(Path(torch.__file__).parent / "_")[:-1])
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim" / "_")[:-1]
_PLUMBING = "utils overrides _dynamo _jit_internal _tensor _ops _library autograd amp jit nn/modules/module nn/parallel"
_PLUMBING += " distributed _functorch _compile fx _vmap_internals"
_is_plumbing = re.compile(_TORCH + rf"(?:{'|'.join(_PLUMBING.split())})\b").match
_STDLIB = str(Path(functools.__file__).parent)  # where packages may be installed, too


@lru_cache(maxsize=4096)
def is_plumbing(file: str) -> bool:
    """Whether the code of a file holds no values of the model's and adds nothing to their names."""
    return file.startswith(_OURS) or _is_plumbing(file) is not None


@lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Whether a file is one of this package."""
    return file.startswith(_OURS)


@lru_cache(maxsize=4096)
def is_of_optimizer(file: str) -> bool:
    """Whether a file is torch's of optimizers, which call the closure that they are given."""
    return file.startswith(_OPTIMIZERS)


@lru_cache(maxsize=4096)
def is_followed(file: str) -> bool:
    """Whether a function of a file may hold values of the model's."""
    return not is_plumbing(file) and (not file.startswith(_STDLIB) or "-packages" in file[len(_STDLIB) :])


def what_runs(owner: Any) -> Any:
    """What is called, of what addresses begin with: the module itself, or the function that is none."""
    return owner if isinstance(owner, nn.Module) else owner.function


def functions_of(thing: Any, method: str = "") -> Iterator[FunctionType]:
    """The functions that run when something is called, or its method is, also by `super()`."""
    waiting, seen = [*(vars(cls).get(method) for cls in type(thing).__mro__ if method), thing], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            yield one
            waiting += _in_cells(one)
        waiting += _leads_to(one)


def _leads_to(one: Any) -> Iterable[Any]:
    wrapped = getattr(one, "__dict__", {}).get("__wrapped__")  # a Proxy of torch.fx has every attribute
    if wrapped is not None and not isinstance(one, nn.Module):
        yield wrapped
    if isinstance(one, FunctionType | type(None)):
        return
    if isinstance(one, functools.partial):
        yield one.func
    elif isinstance(one, MethodType | BuiltinFunctionType):
        yield getattr(one, "__func__", None)
        owner = one.__self__
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):  # its apply
            yield getattr(owner, "forward", None)
        elif isinstance(owner, nn.Module) and one.__name__ in ("__call__", "_wrapped_call_impl"):
            yield owner
    elif isinstance(one, nn.Module):
        yield from _forwards(one)
        yield type(one).__call__
    elif isinstance(one, type):
        yield vars(one).get("__init__")
    elif isinstance(one, staticmethod | classmethod):
        yield one.__func__
    else:
        yield vars(type(one)).get("__call__")


def _in_cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(inside, FunctionType | MethodType):
            yield inside


def _forwards(module: nn.Module) -> Iterator[Any]:
    """The forward of a module, and its parents'."""
    every = (vars(module).get("forward"), *(vars(cls).get("forward") for cls in type(module).__mro__))
    return (one for one in every if one is not None and one is not no_forward)


def codes_of(owner: Any) -> list[CodeType]:
    """The code of a module's forward, its parents' too, or of a function that is no module; that of no copy."""
    if not isinstance(owner, nn.Module):
        return [original(code) for code in getattr(owner, "codes", ())]
    found = []
    for forward in _forwards(owner):
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        forward = getattr(forward, "__func__", forward)
        if isinstance(forward, FunctionType):
            found.append(original(forward.__code__))
    return found


def is_forward(code: CodeType, owner: Any) -> bool:
    """Whether code is a module's forward, whatever its name."""
    return code.co_name == "forward" or _own_forward(owner) is original(code)


def is_decorator(code: CodeType, owner: Any) -> bool:
    """Whether code stands for a module's forward, and says what that is, as with functools.wraps."""
    is_another = code.co_name != "forward" and hasattr(getattr(owner, "forward", None), "__wrapped__")
    return is_another and _own_forward(owner) is original(code)


def _own_forward(owner: Any) -> CodeType | None:
    own = getattr(owner, "forward", None)
    code = getattr(getattr(own, "__func__", own), "__code__", None)
    return None if code is None else original(code)


def part(code: CodeType, owner: Any) -> str:
    """What a function adds to the names of its values."""
    name = code.co_name
    if name in COMPREHENSIONS or is_plumbing(code.co_filename):
        return ""
    if name == "forward":  # of a module that is not in the model, or of an autograd function
        return type(owner).__name__ if owner is not None else code.co_qualname.split(".")[-2:][0]
    return name.strip("<>")
