"""What the instructions of a function do with the values on its stack: who made what is stored, called or returned.

Relies on: the names of CPython's instructions and `dis.stack_effect`.
"""

import dis
import sys
from collections.abc import Iterator
from functools import cached_property, lru_cache
from types import CodeType

from tenterhook.platform.assembler import OP, Assembly, Instruction

_KINDS = ("FAST", "NAME", "GLOBAL", "DEREF")
STORES = {f"STORE_{kind}" for kind in _KINDS}
LOADS = {f"LOAD_{kind}" for kind in (*_KINDS, "FAST_CHECK", "CLASSDEREF", "FROM_DICT_OR_DEREF")}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_METHODS = ATTRIBUTES | {"LOAD_SUPER_ATTR"}
_FROM_NOTHING = LOADS | {"LOAD_CONST", "PUSH_NULL", "LOAD_CLOSURE", "COPY", "LOAD_FAST_AND_CLEAR"}
_GIVE_NOTHING = ("STORE_", "POP_", "RETURN_", "JUMP_", "DELETE_", "END_", "RAISE_", "RERAISE")
_INTO_ONE_BELOW = ("LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "MAP_ADD", "DICT_")
# 3.11 makes a call in two instructions: the second takes what the call takes.
_NOTHING = {"CACHE", "NOP", "RESUME", "NOT_TAKEN", "COPY_FREE_VARS", "MAKE_CELL", "KW_NAMES", "PRECALL"}
_LEAVE = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN_VALUE", "RETURN_CONST", "RAISE_", "RERAISE")
_JUMPS_ON = ("JUMP_", "FOR_ITER", "SEND")  # what follows an expression is where they lead
_FAR = 200  # instructions: more than an expression has
LOOKERS = {"locals", "vars", "dir", "eval", "exec"}  # what may look at a function's variables without loading them
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
NULL_COMES_LAST = sys.version_info >= (3, 13)  # on the stack, where a call calls no method
_has_argument = getattr(dis, "hasarg", None)
Makers = frozenset[int]  # the instructions that may have made a value, by number
_NOBODY: Makers = frozenset()  # of an exception


class Flow:
    """For each instruction of an assembly: the values that it takes from the stack, by who made them."""

    def __init__(self, code: Assembly) -> None:
        self.code = code
        self.operands: list[tuple[Makers, ...]] = []
        self.stacks: list[tuple[Makers, ...]] = []  # all that is there when an instruction takes those
        self.number = {id(one): i for i, one in enumerate(code)}
        self._run()

    def _run(self) -> None:
        arriving: dict[int, list[Makers]] = {}  # by instruction: the stack where a jump or an exception leads to it
        handlers = self._handlers()
        stack: list[Makers] | None = []
        for i, one in enumerate(self.code):
            if id(one) in arriving:
                stack = _merge(stack, arriving[id(one)])
            stack = [] if stack is None else stack
            if i in handlers:
                target, depth = handlers[i]
                there = [*stack[: depth >> 1], *[_NOBODY] * ((depth & 1) + 1)]
                arriving[id(target)] = _merge(arriving.get(id(target)), there)
            takes, gives = effect(one)
            needs = one.arg if one.name in ("SWAP", "COPY") else takes
            stack[:0] = [_NOBODY] * (needs - len(stack))
            if one.target is not None:
                there = _after_jump(one, stack, i)
                arriving[id(one.target)] = _merge(arriving.get(id(one.target)), there)
            self.stacks.append(tuple(stack))
            self.operands.append(self.stacks[-1][len(stack) - takes :])
            if one.name == "SWAP":
                stack[-1], stack[-one.arg] = stack[-one.arg], stack[-1]
            elif one.name == "COPY":
                stack.append(stack[-one.arg])
            else:
                del stack[len(stack) - takes :]
                stack += [frozenset((i,))] * gives
            if one.name.startswith(_LEAVE):
                stack = None

    def _handlers(self) -> dict[int, tuple[Instruction, int]]:
        """By the number of an instruction: where an exception in it leads to, and how much of the stack stays."""
        ends = {**self.number, id(self.code.end): len(self.code)}
        return {
            i: (target, depth)
            for start, end, target, depth in self.code.handlers
            for i in range(ends[id(start)], ends[id(end)])
        }

    @cached_property
    def stored(self) -> set[int]:
        """The instructions of which a variable takes the result, or its parts."""
        found: set[int] = set()
        waiting: list[int] = []
        for i, one in enumerate(self.code):
            if one.name in STORES or (one.name == "STORE_ATTR" and self.attribute(i) is not None):
                waiting += self.operands[i][0]
        while waiting:
            maker = waiting.pop()
            found.add(maker)
            if self.code[maker].name.startswith("UNPACK_"):
                for whole in self.operands[maker][0] - found:
                    waiting.append(whole)
                    if self.code[whole].name in ("BUILD_TUPLE", "BUILD_LIST"):
                        waiting += _NOBODY.union(*self.operands[whole])
        return found

    def path(self, makers: Makers) -> str | None:
        """What some instruction loads, as it is written: `a`, `self.buffer`."""
        if len(makers) != 1:
            return None
        (i,) = makers
        one = self.code[i]
        if one.name in LOADS:
            return str(self.code.argument(one))
        if one.name in ATTRIBUTES:
            thing = self.path(self.operands[i][0])
            return None if thing is None else f"{thing}.{self.code.argument(one)}"
        return None

    def attribute(self, i: int) -> str | None:
        """What the i-th instruction, which stores an attribute, assigns to: `self.h`."""
        thing = self.path(self.operands[i][1])
        return None if thing is None else f"{thing}.{self.code.argument(self.code[i])}"

    def callee(self, i: int) -> Makers:
        """Who made what a call calls; of a method in older Pythons, the one that loads it."""
        return next((makers for makers in self.operands[i] if not self._is_null(makers)), _NOBODY)

    def _is_null(self, makers: Makers) -> bool:
        return any(self.code[maker].name == "PUSH_NULL" for maker in makers)

    def method(self, i: int) -> str:
        """The name of the attribute that a call calls, if it calls one."""
        names = [one for one in map(self.code.__getitem__, self.callee(i)) if one.name in _METHODS]
        return str(self.code.argument(names[0])) if names else ""

    def written(self, i: int) -> list[str]:
        """In `a.add_(1)`, `F.relu(a, inplace=True)` and `a[0] = 1`: what may be written into, as it is written."""
        if not self.code[i].name.startswith("CALL"):  # STORE_SUBSCR
            found = [self.path(self.operands[i][1])]
        else:
            callees = [k for k in self.callee(i) if self.code[k].name in ATTRIBUTES]
            found = [self.path(makers) for k in callees for makers in self.operands[k]]
            found += [self.path(makers) for makers in self.operands[i][2:]]
        return [path for path in found if path is not None]

    def is_used_next(self, i: int) -> bool:
        """Whether what is on top of the stack before the i-th instruction goes to anything but variables and the like.

        A pattern of `match` keeps it there, until nobody wants it.
        """
        depth = 0
        for _ in range(_FAR):
            one = self.code[i]
            takes, gives = effect(one)
            if one.name == "SWAP":
                depth = {0: one.arg - 1, one.arg - 1: 0}.get(depth, depth)
            elif takes > depth:
                is_value = takes == depth + 1
                return not (is_value and one.name.startswith(("STORE_", "UNPACK_", "POP_TOP")))
            elif one.target is not None and one.name.startswith(_JUMPS_ON):
                depth += dis.stack_effect(OP[one.name], one.arg, jump=True)
                i = self.number[id(one.target)]
                continue
            else:
                depth += gives - takes
            i += 1
        return True


def _merge(one: list[Makers] | None, other: list[Makers]) -> list[Makers]:
    if one is None or len(one) != len(other):
        return list(other)
    return [a | b for a, b in zip(one, other, strict=True)]


def _after_jump(one: Instruction, stack: list[Makers], i: int) -> list[Makers]:
    more = dis.stack_effect(OP[one.name], one.arg, jump=True)
    return [*stack, *[frozenset((i,))] * more] if more >= 0 else stack[:more]


def effect(one: Instruction) -> tuple[int, int]:
    """How many values an instruction takes from the stack, and how many it puts there, if it does not jump."""
    name, op = one.name, OP[one.name]
    has_argument = op in _has_argument if _has_argument else op >= dis.HAVE_ARGUMENT
    more = dis.stack_effect(op, one.arg if has_argument else None, jump=False)
    if name in _NOTHING:
        return 0, 0
    if name == "CALL":
        return one.arg + 2, 1
    if name in _FROM_NOTHING:
        return 0, more
    if name in ATTRIBUTES or name.startswith(("UNPACK_", "LOAD_SPECIAL")):
        return 1, 1 + more
    if name == "LOAD_SUPER_ATTR":
        return 3, 3 + more
    gives = 0 if name.startswith((*_GIVE_NOTHING, *_INTO_ONE_BELOW)) else 1
    return (gives - more, gives) if more <= gives else (0, more)


def looks_at_variables(code: CodeType) -> bool:
    """Whether a function calls `locals` or the like."""
    return not LOOKERS.isdisjoint(code.co_names) and _loads_looker(code)


@lru_cache(maxsize=1000)
def _loads_looker(code: CodeType) -> bool:
    names = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return not LOOKERS.isdisjoint(names)


def loads(code: Assembly) -> Iterator[tuple[str, str]]:
    """Each instruction with its argument, in words, for those who look for an order of names."""
    for one in code:
        if one.name not in _NOTHING:
            yield one.name, str(code.argument(one))
