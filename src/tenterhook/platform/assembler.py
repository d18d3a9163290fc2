"""Code objects taken apart into instructions and put together again (CPython 3.11 to 3.14).

    code = Assembly(function.__code__)
    code[i].before += [...]            runs before the i-th instruction, also where a jump leads to it
    code[i].after += [...]             runs after it, where nothing jumps
    function.__code__ = code.assemble()

Jumps, the exception table and line numbers follow. Inserted instructions have the source position of the one they are
inserted at, so that tracebacks, debuggers and coverage tools see the lines that they would have seen.

Relies on: the layout of CPython's bytecode, inline caches, exception table and location table, which each minor version
may change; `VERSIONS` lists those on which the round trip was checked.
"""

import dis
import opcode
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from types import CodeType
from typing import Any

VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 14))
Position = tuple[int | None, int | None, int | None, int | None]
NOWHERE: Position = (None, None, None, None)
OP = {name: code for name, code in dis.opmap.items() if code < 256}  # without pseudo-instructions
JUMPS = {dis.opname[op] for op in (*dis.hasjrel, *dis.hasjabs)}
_BACKWARD = {name for name in OP if "JUMP_BACKWARD" in name} | ({"END_ASYNC_FOR"} & JUMPS)  # in 3.14 that jumps back
_VARIABLES = {dis.opname[op] for op in (*dis.haslocal, *dis.hasfree)}  # one numbering for local and closure variables
_counts: Any = opcode._inline_cache_entries  # type: ignore[attr-defined]
_CACHES = {name: _counts[op] if isinstance(_counts, list) else _counts.get(name, 0) for name, op in OP.items()}
_ATTRIBUTE_SHIFT = 0 if sys.version_info < (3, 12) else 1  # the lowest bit says whether a method is loaded
_COMPARE_SHIFT = {(3, 11): 0, (3, 12): 4}.get(sys.version_info[:2], 5)


def unsupported() -> str:
    """Why code cannot be taken apart here; empty where it can."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in VERSIONS:
        return f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
    return "a free-threaded build" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""


class Instruction:
    """One instruction, with what is inserted before and after it."""

    __slots__ = ("after", "arg", "before", "name", "offset", "position", "target")

    def __init__(self, name: str, arg: int = 0, position: Position | None = None, offset: int = -1) -> None:
        self.name, self.arg, self.position, self.offset = name, arg, position, offset
        self.target: Instruction | None = None  # where it jumps to
        self.before: list[Instruction] = []
        self.after: list[Instruction] = []

    @property
    def size(self) -> int:
        """In units of two bytes, with its caches and its EXTENDED_ARGs."""
        return max(1, (self.arg.bit_length() + 7) // 8) + _CACHES[self.name]

    def bytes(self, size: int) -> bytes:
        caches = _CACHES[self.name]
        prefixes = [(OP["EXTENDED_ARG"], self.arg >> 8 * k & 255) for k in range(size - caches - 1, 0, -1)]
        units = [*prefixes, (OP[self.name], self.arg & 255), *[(OP["CACHE"], 0)] * caches]
        return bytes(byte for unit in units for byte in unit)


class Assembly(list[Instruction]):
    """The instructions of a code object.

    `split`: for those who insert. Instructions on two variables become two, borrowed references become plain ones.
    """

    def __init__(self, code: CodeType, split: bool = False) -> None:
        self.code = code
        self.consts, self.names = list(code.co_consts), list(code.co_names)
        cells = [name for name in code.co_cellvars if name not in code.co_varnames]
        self.variables = [*code.co_varnames, *cells, *code.co_freevars]
        self.extra_locals: list[str] = []
        self.extra_stack = 0
        self.end = Instruction("NOP")  # stands for the place after the last one
        self._read()
        if split:
            self._split()

    def _read(self) -> None:
        raw, positions = self.code.co_code, list(self.code.co_positions())
        starts: list[int] = []
        i = 0
        while i < len(raw):
            start, arg = i, raw[i + 1]
            while raw[i] == OP["EXTENDED_ARG"]:
                i += 2
                arg = arg << 8 | raw[i + 1]
            starts.append(start)
            self.append(Instruction(dis.opname[raw[i]], arg, positions[i // 2], i))
            i += 2 + 2 * _CACHES[self[-1].name]
        self.end.offset = len(raw)

        def at(offset: int) -> Instruction:
            return self.end if offset == len(raw) else self[bisect_right(starts, offset) - 1]

        for one in self:
            if one.name in JUMPS:
                after = one.offset + 2 + 2 * _CACHES[one.name]
                one.target = at(after + (-2 if one.name in _BACKWARD else 2) * one.arg)
        self.handlers = [(at(a), at(b), at(c), depth) for a, b, c, depth in _read_exceptions(self.code)]

    def _split(self) -> None:
        for i in range(len(self) - 1, -1, -1):
            one = self[i]
            first, second = _names(one.name)
            if second:
                self.insert(i + 1, Instruction(second, one.arg & 15, one.position, one.offset))
                one.arg >>= 4
            one.name = first

    def argument(self, one: Instruction) -> Any:
        """What an instruction's argument stands for: a variable, an attribute, a constant, an operator."""
        name, arg = one.name, one.arg
        if name in _VARIABLES:
            return self.variables[arg]
        if name in ("LOAD_CONST", "RETURN_CONST", "KW_NAMES"):
            return self.consts[arg]
        if name == "BINARY_OP":
            return opcode._nb_ops[arg][1]  # type: ignore[attr-defined]
        if name == "COMPARE_OP":
            return dis.cmp_op[arg >> _COMPARE_SHIFT]
        if OP[name] not in dis.hasname:
            return arg
        shifts = {"LOAD_GLOBAL": 1, "LOAD_ATTR": _ATTRIBUTE_SHIFT, "LOAD_SUPER_ATTR": 2}
        return self.names[arg >> shifts.get(name, 0)]

    def local(self, name: str) -> int:
        """The number of a local variable that the code itself does not have."""
        if name not in self.extra_locals:
            number = self.code.co_nlocals + len(self.extra_locals)
            for one in self._all():
                if one.name in _VARIABLES and one.arg >= number:  # those of closures come after it
                    one.arg += 1
            self.extra_locals.append(name)
            self.variables.insert(number, name)
        return self.code.co_nlocals + self.extra_locals.index(name)

    def _all(self) -> Iterator[Instruction]:
        for one in self:
            yield from one.before
            yield one
            yield from one.after

    def assemble(self) -> CodeType:
        """The code object."""
        flat = [*self._all(), self.end]
        for one in self:
            for new in (*one.before, *one.after):
                new.position = new.position or one.position
        where = {id(one): i for i, one in enumerate(flat)}
        first = {id(one): where[id(one.before[0] if one.before else one)] for one in (*self, self.end)}
        starts, sizes = _place(flat, first)
        table = bytearray()
        for start, end, target, depth in self.handlers:
            a, b, c = (starts[first[id(one)]] for one in (start, end, target))
            _write_number(table, a, 64 << 1)
            for number in (b - a, c, depth):
                _write_number(table, number)
        code = self.code
        return code.replace(
            co_code=b"".join(one.bytes(size) for one, size in zip(flat[:-1], sizes, strict=True)),
            co_consts=tuple(self.consts),
            co_names=tuple(self.names),
            co_varnames=(*code.co_varnames, *self.extra_locals),
            co_nlocals=code.co_nlocals + len(self.extra_locals),
            co_stacksize=code.co_stacksize + self.extra_stack,
            co_exceptiontable=bytes(table),
            co_linetable=_write_positions(code.co_firstlineno, zip(flat[:-1], sizes, strict=True)),
        )


def _names(name: str) -> tuple[str, str]:
    """STORE_FAST_LOAD_FAST: two instructions in one, with four bits of the argument for each."""
    name = name.replace("_BORROW", "")
    if name.count("_FAST") < 2:
        return name, ""
    end = name.index("_FAST") + len("_FAST")
    return name[:end], name[end + 1 :]


def _place(flat: list[Instruction], first: dict[int, int]) -> tuple[list[int], list[int]]:
    """Where each instruction begins, and its size; sets the arguments of the jumps, which may make them longer."""
    sizes = [one.size for one in flat[:-1]]
    while True:
        starts = list(accumulate(sizes, initial=0))
        for i, one in enumerate(flat):
            if one.target is not None:
                distance = starts[first[id(one.target)]] - starts[i + 1]
                one.arg = -distance if one.name in _BACKWARD else distance
        longer = [max(size, one.size) for one, size in zip(flat[:-1], sizes, strict=True)]
        if longer == sizes:
            return starts, sizes
        sizes = longer


def _read_exceptions(code: CodeType) -> Iterator[tuple[int, int, int, int]]:
    data = iter(code.co_exceptiontable)

    def number(byte: int) -> int:
        value = byte & 63
        while byte & 64:
            byte = next(data)
            value = value << 6 | byte & 63
        return value

    for byte in data:
        start = number(byte) * 2
        length, target, depth = (number(next(data)) for _ in range(3))
        yield start, start + length * 2, target * 2, depth


def _write_number(table: bytearray, value: int, mark: int = 0) -> None:
    """In groups of six bits, the highest first."""
    groups = [value & 63]
    while value := value >> 6:
        groups.append(value & 63 | 64)
    groups[-1] |= mark
    table += bytes(reversed(groups))


def _write_positions(line: int, instructions: Iterable[tuple[Instruction, int]]) -> bytes:
    """The table of source positions: in runs of at most eight units."""
    table = bytearray()
    runs: list[tuple[Position, int]] = []
    for one, size in instructions:
        position = one.position or NOWHERE
        if runs and runs[-1][0] == position:
            size += runs.pop()[1]
        runs.append((position, size))
    for (start, end, column, end_column), length in runs:
        for units in (*[8] * (length // 8), *([length % 8] if length % 8 else [])):
            kind = 15 if start is None else 13 if column is None or end_column is None else 14
            table.append(0x80 | kind << 3 | units - 1)
            if start is None:
                continue
            delta, line = start - line, start
            _write_low_first(table, -delta << 1 | 1 if delta < 0 else delta << 1)
            if column is not None and end_column is not None:
                for value in ((end or start) - start, column + 1, end_column + 1):
                    _write_low_first(table, value)
    return bytes(table)


def _write_low_first(table: bytearray, value: int) -> None:
    while value > 63:
        table.append(value & 63 | 64)
        value >>= 6
    table.append(value)
