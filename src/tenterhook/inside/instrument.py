"""Copies of code that call us where somebody wants a value.

    y = x + 2            y = __tenterhook__(x + 2, number, here, None)

What is inserted, by the kind of place: `begin` where the function begins; `stored` before a variable or attribute is
assigned, `wrote` after something is assigned to an item of it; `made` and `called` after an operator and a call whose
result no variable takes; `follow` before a call, `looked` after one of `locals` and the like. `given` is for an
argument that is asked for by name and never assigned.
"""

from collections.abc import Callable, Iterator
from inspect import CO_NEWLOCALS, CO_OPTIMIZED, CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, NamedTuple

from tenterhook.inside.dispatch import NAME, Place, acts
from tenterhook.platform.assembler import NOWHERE, OP, Assembly, Instruction
from tenterhook.platform.bytecode import COMPREHENSIONS, LOOKERS, NULL_COMES_LAST, STORES, Flow, effect

HERE, CALLED = ".here", ".called"  # the local variables of ours in a copy
_NEVER_TENSORS = {"LOAD_CONST", "LOAD_SMALL_INT", "MAKE_FUNCTION", "IMPORT_NAME", "IMPORT_FROM", "LOAD_BUILD_CLASS"}
_MAKE_NEW = ("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "UNARY_", "COMPARE_")
_TENSOR_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
_CONTAINER_AT = {"BINARY_SUBSCR": 2, "BINARY_SLICE": 3, "LOAD_ATTR": 1}
OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floordiv", "%": "remainder", "@": "matmul", "**": "pow",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
    "+=": "add_", "-=": "sub_", "*=": "mul_", "/=": "div_", "//=": "floor_divide_", "%=": "remainder_", "**=": "pow_",
    "@=": "matmul", "&=": "iand", "|=": "ior", "^=": "ixor", "<<=": "ilshift", ">>=": "irshift",
}  # fmt: skip
OPERATORS |= {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne", "[]": "getitem"}
_UNARY = {"UNARY_NEGATIVE": "neg", "UNARY_INVERT": "invert"}


class Want(NamedTuple):
    """What is wanted of one function."""

    names: frozenset[str] = frozenset()  # the variables that are asked for by name, arguments too
    every: bool = False  # every variable that is assigned
    operations: bool = False  # what operations make that no variable takes
    follow: bool = False  # what it calls

    def __bool__(self) -> bool:
        return any(self)

    def __or__(self, other: "Want") -> "Want":
        flags = (one or another for one, another in zip(self[1:], other[1:], strict=True))
        return Want(self.names | other.names, *flags)

    def has(self, name: str) -> bool:
        return self.every or name in self.names


def arguments_of(code: CodeType) -> tuple[str, ...]:
    """The names of a function's arguments, `*rest` and `**more` too."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    return code.co_varnames[: count + bool(code.co_flags & CO_VARKEYWORDS)]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def instrument(code: CodeType, wants: Callable[[CodeType], Want], register: Callable[[Place], int]) -> CodeType:
    """A copy of code that tells what is wanted of it, and of the comprehensions in it.

    A function that it makes has its own code, and gets a copy when it is called: it may outlive the session.
    """
    want = wants(code)
    is_function = code.co_flags & CO_OPTIMIZED and code.co_flags & CO_NEWLOCALS
    copy = _Copy(code, want, register).assemble() if want and is_function else code
    constants = [
        instrument(one, wants, register) if isinstance(one, CodeType) and one.co_name in COMPREHENSIONS else one
        for one in copy.co_consts
    ]
    return copy.replace(co_consts=tuple(constants))


class _Copy:
    """The copy of one function's code."""

    def __init__(self, code: CodeType, want: Want, register: Callable[[Place], int]) -> None:
        self.original, self.want, self.register = code, want, register
        self.code = Assembly(code, split=True)
        self.code.extra_stack = 9
        self.here, self.called = self.code.local(HERE), self.code.local(CALLED)
        self.flow = Flow(self.code)
        self.assigned = set(filter(None, map(self._assigned, range(len(self.code)))))

    def assemble(self) -> CodeType:
        self._begin()
        for i, one in enumerate(self.code):
            if one.name in STORES:
                self._store(i)
            elif one.name == "STORE_ATTR":
                self._store_attribute(i)
            elif one.name in ("STORE_SUBSCR", "STORE_SLICE"):
                self._write(i)
            elif one.name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
                self._call(i)
            elif self.want.operations and i not in self.flow.stored:
                self._operate(i)
        return self.code.assemble()

    def _assigned(self, i: int) -> str | None:
        """The variable or attribute that the i-th instruction assigns to."""
        one = self.code[i]
        if one.name == "STORE_ATTR":
            return self.flow.attribute(i)
        return str(self.code.argument(one)) if one.name in STORES else None

    # What is inserted.

    def _place(self, kind: str, name: str, one: Instruction, **more: Any) -> Place:
        return Place(acts[kind], self.original, name, one.position[0] if one.position else None, **more)

    def _const(self, value: Any) -> Instruction:
        self.code.consts.append(value)
        return Instruction("LOAD_CONST", len(self.code.consts) - 1)

    def _tell(self, place: Place, extra: Instruction | None = None, begins: bool = False) -> list[Instruction]:
        """With a value on top of the stack: call the dispatcher, whose answer takes its place."""
        names = self.code.names
        if NAME not in names:
            names.append(NAME)
        load, null = Instruction("LOAD_GLOBAL", names.index(NAME) << 1), Instruction("PUSH_NULL")
        here = self._const(0) if begins else Instruction("LOAD_FAST", self.here)
        return [
            *((null, load) if NULL_COMES_LAST else (load, null)),
            Instruction("SWAP", 3),
            *(self._const(self.register(place)), here, extra or self._const(None)),
            *([Instruction("PRECALL", 4)] if "PRECALL" in OP else []),
            Instruction("CALL", 4),
        ]

    def _tell_called(self, place: Place) -> list[Instruction]:
        """With what was put aside: what is called, or what an item is taken of."""
        return [*self._tell(place, Instruction("LOAD_FAST", self.called)), *self._forget_called()]

    def _forget_called(self) -> list[Instruction]:
        """Never unbound: Python warns of that where a debugger jumps."""
        return [self._const(None), Instruction("STORE_FAST", self.called)]

    def _begin(self) -> None:
        code, original, want = self.code, self.original, self.want
        start = next(one for one in code if one.name == "RESUME")
        first = original.co_varnames[0] if original.co_argcount else ""
        is_method = first == "self" or bool(first and original.co_name == "forward")
        new = [self._variable("LOAD", first) if is_method else self._const(None)]
        new += self._tell(self._place("begin", "", start), begins=True)
        new += [Instruction("STORE_FAST", self.here), *self._forget_called()]
        for name in self._arguments() if want.names else ():
            new += [self._variable("LOAD", name), *self._tell(self._place("given", name, start))]
            new.append(self._variable("STORE", name))
        for one in new:
            one.position = NOWHERE  # so that nobody who traces is told of it
        start.after += new

    def _variable(self, what: str, name: str) -> Instruction:
        kind = "DEREF" if name in self.original.co_cellvars else "FAST"
        return Instruction(f"{what}_{kind}", self.original.co_varnames.index(name))

    def _arguments(self) -> list[str]:
        """The arguments that are wanted as variables: those to which nothing is ever assigned."""
        if self.original.co_name in COMPREHENSIONS:
            return []
        changed = set(self.assigned)
        for i, one in enumerate(self.code):
            if one.name.startswith("STORE_S") or _writes(self.flow, i):
                changed.update(self.flow.written(i))
        return [name for name in arguments_of(self.original) if name in self.want.names - changed]

    # Assignments.

    def _store(self, i: int) -> None:
        one, name = self.code[i], str(self._assigned(i))
        (makers,) = self.flow.operands[i]
        are_tensors = any(self.code[maker].name not in _NEVER_TENSORS for maker in makers)
        if not self.want.has(name) or not are_tensors or self._is_comprehensions(i, name):
            return
        at = i
        if i and self.code[i - 1].name == "COPY" and self.code[i - 1].arg == 1 and self.flow.is_used_next(i + 1):
            at = i - 1  # (y := x), whose value somebody else uses
        self.code[at].before += self._tell(self._stored(one, name, i))

    def _stored(self, one: Instruction, name: str, i: int) -> Place:
        makers = [self.code[maker] for maker in self.flow.operands[i][0]]
        older = not all(
            maker.name.startswith(_MAKE_NEW) and not str(self.code.argument(maker)).endswith("=") for maker in makers
        )
        handed_on = all(maker.name.startswith(("CALL", "LOAD_FAST", "UNPACK_")) for maker in makers)
        return self._place("stored", name, one, older=older, handed_on=handed_on)

    def _is_comprehensions(self, i: int, name: str) -> bool:
        """Whether a variable is that of a comprehension, which in newer Pythons has no function of its own."""
        if self.original.co_name in COMPREHENSIONS:
            return self.code[i].name == "STORE_FAST"
        on_stack = (self.code[maker] for makers in self.flow.stacks[i] for maker in makers)
        waits = (one for one in on_stack if one.name == "LOAD_FAST_AND_CLEAR")  # what a variable was before
        return any(self.code.argument(one) == name for one in waits)

    def _store_attribute(self, i: int) -> None:
        name = self._assigned(i)
        if name is not None and self.want.has(name):
            tell = self._tell(self._stored(self.code[i], name, i))
            self.code[i].before += [Instruction("SWAP", 2), *tell, Instruction("SWAP", 2)]

    def _write(self, i: int) -> None:
        for path in self.flow.written(i)[:1]:
            if self.want.has(path):
                place = self._place("wrote", path, self.code[i], fills=path if path in self.assigned else "")
                self.code[i].after += [self._const(None), *self._tell(place), Instruction("POP_TOP")]

    # Operators and calls.

    def _operate(self, i: int) -> None:
        one, after = self.code[i], []
        sign = self.code.argument(one)
        if one.name in ("BINARY_SUBSCR", "BINARY_SLICE"):
            name = "getitem"
        elif one.name == "LOAD_ATTR" and sign in _TENSOR_ATTRIBUTES and effect(one) == (1, 1):  # no method
            name = sign
        elif one.name in ("BINARY_OP", "COMPARE_OP") and sign in OPERATORS:
            name = OPERATORS[sign]
        elif one.name in _UNARY:
            name = _UNARY[one.name]
        else:
            return
        if one.name == "COMPARE_OP" and "TO_BOOL" in OP and one.arg & 16:  # it makes a bool of it at once
            one.arg &= ~16
            after = [Instruction("TO_BOOL")]
        place = self._place("made", name, one, older=False)
        container = 2 if sign == "[]" else _CONTAINER_AT.get(one.name)
        if container is None:
            one.after += [*self._tell(place), *after]
        else:
            one.before += [Instruction("COPY", container), Instruction("STORE_FAST", self.called)]
            one.after += self._tell_called(place)

    def _call(self, i: int) -> None:
        one, want = self.code[i], self.want
        if self.flow.path(self.flow.callee(i)) in LOOKERS:
            one.after += self._tell(self._place("looked", "", one))
        is_statement = _is_statement(self.code, i)
        is_wanted = want.every or bool(want.names) if is_statement else want.operations and i not in self.flow.stored
        if not is_wanted and not want.follow:
            return
        depth, method = _callee_depth(one), self.flow.method(i)
        start = i
        while self.code[start - 1].name in ("PRECALL", "KW_NAMES"):
            start -= 1
        put_aside = Instruction("STORE_FAST", self.called) if is_wanted else Instruction("POP_TOP")
        follow = self._follow(one, depth, method) if want.follow else []
        self.code[start].before += [Instruction("COPY", depth), *follow, put_aside]
        if is_wanted:
            place = self._place("called", method, one, **(self._statement(i, method) if is_statement else {}))
            one.after[:0] = self._tell_called(place)

    def _follow(self, call: Instruction, depth: int, method: str) -> list[Instruction]:
        """With what is called on top of the stack, too: tell of it, and change places with what is to be called."""
        first = Instruction("COPY", 5 + call.arg + (call.name == "CALL_KW"))
        has_arguments = call.name != "CALL_FUNCTION_EX" and call.arg
        tell = self._tell(self._place("follow", method, call), first if has_arguments else None)
        return [*tell, Instruction("SWAP", depth + 1)]

    def _statement(self, i: int, method: str) -> dict[str, Any]:
        """What a call whose result nobody takes may write into, or add something to."""
        written = tuple(self.flow.written(i))
        fills = written[0] if written and method and written[0] in self.assigned and self.want.has(written[0]) else ""
        return {"is_statement": True, "written": written, "fills": fills}


def _is_statement(code: Assembly, i: int) -> bool:
    """Whether nobody takes what the i-th instruction returns."""
    return i + 1 < len(code) and code[i + 1].name == "POP_TOP"


def _writes(flow: Flow, i: int) -> bool:
    """Whether the i-th instruction is a statement like `a.add_(1)`."""
    is_call = flow.code[i].name.startswith("CALL") and _is_statement(flow.code, i)
    return is_call and flow.method(i).endswith("_") and not flow.method(i).endswith("__")


def _callee_depth(call: Instruction) -> int:
    """How deep what is called lies on the stack; of a method, in older Pythons, the object whose it is."""
    if call.name == "CALL_FUNCTION_EX":
        has_keywords = 1 if "LOAD_SPECIAL" in OP else call.arg & 1  # from 3.14 on, a NULL in their place
        return (3 if NULL_COMES_LAST else 2) + has_keywords
    return call.arg + (2 if NULL_COMES_LAST else 1) + (call.name == "CALL_KW")
