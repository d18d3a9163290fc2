"""Where a graph is cut: the way of one value through the source of a model, statement by statement.

    Way(to=site).through(model)         what becomes of the value at a site: is it in what the model returns?

Each expression has a `Value`: whether a gradient can flow back from it to where the way starts (`live`), and else the
operations that took it away (`cuts`). Branches are both taken. What is not written in Python, or whose source is not at
hand, hands on what it is given. So the answer is what the source says; it is asked where a graph is known to be cut.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from tenterhook.addresses.modules import unwrap
from tenterhook.addresses.source import Function, is_users, parameters_of, plain_function, tree_of
from tenterhook.say import file_here

_INTEGERS = {"int", "long", "short", "char", "byte", "bool", "int8", "int16", "int32", "int64", "uint8"}
_CUTTING = {"detach", "detach_", "item", "tolist", "numpy", "argmax", "argmin", "argsort", "nonzero", "multinomial"}
_CUTTING |= {"bernoulli", "one_hot", "array", "tensor", "float", "searchsorted", "bucketize"} | _INTEGERS
_ALSO_FOLLOWED = {"float"}  # as a method: `x.float()` keeps the graph, `float(x)` does not
_NO_VALUES = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "len", "isinstance", "range", "requires_grad"}
_NO_GRADIENTS = {"no_grad", "inference_mode"}
_LISTING = {"enumerate", "zip", "list", "reversed", "tuple", "values", "children", "items"}
_MOST_CALLS = 5000


class Cut(NamedTuple):
    """An operation after which there is no graph."""

    what: str  # as it is written
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"`{self.what}` in {self.function} ({file_here(self.file)}:{self.line})"


class Value(NamedTuple):
    """What is known of an expression."""

    live: bool = False
    cuts: tuple[Cut, ...] = ()
    thing: Any = None  # a module, a function, a list of modules: what is called
    parts: tuple[tuple[Any, "Value"], ...] = ()  # of a tuple, a dict or the like: each by its key

    def part(self, key: Any) -> "Value":
        """What is at a key; where that is not known, the whole."""
        return dict(self.parts).get(key, self)


NOTHING, LIVE = Value(), Value(True)


def _join(values: Iterable[Value]) -> Value:
    """Of something computed from several values: what is cut away in one of them matters only if all are."""
    values = list(values)
    alive = [value for value in values if value.live]
    return Value(bool(alive), _all_cuts(alive or values))


def _either(values: Sequence[Value]) -> Value:
    """One of several values, by the branch that runs."""
    things = [value.thing for value in values if value.thing is not None]
    keys = [tuple(key for key, _ in value.parts) for value in values]
    parts = [(key, _either([value.part(key) for value in values])) for key in keys[0]] if len(set(keys)) == 1 else []
    return Value(any(one.live for one in values), _all_cuts(values), things[0] if things else None, tuple(parts))


def _together(parts: Iterable[tuple[Any, Value]]) -> Value:
    """Of a structure."""
    parts = tuple(parts)
    return _join(value for _, value in parts)._replace(parts=parts)


def _all_cuts(values: Iterable[Value]) -> tuple[Cut, ...]:
    return tuple(dict.fromkeys(cut for value in values for cut in value.cuts))


class Inline(NamedTuple):
    """A function that is written inside another."""

    tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    around: "_Body"


class Stretch(NamedTuple):
    """Where a way begins or ends: at a module, or at a line of code."""

    module: nn.Module | None = None
    role: str = "out"  # of the module: "in" for its inputs, or the name of a parameter
    code: CodeType | None = None
    line: int | None = None


class _TooFar(Exception):
    """More code than is worth to be looked at."""


class _Reached(Exception):
    """The statement that is looked for."""


class Way:
    """Follows values through source code, from one place or, without one, from all that can have a gradient."""

    def __init__(self, start: Stretch | None, end: Stretch | None = None) -> None:
        self.start = start
        self.end = end
        self.arrived = NOTHING  # what came to the end
        self._no_grad: Cut | None = None
        self._calls = 0

    def through(self, module: nn.Module, given: Value = NOTHING) -> Value:
        """What a module returns."""
        try:
            return self._call_module(module, [given] * 20, {}, inside=True)
        except (_TooFar, RecursionError):
            return NOTHING

    def through_function(self, function: Any) -> Value:
        """What a function returns, all of whose arguments may have a gradient."""
        try:
            return self.call(function, [LIVE] * 20, {}) or NOTHING
        except (_TooFar, RecursionError):
            return NOTHING

    def to_line(self, code: CodeType, line: int, things: dict[str, Any], known: Callable[[str], Any]) -> Value:
        """In a function that runs: what is given to the calls of a line, or whose methods they are."""
        tree = tree_of(code)
        if tree is None:
            return NOTHING
        body = _Body(self, code, known, {name: Value(thing=thing) for name, thing in things.items()})
        body.until, body.things = line, dict(body.variables)
        try:
            if isinstance(tree, ast.Lambda):
                return body.given_to_calls(tree.body)
            body.run(tree.body)
        except _Reached:
            return body.reached
        except (_TooFar, RecursionError):
            pass
        return NOTHING

    # What is called.

    def call(self, thing: Any, args: list[Value], named: dict[str, Value]) -> Value | None:
        """What a module or function returns; None for other things."""
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise _TooFar
        if isinstance(thing, nn.Module):
            return self._call_module(thing, args, named)
        if isinstance(thing, Inline):
            return self._run(thing.tree, thing.around.inside(_bound(thing.tree, args, named)))
        if isinstance(thing, MethodType) and isinstance(thing.__self__, nn.Module):
            args = [Value(thing=thing.__self__), *args]
        function = plain_function(thing) if isinstance(thing, FunctionType | MethodType) else None
        return None if function is None else self._call_function(function, args, named)

    def _call_module(
        self, module: nn.Module, args: list[Value], named: dict[str, Value], inside: bool = False
    ) -> Value:
        module, given = unwrap(module), _join([*args, *named.values()])
        if self.end is not None and self.end.module is module and self.end.role == "in":
            self.arrived = _either([self.arrived, given])
        start = self.start
        if start is not None and start.module is module and not inside:
            if start.role == "out":
                return LIVE
            if start.role == "in":
                given, args, named = LIVE, [LIVE] * max(len(args), 1), dict.fromkeys(named, LIVE)
        if type(module).forward is nn.Sequential.forward and "forward" not in vars(module):
            for one in module.children():
                given = self._call_module(one, [given], {})
            return given
        function = plain_function(module.forward)
        own = [Value(thing=module)] if isinstance(module.forward, MethodType) else []
        value = None if function is None else self._call_function(function, [*own, *args], named)
        return self._unseen(module, given) if value is None else value

    def _unseen(self, module: nn.Module, given: Value) -> Value:
        """What comes out of a module that is not looked into."""
        if self.start is None:
            starts = any(p.requires_grad for p in module.parameters())
        else:
            starts = any(one is self.start.module for one in module.modules())
        return self.made(LIVE if starts else given)

    def _call_function(self, function: FunctionType, args: list[Value], named: dict[str, Value]) -> Value | None:
        code = function.__code__
        tree = tree_of(code) if is_users(code) else None
        if tree is None or isinstance(tree, ast.Module):
            return None
        things = dict(zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=False))
        names = {**function.__globals__, **things}
        return self._run(tree, _Body(self, code, names.get, _bound(tree, args, named)))

    def _run(self, tree: Function, body: "_Body") -> Value:
        with self._under(_decorated(tree, body.code)):
            if isinstance(tree, ast.Lambda):
                return body.value(tree.body)
            body.run(tree.body)
        return _either(body.returned) if body.returned else NOTHING

    @contextmanager
    def _under(self, cut: Cut | None, ends: bool = False) -> Iterator[None]:
        """Code that runs without gradients, or, where that ends, with them."""
        before = self._no_grad
        self._no_grad = None if ends else (before or cut)
        try:
            yield
        finally:
            self._no_grad = before

    def made(self, value: Value) -> Value:
        """What an operation makes."""
        return value if self._no_grad is None or not value.live else Value(cuts=(self._no_grad,))

    def is_own(self, module: Any, name: str, parameter: Tensor) -> Value:
        """A parameter that code reads."""
        if self.start is None:
            return Value(live=parameter.requires_grad)
        return Value(live=self.start.module is module and self.start.role == name)


class _Body:
    """A function as it is followed: what its variables hold."""

    until: int | None = None  # the line at which to stop
    reached = NOTHING

    def __init__(self, way: Way, code: CodeType, known: Callable[[str], Any], variables: dict[str, Value]) -> None:
        self.way = way
        self.code = code
        self.known = known
        self.variables = variables
        self.things: dict[str, Value] = {}  # what variables of a function that runs are known to hold
        self.returned: list[Value] = []

    def inside(self, given: dict[str, Value]) -> "_Body":
        """A function that is written in this one, with its arguments."""
        return _Body(self.way, self.code, self.known, {**self.variables, **given})

    # Statements. Each says whether the function goes on after it.

    def run(self, body: Sequence[ast.stmt]) -> bool:
        return all(self._run(one) for one in body)

    def _run(self, one: ast.stmt) -> bool:
        if isinstance(one, ast.If):
            return self._branches([one.body, one.orelse])
        if isinstance(one, ast.For | ast.AsyncFor):
            return self._loop(one)
        if isinstance(one, ast.While):
            return self._branches([[*one.body], []]) and self._branches([one.body, []])
        if isinstance(one, ast.With | ast.AsyncWith):
            return self._with(one)
        if isinstance(one, ast.Try):
            handled = [handler.body for handler in one.handlers]
            return self._branches([[*one.body, *one.orelse], *handled]) and self.run(one.finalbody)
        if isinstance(one, ast.Match):
            return self._branches([[], *(case.body for case in one.cases)])
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            self.variables[one.name] = Value(thing=Inline(one, self))
            return True
        if isinstance(one, ast.ClassDef):
            return True
        return self._simple(one)

    def _simple(self, one: ast.stmt) -> bool:
        if self.until is not None and one.lineno <= self.until <= (one.end_lineno or one.lineno):
            self.reached = self.given_to_calls(one)
            raise _Reached
        way, given = self.way, getattr(one, "value", None)
        value = self.value(given) if isinstance(given, ast.expr) else NOTHING
        if self._is(way.end, one):
            way.arrived = _either([way.arrived, value])
        if self._is(way.start, one):
            value = LIVE
        if isinstance(one, ast.Assign):
            for target in one.targets:
                self._assign(target, value)
        elif isinstance(one, ast.AugAssign):
            self._assign(one.target, self.way.made(_join([self.value(one.target), value])))
        elif isinstance(one, ast.AnnAssign):
            self._assign(one.target, value)
        elif isinstance(one, ast.Return):
            self.returned.append(value)
        elif isinstance(one, ast.Expr) and isinstance(method := getattr(one.value, "func", None), ast.Attribute):
            self._written_into(method, value)
        return not isinstance(one, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def _written_into(self, method: ast.Attribute, value: Value) -> None:
        if method.attr.endswith("_"):
            self._assign(method.value, value)
        elif method.attr in ("append", "extend", "insert", "update", "add", "setdefault"):
            self._assign(method.value, _join([self.value(method.value), value]))

    def _is(self, place: Stretch | None, one: ast.stmt) -> bool:
        """Whether a statement is where a way begins or ends."""
        if place is None or place.code is None or place.line is None or place.code.co_filename != self.code.co_filename:
            return False
        return one.lineno <= place.line <= (one.end_lineno or one.lineno)

    def given_to_calls(self, one: ast.AST) -> Value:
        """What the calls in a statement work on: the loss, if one of them is `loss.backward()`."""
        calls = [node for node in ast.walk(one) if isinstance(node, ast.Call)]
        backward = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"]
        if not calls:
            return NOTHING
        call = (backward or calls)[0]
        receiver = [self.value(call.func.value)] if isinstance(call.func, ast.Attribute) else []
        return _join([*receiver, *map(self.value, [*call.args[:1], *(keyword.value for keyword in call.keywords)])])

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]]) -> bool:
        before, after = self.variables, []
        for body in bodies:
            self.variables = dict(before)
            if self.run(body):
                after.append(self.variables)
        self.variables = before
        if after:
            names = dict.fromkeys(name for one in after for name in one)
            self.variables = {name: _either([one.get(name, NOTHING) for one in after]) for name in names}
        return bool(after)

    def _loop(self, one: ast.For | ast.AsyncFor) -> bool:
        over = self.value(one.iter)
        modules = over.thing if isinstance(over.thing, list) else []
        for thing in modules or [None, None]:
            self._assign(one.target, Value(over.live, over.cuts, thing))
            if modules:
                self.run(one.body)
            else:
                self._branches([one.body, []])
        return True

    def _with(self, one: ast.With | ast.AsyncWith) -> bool:
        cut, ends = None, False
        for item in one.items:
            cut = cut or _turns_off(item.context_expr, self.code)
            ends = ends or "enable_grad" in ast.unparse(item.context_expr)
        with self.way._under(cut, ends):
            return self.run(one.body)

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for i, one in enumerate(target.elts):
                self._assign(one, value.part(i) if len(value.parts) == len(target.elts) else value)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value)
        elif isinstance(target, ast.Subscript):
            self._assign(target.value, self._with_item(self.value(target.value), _constant(target.slice), value))
        elif isinstance(target, ast.Name | ast.Attribute):
            name = ast.unparse(target)
            self.variables[name] = self.things.get(name, value) if value == NOTHING else value

    # Expressions.

    def value(self, one: ast.expr | None) -> Value:
        """What is known of an expression."""
        if one is None or isinstance(one, ast.Constant):
            return NOTHING
        if isinstance(one, ast.Name):
            return self.variables.get(one.id) or Value(thing=self.known(one.id))
        if isinstance(one, ast.Attribute):
            return self._attribute(one)
        if isinstance(one, ast.Subscript):
            return self._item(one)
        if isinstance(one, ast.Call):
            return self._call(one)
        if isinstance(one, ast.IfExp):
            return _either([self.value(one.body), self.value(one.orelse)])
        if isinstance(one, ast.Lambda):
            return Value(thing=Inline(one, self))
        if isinstance(one, ast.NamedExpr):
            self._assign(one.target, value := self.value(one.value))
            return value
        if isinstance(one, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            for generator in one.generators:
                self._assign(generator.target, self.value(generator.iter))
            return self.value(one.elt)
        if isinstance(one, ast.Tuple | ast.List):
            return _together(enumerate(self._parts(one)))
        if isinstance(one, ast.Dict):
            return _together(
                (_constant(key), self.value(value)) for key, value in zip(one.keys, one.values, strict=True)
            )
        if isinstance(one, ast.Starred):
            return self.value(one.value)
        made = _join(self._parts(one))
        return self._cut(one, made) if isinstance(one, ast.Compare) else self.way.made(made)

    def _parts(self, one: ast.AST) -> list[Value]:
        return [self.value(child) for child in ast.iter_child_nodes(one) if isinstance(child, ast.expr)]

    def _attribute(self, one: ast.Attribute) -> Value:
        if (known := self.variables.get(ast.unparse(one))) is not None:
            return known
        base = self.value(one.value)
        if isinstance(base.thing, list) and one.attr in ("values", "children", "items"):
            return base
        if base.thing is not None:
            found = _attribute_of(base.thing, one.attr)
            if isinstance(found, Tensor):
                return self.way.is_own(base.thing, one.attr, found)
            return Value(thing=found)
        if one.attr in _NO_VALUES:
            return NOTHING
        return self._cut(one, base) if one.attr in ("data", "indices") else base.part(one.attr)

    def _item(self, one: ast.Subscript) -> Value:
        base = self.value(one.value)
        thing = list(base.thing) if isinstance(base.thing, nn.Sequential | list) else None
        if thing is None:
            return self.way.made(base.part(_constant(one.slice)))
        try:
            return Value(thing=thing[ast.literal_eval(one.slice)])
        except (ValueError, IndexError, TypeError):
            return Value(thing=thing)

    def _with_item(self, whole: Value, key: Any, value: Value) -> Value:
        """A structure, or a tensor, of which one part is assigned."""
        if key is None or not (whole.parts or whole == NOTHING):
            return _join([whole, value])
        return _together({**dict(whole.parts), key: value}.items())

    def _call(self, one: ast.Call) -> Value:
        function = self.value(one.func)
        name = one.func.attr if isinstance(one.func, ast.Attribute) else getattr(one.func, "id", "")
        args = [self.value(arg) for arg in one.args]
        named = {keyword.arg or "": self.value(keyword.value) for keyword in one.keywords}
        thing = function.thing
        if name in _LISTING and (isinstance(thing, list) or thing is None):
            return next((arg for arg in args if isinstance(arg.thing, list)), function if thing else _join(args))
        if isinstance(thing, list):  # one of several modules
            return _either([self.way.call(each, args, named) or NOTHING for each in thing])
        if thing is not None and (value := self._called(thing, args, named)) is not None:
            return value
        if name in _NO_VALUES:
            return NOTHING
        receiver = [function] if isinstance(one.func, ast.Attribute) else []
        given = _join([*receiver, *args, *named.values()])
        if isinstance(thing, type) and named and not args:  # a dataclass or the like
            return _together(named.items())
        is_method = bool(receiver) and name in _ALSO_FOLLOWED
        if (name in _CUTTING and not is_method) or (name in ("to", "type") and _names_integers(one)):
            return self._cut(one, given)
        return self.way.made(given)

    def _called(self, thing: Any, args: list[Value], named: dict[str, Value]) -> Value | None:
        value = self.way.call(thing, args, named)
        if value is None and args and isinstance(args[0].thing, nn.Module | FunctionType | MethodType | Inline):
            return self.way.call(args[0].thing, args[1:], named)  # as with checkpoint(function, x)
        return value

    def _cut(self, one: ast.expr, value: Value) -> Value:
        """Of something that has no gradient, whatever it is made of."""
        if not value.live:
            return Value(cuts=value.cuts)
        line = one.end_lineno or one.lineno
        return Value(cuts=(Cut(_written(one), self.code.co_filename, line, self.code.co_qualname),))


def _bound(tree: Function, args: list[Value], named: dict[str, Value]) -> dict[str, Value]:
    by_position, others = parameters_of(tree)
    bound = dict(zip(by_position, args, strict=False))
    rest = _join([*args[len(by_position) :], *(value for name, value in named.items() if name not in by_position)])
    bound.update({name: rest for name in others})
    bound.update({name: value for name, value in named.items() if name in (*by_position, *others)})
    return {**dict.fromkeys(by_position, NOTHING), **bound}


def _decorated(tree: Function, code: CodeType) -> Cut | None:
    every = getattr(tree, "decorator_list", ())
    return next((cut for one in every if (cut := _turns_off(one, code))), None)


def where_gradients_are_off(code: CodeType, line: int) -> Cut | None:
    """What turned gradients off at a line of a function, if the function itself did."""
    tree = tree_of(code)
    if tree is None:
        return None
    inner = None
    for node in ast.walk(tree):  # those further out come first
        if isinstance(node, ast.With | ast.AsyncWith) and node.lineno <= line <= (node.end_lineno or line):
            cuts = (cut for item in node.items if (cut := _turns_off(item.context_expr, code)))
            inner = next(cuts, inner)
    return inner or _decorated(tree, code)


def _turns_off(one: ast.expr, code: CodeType) -> Cut | None:
    """What turns gradients off, if an expression does: `torch.no_grad()`."""
    call = one.func if isinstance(one, ast.Call) else one
    name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
    is_off = name in _NO_GRADIENTS or (name == "set_grad_enabled" and "False" in ast.unparse(one))
    return Cut(_written(one), code.co_filename, one.lineno, code.co_qualname) if is_off else None


def _names_integers(one: ast.Call) -> bool:
    given = [*one.args, *(keyword.value for keyword in one.keywords)]
    return any(isinstance(arg, ast.Attribute) and arg.attr in _INTEGERS for arg in given)


def _attribute_of(thing: Any, name: str) -> Any:
    """What code gets for an attribute of a module; nothing of the model's runs for it."""
    if isinstance(thing, nn.Module):
        for table in (vars(thing), thing._parameters, thing._modules):
            if name in table:
                return _listed(table[name])
        member = next((vars(cls)[name] for cls in type(thing).__mro__ if name in vars(cls)), None)
        return MethodType(member, thing) if isinstance(member, FunctionType) else None
    return vars(thing).get(name) if isinstance(thing, ModuleType) else None


def _listed(thing: Any) -> Any:
    if isinstance(thing, nn.ModuleList | nn.ModuleDict):
        return list(thing.children())
    return thing


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _constant(one: ast.expr | None) -> Any:
    """A key as it is written; None where it is not."""
    try:
        return None if one is None else ast.literal_eval(one)
    except (ValueError, TypeError):
        return None


def _written(one: ast.expr) -> str:
    text = ast.unparse(one)
    return text if len(text) <= 60 else f"…{text[-58:]}"
