"""The syntax tree of a function that has run, by its code, and what its names mean."""

import ast
import functools
import inspect
import linecache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

_TORCH = torch.__file__.rpartition("/")[0] + "/"
_OURS = __file__.rpartition("/addresses/")[0] + "/"
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


def is_users(code: CodeType) -> bool:
    """Whether code is neither torch's nor ours."""
    return not code.co_filename.startswith((_TORCH, _OURS))


def tree_of(code: CodeType) -> Function | None:
    """The function with this code, as it is written; None where the source is not at hand."""
    lines = linecache.getlines(code.co_filename)
    every = _functions_in(code.co_filename, "".join(lines))
    name = "<lambda>" if code.co_name == "<lambda>" else code.co_name
    return every.get((name, 0 if name == "<module>" else code.co_firstlineno))


@functools.lru_cache(maxsize=64)
def _functions_in(file: str, text: str) -> dict[tuple[str, int], Function]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[str, int], Function] = {("<module>", 0): tree}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])  # as its code counts
            found[node.name, first] = node
        elif isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), node)
    return found


def plain_function(thing: Any) -> FunctionType | None:
    """The Python function that runs when a function or method is called, without what decorates it."""
    thing = thing.__func__ if isinstance(thing, MethodType) else thing
    try:
        thing = inspect.unwrap(thing)
    except ValueError:  # it wraps itself
        return None
    return thing if isinstance(thing, FunctionType) else None


def parameters_of(tree: Function) -> tuple[list[str], list[str]]:
    """The names of the arguments of a function: by position, and all others."""
    if isinstance(tree, ast.Module):
        return [], []
    given = tree.args
    others = [*given.kwonlyargs, *(one for one in (given.vararg, given.kwarg) if one is not None)]
    return [one.arg for one in (*given.posonlyargs, *given.args)], [one.arg for one in others]
