"""Private names of torch and CPython are used in platform/ alone, but for those that its docstring lists."""

import ast
import builtins
import pathlib
import re
from collections.abc import Iterator

import torch
from torch import nn

import tenterhook.platform

SRC = pathlib.Path(tenterhook.platform.__file__).parents[1]
# Names without an underscore that nobody promises either, or that reach into a running function.
_ALSO = {"f_locals", "f_trace", "pythonapi", "hooked", "SUPPORTED_NODES"}
# Fields that the standard library documents with an underscore: namedtuple's.
_DOCUMENTED = {"_replace", "_make", "_fields", "_asdict"}
_INLINE = set(re.findall(r"[.…](_\w+)", (tenterhook.platform.__doc__ or "").split("guards what")[1]))
_INLINE |= {f"_forward{before}_hooks_with_kwargs" for before in ("", "_pre")}
_THEIRS = {name for thing in (nn.Module(), torch.ones(1), torch) for name in dir(thing) if name.startswith("_")}


def is_private(name: str) -> bool:
    return name in _ALSO or (name.startswith("_") and not name.startswith("__") and "tenterhook" not in name)


def own_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a file defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(thing: ast.expr) -> bool:
    return isinstance(thing, ast.Name) and thing.id in ("self", "cls")


def foreign_names(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """The private names of others that a file uses, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            if node.attr not in ours or node.attr in _THEIRS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("tenterhook"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in vars(builtins):
            names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            by_name = node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            yield from ((node.lineno, name) for name in names if by_name and is_private(name) and name not in ours)


def test_private_names_are_used_in_platform_alone():
    trees = {file.relative_to(SRC).as_posix(): ast.parse(file.read_text()) for file in sorted(SRC.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in own_names(tree)}
    found = [
        f"{file}:{line} {name}"
        for file, tree in trees.items()
        if not file.startswith("platform/")
        for line, name in foreign_names(tree, ours)
        if name not in _INLINE | _DOCUMENTED
    ]
    assert not found, f"private names of torch or CPython belong into platform/: {found}"


def test_the_names_used_inline_are_those_that_are_tested():
    tested = (pathlib.Path(__file__).parent / "test_inline_names.py").read_text()
    assert _INLINE and all(name in tested for name in _INLINE)


def test_every_subject_says_what_it_relies_on_and_has_a_test():
    for file in sorted((SRC / "platform").glob("*.py")):
        if file.name != "__init__.py":
            said = ast.get_docstring(ast.parse(file.read_text())) or ""
            assert "Relies on" in said, f"{file.name} does not say what it relies on"
            test = pathlib.Path(__file__).parent / f"test_{file.name}"
            assert test.is_file(), f"{file.name} has no test in tests/platform"


def test_the_search_finds_what_it_is_for():
    code = """
import torch._dynamo.callback
from torch.utils import _pytree
from torch._C._functorch import get_unwrapped
torch._foreach_add; frame.f_locals; self._mine; seen._taps; module._version; getattr(x, "_saved_self")
"""
    found = [name for _, name in foreign_names(ast.parse(code), {"_taps", "_mine"})]
    expected = ["_dynamo", "_pytree", "_C", "_functorch", "_foreach_add", "f_locals", "_version", "_saved_self"]
    assert sorted(found) == sorted(expected)
