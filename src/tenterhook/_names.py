"""What a value is about to be called: from the bytecode after a call to the variable that takes the result.

    spot(frame.f_code, frame.f_lasti).names     ("y",) in `y = x + 2`, ("a", "b") in `a, b = x.chunk(2)`

Nothing but the bytecode is read, so that it works without source, and the names do not depend on formatting or line
numbers. A value may wait on the stack before it is stored, as the first one in `q, k = self.q(x), self.k(x)`; what the
instructions in between put there and take away tells when its turn comes.
"""

import dis
import linecache
import types
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

_VARIABLES = ("FAST", "NAME", "GLOBAL", "DEREF")
_STORES = {f"STORE_{kind}" for kind in _VARIABLES}
_LOADS = {f"LOAD_{kind}" for kind in _VARIABLES} | {"LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_FROM_NOTHING = _LOADS | {"LOAD_CONST", "PUSH_NULL", "LOAD_CLOSURE"}
_GIVE_NOTHING = ("STORE_", "POP_", "RETURN_", "JUMP_", "DELETE_", "NOP", "KW_NAMES", "RAISE_", "LIST_APPEND", "RESUME")
_NO_STEPS = {"CACHE", "NOP", "EXTENDED_ARG", "RESUME", "NOT_TAKEN", "COPY_FREE_VARS", "MAKE_CELL", "KW_NAMES"}
# What these return is not what the operations return that they call.
_CALL_OTHERS = {"map", "filter", "list", "tuple", "set", "dict", "sum", "max", "min", "sorted", "any", "all", "next"}
_CALL_OTHERS |= {"reduce", "functools", "itertools"}


COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Step(NamedTuple):
    """One instruction: what it does, to what, and how many values it takes from the stack and puts there."""

    offset: int
    op: str
    argument: object
    takes: int
    gives: int


def steps(code: types.CodeType) -> Iterator[Step]:
    """The instructions of a function, with the fused ones of newer Pythons (STORE_FAST_LOAD_FAST) taken apart."""
    waiting: tuple[int, int] | None = None
    for instruction in dis.get_instructions(code):
        op, argument = instruction.opname, instruction.argval
        if isinstance(argument, tuple) and op.count("_FAST") == 2:
            for part, name in zip(_apart(op), argument, strict=True):
                takes = int(part.startswith("STORE"))
                yield Step(instruction.offset, part, name, takes, 1 - takes)
            continue
        if op in _NO_STEPS:
            continue
        takes, gives = _effect(instruction)
        if op == "PRECALL":  # 3.11 makes a call in two instructions, and may do it all in the first
            waiting = (instruction.offset, takes - gives)
            continue
        offset = instruction.offset
        if waiting is not None:
            (offset, more), waiting = waiting, None
            takes += more
        yield Step(offset, op.removesuffix("_CHECK").removesuffix("_BORROW"), argument, takes, gives)


def _apart(op: str) -> tuple[str, str]:
    end = op.index("_FAST") + 5
    return op[:end], op[end + 1 :]


def _effect(instruction: dis.Instruction) -> tuple[int, int]:
    op = instruction.opname
    has_argument = instruction.opcode >= dis.HAVE_ARGUMENT
    more = dis.stack_effect(instruction.opcode, instruction.arg if has_argument else None, jump=False)
    if op.removesuffix("_CHECK").removesuffix("_BORROW") in _FROM_NOTHING or op == "COPY":
        return 0, more
    if op in _ATTRIBUTES or op.startswith("UNPACK_"):
        return 1, 1 + more
    gives = 0 if op.startswith(_GIVE_NOTHING) or op == "PRECALL" else 1
    return gives - more, gives


class Spot:
    """One instruction that makes a value: what takes it, and where it is in the source."""

    def __init__(self, code: types.CodeType, lasti: int, steps: list[Step]) -> None:
        self.code = code
        self.lasti = lasti
        self.names: tuple[str | None, ...] | None = None  # more than one where the value is unpacked
        self.unpacked = False
        self.nameless = True  # it goes by its operation
        self.written: str | None = None  # the variable that a statement such as `a.add_(1)` writes into
        self.offset = -1
        at = max((i for i, step in enumerate(steps) if step.offset <= lasti), default=None)
        if at is None:
            return
        step = steps[at]
        self.offset = step.offset
        if step.op == "STORE_SUBSCR":
            self.written = _container(steps, at)
        elif step.op.startswith("UNPACK_"):  # a tensor that is unpacked is asked for its parts
            self._set(_unpacked(steps, at))
        elif not _calls_others(steps, at):
            self._set(_taker(steps, at + 1, 0))
            if at + 1 < len(steps) and steps[at + 1].op == "POP_TOP" and step.op.startswith("CALL"):
                self.written = _receiver(steps, at)
        self.nameless = self.names is None and self.written is None

    @property
    def variables(self) -> tuple[str | None, ...]:
        """The variables that take it."""
        return self.names or (self.written,)

    def _set(self, taker: str | tuple[str | None, ...] | None) -> None:
        self.unpacked = isinstance(taker, tuple)
        self.names = taker if isinstance(taker, tuple) else None if taker is None else (taker,)

    @cached_property
    def line(self) -> int:
        """The number of the line in the source."""
        found = [line for start, end, line in self.code.co_lines() if start <= self.lasti < end and line is not None]
        return found[0] if found else self.code.co_firstlineno

    @property
    def text(self) -> str:
        """The line itself, where there is source."""
        return linecache.getline(self.code.co_filename, self.line).strip()

    @property
    def source(self) -> str:
        """file:line"""
        return f"{self.code.co_filename}:{self.line}"


class Spots(dict[int, Spot]):
    """The spots of one function, by the place in its bytecode, looked at when they are first met."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code  # keeps it alive, so that its id stays its own
        self.direct: set[int] = set()  # the steps that were seen to be operations, or calls of modules
        self._steps = list(steps(code))

    def __missing__(self, lasti: int) -> Spot:
        spot = self[lasti] = Spot(self.code, lasti, self._steps)
        return spot

    def giving(self, name: str, before: int) -> Spot:
        """The spot that most likely gave a variable its value: the nearest one before another."""
        givers = self.givers.get(name, {before})
        at = self[before].offset
        return self[max((offset for offset in givers if offset < at), default=max(givers))]

    @cached_property
    def variables(self) -> set[str]:
        """The variables that are assigned."""
        return {str(step.argument) for step in self._steps if step.op in _STORES}

    @cached_property
    def givers(self) -> dict[str, set[int]]:
        """For each variable: the steps that may give it its value; -1 for an argument that stays what it is.

        Arithmetic is left out: with a tensor it is an operation, and is seen by itself.
        """
        found: dict[str, set[int]] = {}
        if self.code.co_name in COMPREHENSIONS:
            return found
        for i, step in enumerate(self._steps):
            if step.gives and not step.op.startswith(("BINARY_OP", "UNARY_", "COMPARE_", "SWAP", "UNPACK_")):
                taker = _taker(self._steps, i + 1, 0)
                for name in taker if isinstance(taker, tuple) else (taker,):
                    if name is not None and "." not in name:
                        found.setdefault(name, set()).add(step.offset)
        for step in self._steps:  # the variables of a comprehension, which has no frame of its own in newer Pythons
            if step.op == "LOAD_FAST_AND_CLEAR":
                found.pop(str(step.argument), None)
        return {**found, **{name: {-1} for name in self._arguments if name not in self.variables}}

    @property
    def _arguments(self) -> tuple[str, ...]:
        return self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount]

    def stores(self, names: tuple[str, ...]) -> list[int]:
        """Where some variables are assigned, in order."""
        return [step.offset for step in self._steps if step.op in _STORES and step.argument in names]

    @cached_property
    def loops(self) -> bool:
        """Whether code may run again after code below it."""
        return any("JUMP_BACKWARD" in step.op for step in self._steps)

    @cached_property
    def rebound(self) -> set[str]:
        """The arguments that get another value."""
        return self.variables.intersection(self._arguments)


_known: dict[int, Spots] = {}


def spots(code: types.CodeType) -> Spots:
    """The spots of a function."""
    found = _known.get(id(code))
    if found is None:
        if len(_known) > 5000:
            _known.clear()
        found = _known[id(code)] = Spots(code)
    return found


def _taker(steps: list[Step], i: int, depth: int) -> str | tuple[str | None, ...] | None:
    """The variable that takes the value which lies `depth` below the top of the stack before the i-th step."""
    for _ in range(200):
        if i >= len(steps):
            return None
        step = steps[i]
        op, argument = step.op, step.argument
        if op == "SWAP":
            assert isinstance(argument, int)
            depth = argument - 1 if depth == 0 else 0 if depth == argument - 1 else depth
        elif op == "COPY":
            if argument == depth + 1:  # a = b = value, and (a := value): the first name counts
                return _taker(steps, i + 1, 0)
            depth += 1
        elif op == "FOR_ITER":  # to where the loop ends, and the iterator below is gone
            if depth == 0:
                return None
            i = _at_offset(steps, argument)
            i += i < len(steps) and steps[i].op == "END_FOR"
            depth -= not (i < len(steps) and steps[i].op == "POP_TOP")  # newer Pythons take it off apart
            continue
        elif op.startswith("JUMP_"):
            i = _at_offset(steps, argument)
            continue
        elif step.takes > depth:
            return _taken_by(steps, i, depth)
        else:
            depth += step.gives - step.takes
        i += 1
    return None


def _at_offset(steps: list[Step], offset: object) -> int:
    return next((i for i, step in enumerate(steps) if step.offset == offset), len(steps))


def _taken_by(steps: list[Step], i: int, depth: int) -> str | tuple[str | None, ...] | None:
    step = steps[i]
    if step.op in _STORES:
        return str(step.argument)
    if step.op == "STORE_ATTR" and depth == 1 and steps[i - 1].op in _LOADS:
        return f"{steps[i - 1].argument}.{step.argument}"
    if step.op.startswith("UNPACK_"):
        return _unpacked(steps, i)
    if step.op in ("BUILD_TUPLE", "BUILD_LIST"):
        whole = _taker(steps, i + 1, 0)
        return whole[step.takes - 1 - depth] if isinstance(whole, tuple) and len(whole) == step.takes else None
    return None


def _unpacked(steps: list[Step], i: int) -> tuple[str | None, ...]:
    parts = steps[i].gives
    takers = [_taker(steps, i + 1, k) for k in range(parts)]
    return tuple(taker if isinstance(taker, str) else None for taker in takers)


def _start(steps: list[Step], i: int, needed: int) -> int | None:
    """Where the code begins that puts the values on the stack which the i-th step takes."""
    while needed > 0:
        i -= 1
        if i < 0 or steps[i].op in ("SWAP", "COPY") or "JUMP" in steps[i].op:
            return None
        needed += steps[i].takes - steps[i].gives
    return i


def _calls_others(steps: list[Step], at: int) -> bool:
    if not steps[at].op.startswith("CALL"):
        return False
    start = _start(steps, at, steps[at].takes)
    first = [step for step in steps[start:at] if step.op != "PUSH_NULL"][:1] if start is not None else []
    return any(step.op in _LOADS and step.argument in _CALL_OTHERS for step in first)


def _receiver(steps: list[Step], at: int) -> str | None:
    """In `a.add_(1)` and `F.relu(a, inplace=True)`: the variable that is written into."""
    start = _start(steps, at, steps[at].takes)
    parts = [step for step in steps[start:at] if step.op != "PUSH_NULL"] if start is not None else []
    path: list[Step] = []
    for step in parts:
        if step.op not in (_ATTRIBUTES if path else _LOADS):
            break
        path.append(step)
    if not path:
        return None
    if path[0].op == "LOAD_GLOBAL":  # a function of a module's: the first argument
        first = parts[len(path) : len(path) + 1]
        return str(first[0].argument) if first and first[0].op in _LOADS else None
    return ".".join(str(step.argument) for step in path[:-1]) or None


def _container(steps: list[Step], at: int) -> str | None:
    """In `x[:, 0] = 0`: the variable that is written into."""
    key = _start(steps, at, 1)
    if not key:
        return None
    holder = steps[key - 1]
    if holder.op in _LOADS:
        return str(holder.argument)
    if holder.op == "LOAD_ATTR" and steps[key - 2].op in _LOADS:
        return f"{steps[key - 2].argument}.{holder.argument}"
    return None
