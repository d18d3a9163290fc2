"""A model that torch.compile runs: nobody looks inside, so it is compiled part by part, from the whole to its parts.

The whole is compared first. Where it differs by more than rounding, each module that it calls is compiled by itself and
given what a gives it; the first of these that differs is taken apart in the same way.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tenterhook.addresses.grammar import escape
from tenterhook.addresses.modules import unwrap
from tenterhook.comparing.apart import SAME, Apart, apart
from tenterhook.comparing.comparison import Comparison, First, Row
from tenterhook.comparing.leaves import partners, tensors_of
from tenterhook.comparing.side import Side
from tenterhook.comparing.source import Event
from tenterhook.comparing.tolerance import is_rounding, length_of
from tenterhook.comparing.why import code_of
from tenterhook.platform import compiler
from tenterhook.values.inputs import Inputs, call_with
from tenterhook.values.tree import describe, rebuild_live
from tenterhook.verbs.undisturbed import as_before

Compile = Callable[[nn.Module], Any]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile runs it, or a part of it."""
    return any(compiler.is_compiled(module) for module in model.modules())


def compare_compiled(a: nn.Module, b: nn.Module, compiles: Compile | None, inputs: Any) -> Comparison:
    """a as it is, and b compiled, or a compiled where there is no b."""
    whole = b if compiles is None else compiles(b)
    comparing = _Parts(compiles or torch.compile)
    with as_before(a, b), torch.no_grad():
        comparing.compare(".", a, unwrap(b), lambda module: call_with(module, _copied(inputs)), whole)
    notes = ["compiled code was run as it is: of its parts, those are compared that were compiled by themselves"]
    return Comparison(comparing.rows, comparing.first, condition="torch.compile", notes=notes)


class _Parts:
    """A model and its parts, from the outside in."""

    def __init__(self, compiles: Compile) -> None:
        self._compiles = compiles
        self.rows: list[Row] = []
        self.first: First | None = None

    def compare(self, name: str, a: nn.Module, b: nn.Module, call: Callable[[Any], Any], compiled: Any) -> bool:
        """Compare one module; False where it differs by more than rounding. `first` is then in it."""
        made = call(a)
        found = _apart(made, call(compiled))
        fits = is_rounding(found, length_of(b))
        verdict = "equal" if found.is_equal else "within rounding" if fits else "differs"
        code = code_of(b)
        source = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        row = Row(name, name, source, describe(made), found, verdict)
        if not fits and all(self._compare_part(*part) for part in list(_parts_of(name, a, b, call))):
            self.first = self.first or First(name, name, name, found, source=source)
            row = row._replace(verdict="first")
        self.rows.append(row)
        return fits

    def _compare_part(self, name: str, a: nn.Module, b: nn.Module, given: Inputs) -> bool:
        def call(module: Any) -> Any:
            return module(*_copied(given.args), **_copied(given.kwargs))

        return self.compare(name, a, b, call, self._compiles(b))


def _parts_of(
    name: str, a: nn.Module, b: nn.Module, call: Callable[[Any], Any]
) -> Iterator[tuple[str, nn.Module, nn.Module, Inputs]]:
    """The modules that a module calls itself, in order, with what it gives them."""
    mine, theirs = dict(a.named_modules()), dict(b.named_modules())
    modules = {child or ".": module for child, module in mine.items() if child in theirs}
    came: list[tuple[str, Inputs]] = []

    def note(event: Event) -> None:
        if event.key.role == "in" and len(event.around) == 1:
            came.append((event.key.name, _copied(event.value)))

    Side(modules, note).run(lambda: call(a))
    for child, given in came:
        yield (escape(child) if name == "." else f"{name}.{escape(child)}"), mine[child], theirs[child], given


def _apart(a: Any, b: Any) -> Apart:
    mine, theirs = tensors_of(a), tensors_of(b)
    pairs = partners(mine, theirs)[0]
    return max((apart(x, theirs[path]) for path, (_, x) in pairs.items()), key=lambda one: one.order, default=SAME)


def _copied(value: Any) -> Any:
    return rebuild_live(value, lambda _, tensor: tensor.detach().clone())
