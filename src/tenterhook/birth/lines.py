"""Which line of the user's code runs, and in which module."""

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from tenterhook.platform.frames import CALLS, frame_here, frames_from, read_variable

_OURS = str(Path(__file__).parents[1])
_TORCHS = str(Path(torch.__file__).parent)
_NO_CODE_OF_THE_USER = (_TORCHS, _OURS, "<frozen")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code that ran, and the address of what it assigns, or of the module that it belongs to."""

    file: str
    number: int
    function: str
    address: str

    @property
    def text(self) -> str:
        """As it is written."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def short_file(self) -> str:
        """The file, from the folder where the program was started if it is in it."""
        try:
            return str(Path(self.file).relative_to(Path.cwd()))
        except ValueError:
            return self.file

    def __str__(self) -> str:
        return f"{self.short_file}:{self.number}, in {self.function}"


class Lines:
    """Tells which line runs now. `names` are those of modules, by id."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def here(self) -> Line | None:
        """The innermost line that is neither torch's nor ours; None where no code of the user's runs."""
        line: tuple[str, int, str] | None = None
        path: list[str] = []  # from the innermost function out to the forward of a module
        inside = ""
        for frame in frames_from(frame_here(1)):
            code = frame.f_code
            if code.co_filename == CALLS:
                name = self._module_of(frame)
                if name is not None:
                    inside = inside or name  # a layer, not the Sequential that calls it
                    if line is not None:
                        break
            elif not code.co_filename.startswith(_NO_CODE_OF_THE_USER):
                line = line or (code.co_filename, frame.f_lineno, code.co_qualname)
                if inside:
                    break  # a module of torch's, called from this line
                path.append(code.co_name)
        else:
            path = []  # outside of every module that has a name
        if line is None:
            return None
        return Line(*line, _address(inside, path, line[0], line[1]))

    def _module_of(self, frame: FrameType) -> str | None:
        module = read_variable(frame, "self")
        return self._names.get(id(module)) if isinstance(module, nn.Module) else None


def _address(module: str, path: list[str], file: str, number: int) -> str:
    """Of the variable that a line assigns, or of the module; empty outside of modules."""
    if not module or not path:
        return module
    functions = path[-2::-1]  # without the module's own forward
    if not all(map(str.isidentifier, functions)):
        return module  # a lambda has no name
    variable = variable_at(file, number)
    inner = [*functions, *([variable] if variable else [])]
    return "/".join([module, *inner]) if variable or functions else module


def variable_at(file: str, number: int) -> str | None:
    """The variable that the statement on a line assigns."""
    found = None
    for first, last, name in _assignments(file):
        if first <= number <= last:
            found = name  # the innermost comes last
    return found


@functools.lru_cache(maxsize=256)
def _assignments(file: str) -> tuple[tuple[int, int, str], ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(_assigned(tree))


def _assigned(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and isinstance(target, ast.Name):
            yield node.lineno, node.end_lineno or node.lineno, target.id
