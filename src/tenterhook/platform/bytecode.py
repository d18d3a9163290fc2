"""Bytecode, read for what becomes of a value: which variable takes it, or whether it is returned.

A value may wait on the stack before it is stored, as the first one in `q, k = self.q(x), self.k(x)`; what the
instructions in between put there and take away tells when its turn comes.

Relies on: the names and stack effects of the instructions of Python 3.11 to 3.14, as `dis` gives them.
"""

import dis
import sys
import types
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple, Union

_VARIABLES = ("FAST", "NAME", "GLOBAL", "DEREF")
STORES = {f"STORE_{kind}" for kind in _VARIABLES}
_LOADS = {f"LOAD_{kind}" for kind in _VARIABLES} | {"LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
WRITES = ("STORE_SUBSCR", "STORE_SLICE")
_FROM_NOTHING = _LOADS | {"LOAD_CONST", "PUSH_NULL", "LOAD_CLOSURE", "COPY"}
_GIVE_NOTHING: tuple[str, ...] = ("STORE_", "POP_", "RETURN_", "JUMP_", "DELETE_", "END_", "RAISE_", "RERAISE")
_GIVE_NOTHING += ("LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "MAP_ADD", "DICT_", "PRECALL")
_NEVER_GO_ON = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN_", "RAISE_", "RERAISE")
_NO_STEPS = {"CACHE", "NOP", "EXTENDED_ARG", "RESUME", "NOT_TAKEN", "COPY_FREE_VARS", "MAKE_CELL", "KW_NAMES"}
ARITHMETIC = ("BINARY_OP", "UNARY_", "COMPARE_")
# The steps whose own result an operation's may be. In others, such as LIST_EXTEND, Python calls it for itself.
OPERATIONS = ("BINARY_", "UNARY_", "COMPARE_", "CALL", "LOAD_ATTR", "UNPACK_")
# What these return is not what the operations return that they call.
_CALL_OTHERS = {"map", "filter", "list", "tuple", "set", "dict", "sum", "max", "min", "sorted", "any", "all", "next"}
_CALL_OTHERS |= {"reduce", "functools", "itertools", "math", "deque"}
_NULL = -1  # in place of a step: what a call of no method has where the object would be
_NULL_COMES_LAST = sys.version_info >= (3, 13)
LOOKERS = {"locals", "vars", "dir", "eval", "exec"}  # what may look at a function's variables without loading them
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Parts(tuple["Taker", ...]):
    """The variables that a value is unpacked into; `rest` is the one with a star."""

    rest: int | None = None

    def of(self, value: Any) -> list[Any] | None:
        """The parts of a value that they take; None where that would fail."""
        if self.rest is None:
            return list(value) if len(value) == len(self) else None
        end = len(value) - (len(self) - self.rest - 1)
        if end < self.rest:
            return None
        return [*value[: self.rest], list(value[self.rest : end]), *value[end:]]

    def together(self, value: Any, parts: list[Any]) -> Any:
        """A value like another, made of other parts."""
        if self.rest is not None:
            parts = [*parts[: self.rest], *parts[self.rest], *parts[self.rest + 1 :]]
        return parts if isinstance(value, list) else tuple(parts)


Taker = Union[str, Parts, None]  # noqa: UP007  # it refers to itself


class Exit(NamedTuple):
    """What a value is of all that a function returns: the `part`-th of so many, or, if these are 0, the whole."""

    part: int = 0
    parts: int = 0

    def of(self, taker: "Taker") -> "Taker":
        """Which of the caller's variables takes it."""
        if not self.parts:
            return taker
        if isinstance(taker, Parts) and taker.rest is None and len(taker) == self.parts:
            return taker[self.part]
        return None

    def then(self, way: "Exit | None") -> "Exit | None":
        """What it is of all that the caller returns, where what it got goes a certain way."""
        return self if way == Exit() else way if self == Exit() else None


class Step(NamedTuple):
    """One instruction: what it does, to what, and how many values it takes from the stack and puts there."""

    offset: int
    op: str
    argument: Any
    takes: int
    gives: int
    jump: int | None = None  # how many more values are there where it jumps to


class Steps(list[Step]):
    """The instructions of a function, with the fused ones of newer Pythons (STORE_FAST_LOAD_FAST) taken apart."""

    def __init__(self, code: types.CodeType) -> None:
        super().__init__(_read(code))
        self._code = code
        self._offsets = [step.offset for step in self]
        self._reached: dict[int, set[int]] = {}

    def running(self, lasti: int) -> int:
        """The step that is at a place in the code; -1 if none is."""
        return bisect_right(self._offsets, lasti) - 1

    def target(self, offset: int) -> int:
        """The step that a jump leads to."""
        return bisect_left(self._offsets, offset)

    def before(self, i: int) -> list[int]:
        """The steps after which the i-th may be the next, but for exceptions."""
        falls = i > 0 and self[i].op != "PUSH_EXC_INFO" and not self[i - 1].op.startswith(_NEVER_GO_ON)
        return [*([i - 1] if falls else []), *self._jumps.get(i, ())]

    def from_to(self, since: int, place: int, now: int) -> bool:
        """True if a function may come from one place in the code by way of another to a third."""
        first, middle, last = (max(self.running(offset), 0) for offset in (since, place, now))
        return (middle == first or middle in self._reach(first)) and last in self._reach(middle)

    def _reach(self, i: int) -> set[int]:
        """The steps that may run after the i-th."""
        if i not in self._reached:
            found, waiting = self._reached.setdefault(i, set()), [i]
            while waiting:
                new = self._after[waiting.pop()] - found
                found |= new
                waiting += new
        return self._reached[i]

    @cached_property
    def _after(self) -> list[set[int]]:
        """For each step: those that may be the next, also by an exception."""
        after: list[set[int]] = [set() for _ in self]
        for i in range(len(self)):
            for k in self.before(i):
                after[k].add(i)
        for entry in dis.Bytecode(self._code).exception_entries:  # type: ignore[attr-defined]
            for i in range(self.target(entry.start), self.target(entry.end)):
                after[i].add(self.target(entry.target))
        return after

    @cached_property
    def _jumps(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i, step in enumerate(self):
            if step.jump is not None:
                found.setdefault(self.target(step.argument), []).append(i)
        return found

    @cached_property
    def operands(self) -> list[tuple[int | None, ...]]:
        """For each step: the steps that made the values which it takes, as far as that can be told."""
        found: list[tuple[int | None, ...]] = []
        stack: list[int | None] | None = []
        waiting: dict[int, list[int | None]] = {}  # by step: what is on the stack where a jump leads to it
        for i, step in enumerate(self):
            if stack is None:  # after a jump; what only an exception leads to begins with what it has put there
                stack = waiting.pop(i, [])
            if step.jump is not None:
                there = [*stack, *[i] * step.jump] if step.jump >= 0 else stack[: step.jump]
                waiting.setdefault(self.target(step.argument), there)
            taken = stack[len(stack) - step.takes :] if step.takes else []
            found.append((*[None] * (step.takes - len(taken)), *taken))
            if step.op == "SWAP" and len(stack) >= step.argument:
                stack[-1], stack[-step.argument] = stack[-step.argument], stack[-1]
            elif step.op == "COPY":
                stack.append(stack[-step.argument] if len(stack) >= step.argument else None)
            else:
                del stack[len(stack) - len(taken) :]
                stack += self._given(i, step)
            if step.op.startswith(_NEVER_GO_ON):
                stack = None
        return found

    def _given(self, i: int, step: Step) -> list[int | None]:
        if step.op == "PUSH_NULL":
            return [_NULL]
        if step.op == "LOAD_GLOBAL" and step.gives == 2:  # and a NULL, for the call that it begins
            return [i, _NULL] if _NULL_COMES_LAST else [_NULL, i]
        return [i] * step.gives

    def path(self, i: int | None) -> str | None:
        """What a step loads, as it is written: `a`, `self.buffer`."""
        if i is None or i == _NULL:
            return None
        if self[i].op in _LOADS:
            return str(self[i].argument)
        if self[i].op in _ATTRIBUTES:
            inner = self.path(self.operands[i][0])
            return None if inner is None else f"{inner}.{self[i].argument}"
        return None

    def callee(self, i: int) -> int | None:
        """The step that loads what a call calls."""
        return next((k for k in self.operands[i] if k != _NULL), None)

    def calls_others(self, i: int) -> bool:
        """True if a call calls something that calls operations for itself, as `sum` does."""
        if not self[i].op.startswith("CALL"):
            return False
        name = self.path(self.callee(i))
        if name is not None and name.split(".")[0] in _CALL_OTHERS:
            return True
        if self[i].op != "CALL_FUNCTION_EX":
            return False
        return any(self[k].op == "CALL" and self.calls_others(k) for k in self.operands[i] if k is not None and k >= 0)

    def written(self, i: int) -> list[str]:
        """In `a.add_(1)`, `F.relu(a, inplace=True)` and `a[0] = 1`: what may be written into, as it is written."""
        if self[i].op in WRITES:
            places = [self.path(self.operands[i][1])]
        else:
            callee = self.callee(i)
            is_method = callee is not None and self[callee].op in _ATTRIBUTES
            places = [self.path(self.operands[callee][0])] if is_method and callee is not None else []
            places += [self.path(k) for k in self.operands[i][2:3]]
        return [place for place in places if place is not None]

    def taker(self, i: int, depth: int) -> Taker:
        """The variable that takes the value which lies `depth` below the top of the stack before the i-th step."""
        for _ in range(200):
            if i >= len(self):
                return None
            step = self[i]
            if step.op == "SWAP":
                depth = step.argument - 1 if depth == 0 else 0 if depth == step.argument - 1 else depth
            elif step.op == "COPY":
                if step.argument == depth + 1:  # a = b = value, and (a := value): the first name counts
                    return self.taker(i + 1, 0)
                depth += 1
            elif step.op == "FOR_ITER":  # to where the loop ends, and the iterator below is gone
                if depth == 0:
                    return None
                i = self.target(step.argument)
                i += i < len(self) and self[i].op == "END_FOR"
                depth -= not (i < len(self) and self[i].op == "POP_TOP")  # newer Pythons take it off apart
                continue
            elif step.op.startswith("JUMP_IF"):  # `or` and `and`, in older Pythons: it may not be taken at all
                return None
            elif step.op.startswith("JUMP_"):
                i = self.target(step.argument)
                continue
            elif step.takes > depth:
                return self._taken_by(i, depth)
            else:
                depth += step.gives - step.takes
            i += 1
        return None

    def _taken_by(self, i: int, depth: int) -> Taker:
        step = self[i]
        if step.op in STORES:
            return str(step.argument)
        if step.op == "STORE_ATTR" and depth == 1:
            return self.attribute(i)
        if step.op.startswith("UNPACK_"):
            return self.unpacked(i)
        if step.op in ("BUILD_TUPLE", "BUILD_LIST"):
            whole = self.taker(i + 1, 0)
            return whole[step.takes - 1 - depth] if isinstance(whole, Parts) and len(whole) == step.takes else None
        return None

    def attribute(self, i: int) -> str | None:
        """What the i-th step, which stores an attribute, assigns to: `self.h`."""
        thing = self.path(self.operands[i][1])
        return None if thing is None else f"{thing}.{self[i].argument}"

    def exit(self, i: int, depth: int = 0) -> Exit | None:
        """Where the value goes that lies `depth` below the top of the stack before the i-th step, if to the caller
        and to nobody else; None if not.
        """
        while i < len(self):
            step = self[i]
            if step.op == "JUMP_FORWARD":
                i = self.target(step.argument)
                continue
            if step.op == "SWAP":
                depth = step.argument - 1 if depth == 0 else 0 if depth == step.argument - 1 else depth
            elif step.takes > depth:
                return self._leaves_by(i, depth)
            elif step.jump is not None or step.op == "COPY" or step.op.startswith("JUMP_"):
                return None
            else:
                depth += step.gives - step.takes
            i += 1
        return None

    def _leaves_by(self, i: int, depth: int) -> Exit | None:
        step = self[i]
        if step.op == "RETURN_VALUE":
            return Exit()
        if step.op == "BUILD_TUPLE":
            return Exit(step.takes - 1 - depth, step.takes) if self.exit(i + 1) == Exit() else None
        if step.op != "STORE_FAST":
            return None
        # A variable, of which nothing is made but what is returned at once.
        found, k = None, i + 1
        while k < len(self):
            if self._leaves_block(k):
                k += 5
            elif self[k].op == "JUMP_FORWARD":
                k = self.target(self[k].argument)
            elif self[k].op == "RETURN_VALUE":
                return None if found is None else self.exit(found + 1)
            elif self[k].op not in ("LOAD_FAST", "LOAD_CONST", "BUILD_TUPLE"):
                return None
            else:
                if self[k].op in _LOADS and self[k].argument == step.argument:
                    if found is not None:
                        return None
                    found = k
                k += 1
        return None

    def _leaves_block(self, k: int) -> bool:
        """True if a `with` ends here without an exception: its exit is called with three times None."""
        some = [(step.op, step.argument) for step in self[k : k + 5]]
        return some[:3] == [("LOAD_CONST", None)] * 3 and [op for op, _ in some[3:]] == ["CALL", "POP_TOP"]

    def unpacked(self, i: int) -> Parts:
        """The variables that the i-th step unpacks a value into."""
        parts = Parts(self.taker(i + 1, k) for k in range(self[i].gives))
        if self[i].op == "UNPACK_EX":
            parts.rest = self[i].argument & 0xFF  # how many come before the one with a star
        return parts


def _read(code: types.CodeType) -> Iterator[Step]:
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
        jump = None
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            jump = dis.stack_effect(instruction.opcode, instruction.arg, jump=True)
        yield Step(offset, op.removesuffix("_CHECK").removesuffix("_BORROW"), argument, takes, gives, jump)


def _apart(op: str) -> tuple[str, str]:
    end = op.index("_FAST") + 5
    return op[:end], op[end + 1 :]


def _effect(instruction: dis.Instruction) -> tuple[int, int]:
    op = instruction.opname.removesuffix("_CHECK").removesuffix("_BORROW")
    has_argument = instruction.opcode >= dis.HAVE_ARGUMENT
    more = dis.stack_effect(instruction.opcode, instruction.arg if has_argument else None, jump=False)
    if op in _FROM_NOTHING:
        return 0, more
    if op in _ATTRIBUTES or op.startswith("UNPACK_"):
        return 1, 1 + more
    gives = 0 if op.startswith(_GIVE_NOTHING) else 1
    return (gives - more, gives) if more <= gives else (0, more)


def flat(taker: Taker) -> Iterator[str]:
    """The variables among what takes a value."""
    if isinstance(taker, str):
        yield taker
    for part in taker if isinstance(taker, Parts) else ():
        yield from flat(part)
