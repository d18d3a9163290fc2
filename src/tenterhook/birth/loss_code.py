"""The code of the user's from a call of the model to `backward()`, to be run once more.

Only what leads to the loss is run again, and only where it does nothing else: it computes with tensors, modules and
functions that do the same, and assigns variables of its own. Anything else is a reason not to.
"""

import ast
import builtins
import inspect
import linecache
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.birth.trace import CannotRunAgain
from tenterhook.platform.frames import all_variables

_LOSS = "_tenterhook_loss"
_DEEPEST = 6  # functions that call functions
_SAFE = {
    abs,
    all,
    any,
    bool,
    dict,
    enumerate,
    float,
    int,
    isinstance,
    len,
    list,
    max,
    min,
    range,
    round,
    sum,
    tuple,
    zip,
}
_METHODS = {"items", "keys", "values", "get"}  # of containers, beside those of tensors
_WORKS = {"backward", "register_hook", "retain_grad", "set_", "numpy", "share_memory_"}  # of tensors: do more
_COMPUTES = re.compile(
    r"(torch(\.(_C|_tensor|_VF|nn|functional|special|linalg|fft|amp|autograd|distributions)\b.*)?|math)$"
)
_SCALERS = {"step", "update", "unscale_"}  # what changes a GradScaler
_PLAIN = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Expr,
    ast.If,
    ast.For,
    ast.With,
    ast.Pass,
    ast.Return,
    ast.Assert,
)


@dataclass(frozen=True)
class LossCode:
    """Code that computes a loss once more."""

    code: CodeType
    variables: dict[str, Any]

    def __call__(self) -> Tensor:
        space = dict(self.variables)
        exec(self.code, space)  # the user's own lines, which ran a moment ago
        loss = space[_LOSS]
        if not isinstance(loss, Tensor):
            raise CannotRunAgain("what backward() is called on is no tensor the second time")
        return loss


def loss_code(frame: FrameType, first: int, last: int) -> LossCode:
    """What leads to the loss, between the line that calls the model and the one that calls backward()."""
    code = frame.f_code
    body = _body_of(code)
    statements, closing = _between(body, first, last)
    variables = {**frame.f_globals, **all_variables(frame)}
    loss = _loss_of(closing, variables)
    kept = _leading_to(statements, loss)
    _check(kept, loss, variables)
    module = ast.Module([*kept, _assigned(loss)], [])
    made = compile(module, code.co_filename, "exec", dont_inherit=True)
    return LossCode(made.replace(co_name=code.co_name, co_qualname=code.co_qualname), variables)


def _body_of(code: CodeType) -> list[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError as error:
        raise CannotRunAgain("its source cannot be read") from error
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            lines = [node.lineno, *(one.lineno for one in node.decorator_list)]
            if code.co_firstlineno in lines and not _yields(node):
                return node.body
    raise CannotRunAgain("its source cannot be found, or it is a generator")


def _yields(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom | ast.Await) for one in ast.walk(node))


def _between(body: list[ast.stmt], first: int, last: int) -> tuple[list[ast.stmt], ast.stmt]:
    """The statements of one suite from the one with the first line on, and the one with the last line."""
    begin = next((i for i, one in enumerate(body) if _covers(one, first)), None)
    end = _last_of(body, last)
    if begin is None or end is None or begin > end:
        raise CannotRunAgain("the model is not called in the lines above backward()")
    suites = [getattr(body[end], name, None) for name in ("body", "orelse", "handlers", "finalbody")]
    inner = [one for one in suites if isinstance(one, list) and one and isinstance(one[0], ast.stmt)]
    if not inner:
        return body[begin:end], body[end]
    for suite in inner:
        if (until := _last_of(suite, last)) is not None:
            if begin == end:
                return _between(suite, first, last)
            return [*body[begin:end], *suite[:until]], suite[until]
    raise CannotRunAgain("backward() is called in the head of a statement")


def _last_of(body: list[ast.stmt], line: int) -> int | None:
    """Which statement calls backward(), of those on a line: `optimizer.zero_grad(); loss.backward()`."""
    there = [i for i, one in enumerate(body) if _covers(one, line)]
    return next((i for i in there if _backward_in(body[i]) is not None), there[0] if there else None)


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _loss_of(statement: ast.stmt, variables: Mapping[str, Any]) -> ast.expr:
    """What backward() is called on, or what a function is given that calls it."""
    if (found := _backward_in(statement)) is not None:
        return found
    for node in ast.walk(statement):
        for given in (*node.args, *(one.value for one in node.keywords)) if isinstance(node, ast.Call) else ():
            value = variables.get(given.id) if isinstance(given, ast.Name) else None
            is_made = isinstance(given, ast.Call | ast.BinOp | ast.UnaryOp)
            if is_made or (isinstance(value, Tensor) and value.requires_grad and value.numel() == 1):
                return given
    raise CannotRunAgain("no call of backward() or grad() is on its line")


def _backward_in(statement: ast.stmt) -> ast.expr | None:
    """What a statement calls backward() on, or grad(); None where it does not."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("backward"):
            by_another = node.func.attr != "backward" or _is_name(node.func.value, "accelerator", "fabric", "self")
            return node.args[0] if node.args and by_another else node.func.value
        if isinstance(node, ast.Call) and _is_name(node.func, "grad") and node.args:  # torch.autograd.grad(loss, …)
            return node.args[0]
    return None


def _is_name(node: ast.expr, *names: str) -> bool:
    return (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.Attribute) and node.attr in names)


def _leading_to(statements: list[ast.stmt], loss: ast.expr) -> list[ast.stmt]:
    """Those that assign what the loss, or one of these, reads."""
    needed, kept = _names(loss, ast.Load), []
    for one in reversed(statements):
        assigned = _names(one, ast.Store)
        if assigned & needed:
            kept.append(one)
            if not isinstance(one, ast.Assign):
                assigned = set()  # it may leave them as they are
            needed = (needed - assigned) | _names(one, ast.Load)
    return kept[::-1]


def _names(node: ast.AST, context: type) -> set[str]:
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and context is ast.Load:
        found.add(node.target.id)
    return found


def _assigned(loss: ast.expr) -> ast.stmt:
    target = ast.copy_location(ast.Name(_LOSS, ast.Store()), loss)
    return ast.copy_location(ast.Assign([target], loss), loss)


def _check(statements: Iterable[ast.stmt], loss: ast.expr, variables: Mapping[str, Any]) -> None:
    own: set[str] = set()
    for one in statements:
        _check_statement(one, variables, own, 0)
    _check_calls(loss, variables, own, 0)


def _check_statement(node: ast.stmt, variables: Mapping[str, Any], own: set[str], depth: int) -> None:
    for one in ast.walk(node):
        if isinstance(one, ast.stmt) and not isinstance(one, _PLAIN):
            raise CannotRunAgain(f"line {one.lineno} does more than compute")
        for target in _targets(one):
            if isinstance(target, ast.Subscript | ast.Attribute) and not _is_own(target.value, own):
                raise CannotRunAgain(f"line {target.lineno} writes into what was there before")
            if isinstance(one, ast.AugAssign) and isinstance(target, ast.Name) and target.id not in own:
                raise CannotRunAgain(f"line {target.lineno} changes what was there before")
        if isinstance(one, ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await | ast.Delete):
            raise CannotRunAgain("it does more than compute")
    own |= _names(node, ast.Store)
    _check_calls(node, variables, own, depth)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        targets = [node.target]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_own(node: ast.expr, own: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in own


def _check_calls(node: ast.AST, variables: Mapping[str, Any], own: set[str], depth: int) -> None:
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            _check_call(one, variables, own, depth)


def _check_call(call: ast.Call, variables: Mapping[str, Any], own: set[str], depth: int) -> None:
    function = call.func
    found = _value_of(function, variables, own)
    if found is not None:
        given = [_value_of(one, variables, own) for one in call.args]
        named = {one.arg: _value_of(one.value, variables, own) for one in call.keywords if one.arg}
        if not _is_safe(found, given, named, depth):
            raise CannotRunAgain(f"line {call.lineno} calls {ast.unparse(function)}, which may do more than compute")
        return
    if isinstance(function, ast.Attribute):
        name = function.attr
        writes = name.endswith("_") and not name.endswith("__") and not _is_own(function.value, own)
        if (hasattr(Tensor, name) or name in _METHODS) and name not in _WORKS and not writes:
            return
    raise CannotRunAgain(f"line {call.lineno} calls {ast.unparse(function)}, which may do more than compute")


def _value_of(node: ast.expr, variables: Mapping[str, Any], own: set[str]) -> Any:
    """What a name or an attribute is; None where only running the code would tell."""
    if isinstance(node, ast.Name):
        if node.id in own:
            return None
        return variables[node.id] if node.id in variables else getattr(builtins, node.id, None)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, variables, own)
        if owner is None or isinstance(owner, Tensor):
            return None
        is_property = isinstance(inspect.getattr_static(type(owner), node.attr, None), property)
        return None if is_property else getattr(owner, node.attr, None)
    return None


def _is_safe(function: Any, given: list[Any], named: dict[str, Any], depth: int) -> bool:
    """Whether calling it with these, as far as they are known, does nothing but compute."""
    if isinstance(function, nn.Module):
        return True
    if isinstance(function, Hashable) and function in _SAFE:
        return True
    name = getattr(function, "__name__", "")
    if isinstance(function, FunctionType | MethodType | type) and not _COMPUTES.match(function.__module__ or ""):
        if isinstance(function, MethodType):
            function, given = function.__func__, [function.__self__, *given]
        return isinstance(function, FunctionType) and depth < _DEEPEST and _is_pure(function, given, named, depth + 1)
    if isinstance(function, FunctionType | MethodType | type):
        return name not in _SCALERS
    return isinstance(function, BuiltinFunctionType) and (hasattr(torch, name) or hasattr(math, name))


def _is_pure(function: FunctionType, given: list[Any], named: dict[str, Any], depth: int) -> bool:
    """Whether a function of the user's does nothing but compute."""
    code = function.__code__
    try:
        variables = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        variables |= dict.fromkeys(code.co_varnames) | dict(zip(code.co_varnames, given, strict=False)) | named
        own: set[str] = set()
        for one in _body_of(code):
            if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)):  # a docstring
                _check_statement(one, variables, own, depth)
    except (CannotRunAgain, TypeError):
        return False
    return True
