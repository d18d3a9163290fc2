"""What a value is about to be called: from the bytecode after a call to the variable that takes the result.

    spots(frame.f_code)[frame.f_lasti].taker     "y" in `y = x + 2`, ("a", "b") in `a, b = x.chunk(2)`

Nothing but the bytecode is read, so that it works without source, and the names do not depend on formatting or line
numbers.
"""

import inspect
import linecache
import types
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from tenterhook.platform.bytecode import (
    ARITHMETIC,
    COMPREHENSIONS,
    LOOKERS,
    OPERATIONS,
    STORES,
    WRITES,
    Exit,
    Steps,
    Taker,
    flat,
)


class Spot:
    """One instruction that makes a value: what takes it, and where it is in the source."""

    def __init__(self, code: types.CodeType, lasti: int, steps: Steps) -> None:
        self.code = code
        self.lasti = lasti
        self.offset = -1
        self.taker: Taker = None
        self.unpacks = False  # whether it is itself what unpacks a value
        self.exit: Exit | None = None  # if it is returned, and nobody but the caller gets it
        self.called: str | None = None  # what a call calls, as it is written
        self.is_statement = False  # nobody takes what it returns
        self.written: list[str] = []  # what a statement such as `a.add_(1)` may write into
        self.writes_into: str | None = None  # and what it was seen to write into, which it says itself
        if (at := steps.running(lasti)) < 0:
            return
        step, following = steps[at], steps[at + 1] if at + 1 < len(steps) else None
        self.offset = step.offset
        if step.op in WRITES:
            self.is_statement = True
            self.written = steps.written(at)
        elif step.op.startswith("UNPACK_"):  # a tensor that is unpacked is asked for its parts
            self.unpacks = True
            self.taker = steps.unpacked(at)
        elif step.op.startswith(OPERATIONS) and not step.op.startswith("CALL_INTRINSIC"):
            if step.op.startswith("CALL"):
                self.called = steps.path(steps.callee(at))
            if not steps.calls_others(at):
                self.taker = steps.taker(at + 1, 0)
                self.exit = steps.exit(at + 1)
                if following is not None and following.op == "POP_TOP" and step.op.startswith("CALL"):
                    self.is_statement = True
                    self.written = steps.written(at)

    @property
    def says_what_it_writes(self) -> bool:
        """Whether a statement can write into nothing but what it says first: `a.add_(1)`, `a[0] = 1`."""
        if self.called is None:
            return True
        thing, _, method = self.called.rpartition(".")
        return method.endswith("_") and [thing] == self.written[:1]

    @property
    def is_nameless(self) -> bool:
        """Whether it goes by its operation."""
        return self.taker is None and not self.is_statement

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that take it."""
        return frozenset(flat(self.taker))

    @cached_property
    def is_shared(self) -> bool:
        """Whether an attribute takes it, or a variable of an enclosing function."""
        return any("." in name or name in self.code.co_freevars for name in self.variables)

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
        self._steps = Steps(code)
        self.proven: set[int] = set()  # the arithmetic that was seen to be an operation of torch
        self.found: dict[object, Any] = {}  # what sessions have found out, by what they want: see `Here`

    def __missing__(self, lasti: int) -> Spot:
        spot = self[lasti] = Spot(self.code, lasti, self._steps)
        return spot

    @cached_property
    def called(self) -> set[str]:
        """The names that are called, and of what they are attributes."""
        calls = (self[step.offset].called for step in self._steps if step.op.startswith("CALL"))
        return {part for path in calls if path is not None for part in path.split(".")}

    def calls_giving(self, name: str) -> list[Spot | None]:
        """The calls that give a variable its value; None for something else that does."""
        found = [self[offset] if offset >= 0 else None for offset in self.givers.get(name, ())]
        return [spot if spot is not None and spot.called is not None else None for spot in found]

    def giving(self, name: str, before: int) -> Spot:
        """The spot that most likely gave a variable its value: the nearest one before another."""
        givers = self.givers.get(name, set()) | self.arithmetic.get(name, set()) or {before}
        at = self[before].offset
        return self[max((offset for offset in givers if offset < at), default=max(givers))]

    @cached_property
    def variables(self) -> set[str]:
        """The variables that are assigned."""
        return {str(step.argument) for step in self._steps if step.op in STORES}

    @cached_property
    def arithmetic(self) -> dict[str, set[int]]:
        """For each variable: the sums, products, comparisons and so on that may give it its value.

        With a tensor each is an operation, and is seen by itself; with an object of Python's it may be anything.
        """
        return self._giving(lambda op: op.startswith(ARITHMETIC))

    @cached_property
    def givers(self) -> dict[str, set[int]]:
        """For each variable: the other steps that may give it its value; -1 for an argument that stays what it is."""
        found = self._giving(lambda op: not op.startswith((*ARITHMETIC, "SWAP", "UNPACK_")))
        for i, step in enumerate(self._steps):
            if step.op == "COPY" and step.argument == 1:  # `a = b = x`: what takes it next
                for name in flat(self._steps.taker(i + 1, 1)):
                    found.setdefault(name, set()).add(step.offset)
        changed = self.variables | self._written
        arguments = () if self.code.co_name in COMPREHENSIONS else self._arguments
        return {**found, **{name: {-1} for name in arguments if name not in changed}}

    def _giving(self, counts: Callable[[str], bool]) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        if self.code.co_name in COMPREHENSIONS:
            return found
        for i, step in enumerate(self._steps):
            if step.gives and counts(step.op):
                for name in flat(self._steps.taker(i + 1, 0)):
                    found.setdefault(name, set()).add(step.offset)
        for step in self._steps:  # the variables of a comprehension, which has no frame of its own in newer Pythons
            if step.op == "LOAD_FAST_AND_CLEAR":
                found.pop(str(step.argument), None)
        return found

    @cached_property
    def _written(self) -> set[str]:
        """The variables that statements write into, as far as that can be told before they run."""
        found: set[str] = set()
        for i, step in enumerate(self._steps):
            spot = self[step.offset] if step.op.startswith(("CALL", *WRITES)) else None
            if spot is not None and spot.is_statement:
                callee = self._steps.path(self._steps.callee(i)) if step.op.startswith("CALL") else "_"
                found.update(spot.written if (callee or "").endswith("_") else ())
        return found

    @property
    def _arguments(self) -> tuple[str, ...]:
        return self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount]

    @cached_property
    def _stores(self) -> dict[str, list[int]]:
        """For each variable and attribute: where it is assigned, in order."""
        found: dict[str, list[int]] = {}
        for i, step in enumerate(self._steps):
            if (name := self._stored(i)) is not None:
                found.setdefault(name, []).append(step.offset)
        return found

    def _stored(self, i: int) -> str | None:
        """What the i-th step assigns to, or deletes: `y`, `self.h`."""
        step = self._steps[i]
        if step.op == "STORE_ATTR":
            return self._steps.attribute(i)
        return str(step.argument) if step.op in STORES or step.op == "DELETE_FAST" else None

    def stores(self, names: Iterable[str]) -> list[int]:
        """Where some variables are assigned, in order."""
        return sorted(offset for name in names for offset in self._stores.get(name, ()))

    def stored_at(self, name: str, made: int) -> int:
        """Where a variable takes what was made for it at a place; -1 if that cannot be told."""
        return next((offset for offset in self._stores.get(name, ()) if offset > made), -1)

    def is_assigned(self, name: str, before: int) -> bool:
        """Whether a variable was assigned before a place, whichever way the code took there."""
        here = self._steps[: max(self._steps.running(before), 0)]
        return not any(step.jump is not None for step in here) and name in map(self._stored, range(len(here)))

    def keeps(self, lasti: int) -> bool:
        """Whether what is made at a place stays in a function mode: `log(y.abs())`, but not `func(x)`."""
        spot, steps = self[lasti], self._steps
        at = steps.running(lasti)
        if steps[at].op.startswith("CALL"):
            called = steps.callee(at)
            if called is None or steps[called].argument in ("__torch_function__", *self.code.co_varnames[1:2]):
                return False
        return spot.exit is None and spot.variables.isdisjoint(self._returned)

    @cached_property
    def _returned(self) -> set[str]:
        """The variables and attributes that the function returns, as they are."""
        paths = ((self._steps.path(i), self._steps.exit(i + 1)) for i in range(len(self._steps)))
        return {path for path, leaves_by in paths if path is not None and leaves_by is not None}

    def may_assign(self, name: str, since: int, now: int, but: int = -1) -> bool:
        """Whether a variable may have been assigned here from one place to another, other than at a third."""
        return self.passes(since, [offset for offset in self._stores.get(name, ()) if offset != but], now)

    def lines(self, wanted: Callable[[Spot], bool], names: Iterable[str]) -> frozenset[int] | None:
        """The lines with an operation that is wanted, or with an assignment to some variables; None if not known."""
        operations = (step.offset for step in self._steps if step.op.startswith((*OPERATIONS, *WRITES)))
        offsets = [*(offset for offset in operations if wanted(self[offset])), *self.stores(names)]
        ranges = list(self.code.co_lines())
        found = {line for offset in offsets for start, end, line in ranges if start <= offset < end}
        return frozenset(line for line in found if line is not None) if None not in found else None

    def passes(self, since: int, places: list[int], now: int) -> bool:
        """Whether some way from one place to another leads by one of some others."""
        return any(self._steps.from_to(since, place, now) for place in places)

    def is_fresh(self, name: str, now: int) -> bool:
        """Whether a variable was assigned on every way to a place, and nothing has used it since.

        Nor was anything called: it may have switched gradients or autocast on or off.
        """
        code = self.code
        if name not in code.co_varnames or name in code.co_cellvars or not LOOKERS.isdisjoint(code.co_names):
            return False
        steps, waiting, visited = self._steps, [self._steps.running(now)], set()
        while waiting:
            i = waiting.pop()
            if i in visited:
                continue
            visited.add(i)
            before = steps.before(i)
            if not before:
                return False  # where the function begins, or an exception is caught
            for k in before:
                step = steps[k]
                if step.op.startswith(("CALL", "BEFORE_", "SEND", "YIELD_")):
                    return False
                if step.argument != name or "_FAST" not in step.op:
                    waiting.append(k)
                elif step.op != "STORE_FAST" or (k and steps[k - 1].op == "COPY"):  # it is in use besides
                    return False
        return True

    def is_last_giver(self, name: str, made: int, now: int) -> bool:
        """Whether nothing else that may give a variable its value lies on the way from one place to another."""
        others = (self.givers.get(name, set()) | self.arithmetic.get(name, set())) - {made, -1}
        if made < now:
            return not any(made < other < now for other in others)
        return any(
            end >= made and start <= now and not any(made < other <= end or start <= other < now for other in others)
            for end, start in self._backward
        )

    @cached_property
    def _backward(self) -> list[tuple[int, int]]:
        return [(step.offset, step.argument) for step in self._steps if "JUMP_BACKWARD" in step.op]

    @property
    def loops(self) -> bool:
        """Whether code may run again after code below it."""
        return bool(self._backward)

    @cached_property
    def shared(self) -> set[str]:
        """What other functions may assign, too: attributes, and variables of an enclosing or enclosed one."""
        return {name for name in self._stores if "." in name}.union(self.code.co_cellvars, self.code.co_freevars)

    @cached_property
    def rebound(self) -> set[str]:
        """What had a value before, and gets another: arguments, attributes, variables of an enclosing function."""
        code = self.code
        extra = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        arguments = code.co_varnames[: len(self._arguments) + extra]
        return {name for name in self._stores if name in arguments or "." in name or name in code.co_freevars}


_known: dict[int, Spots] = {}


def spots(code: types.CodeType) -> Spots:
    """The spots of a function."""
    found = _known.get(id(code))
    if found is None:
        if len(_known) > 5000:
            _known.clear()
        found = _known[id(code)] = Spots(code)
    return found
