"""Every operation of what runs meanwhile, and what it made of what: slow, for a step that is known to be bad.

A dispatch mode sees each operation after autograd and autocast, in forwards and in backward passes. Only what is not
finite is remembered, by its memory, and without keeping that alive. In a backward pass an operation belongs to a node
of the graph, and the operation of the forward that made this node tells the line.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from tenterhook.addresses.modules import tensors_of, walk
from tenterhook.birth.causes import Case, why
from tenterhook.birth.lines import Line, Lines
from tenterhook.birth.made import Kinds, Made, described, is_checked, kinds_of
from tenterhook.platform.autograd import next_sequence_number, node_that_runs, sequence_number
from tenterhook.platform.checkpoints import checkpoints
from tenterhook.platform.modes import DispatchMode
from tenterhook.platform.operations import name_of, writes, written_by
from tenterhook.platform.pytree import flat
from tenterhook.platform.tensors import memory_of

Bad = Callable[[Tensor], Kinds]
_DATA = ("input", "parameter")  # names of what no mask is
_MOST_INPUTS = 6  # of one operation that are described
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
_BEGINS_BACKWARD = torch.ops.aten.ones_like.default  # of the loss


class CannotRunAgain(Exception):
    """Why code cannot be run once more without changing what the program does."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that has run."""

    function: Any
    args: Any  # before it wrote into any of them
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    line: Line | None
    node: Any  # of autograd's graph, in a backward pass

    @property
    def operation(self) -> str:
        """As torch calls it, without the underscore of those that work in place."""
        return name_of(self.function)


class Trace(DispatchMode):
    """Sees every operation while it is open; `bad` says what of a value is wrong.

    `models` are those whose addresses are told, by their names, which are empty where there is only one.
    `alone`: other processes do not run this too, so that nothing in it may wait for them.
    """

    def __init__(
        self, models: Iterable[tuple[str, nn.Module]] = (), bad: Bad = kinds_of, *, alone: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: Made | None = None  # what made a bad value, whatever became of it
        self.last: Made | None = None  # what the last operation of a forward made, where that is bad
        self._bad, self._alone = bad, alone
        self._of: dict[int, tuple[StorageWeakRef, Made | None]] = {}  # by memory; None where it is known to be well
        self._names: dict[int, str] = {}  # of what is given: by memory
        self._nodes: dict[int, tuple[int, Line | None]] = {}  # by number: in which thread it was made, on which line
        self._next: dict[int, int] = {threading.get_ident(): next_sequence_number()}  # number, by thread
        self._count = 0
        modules: dict[int, str] = {}
        for model_name, model in models:
            prefix = f"{model_name}:" if model_name else ""
            modules |= {id(m): f"{prefix}{name}" for name, m in reversed([*walk(model)])}
            for kind in ("parameter", "buffer"):
                for name, (_, tensor) in tensors_of(model, kind):
                    if not is_lazy(tensor):
                        self.name(tensor, f"{kind} {prefix}{name}")
                        self.name(getattr(tensor, "grad", None), f"the gradient that {prefix}{name} had before")
        self._lines = Lines(modules)

    def name(self, value: Any, name: str) -> None:
        """What a tensor that comes from outside is called."""
        if is_checked(value):
            self._names.setdefault(memory_of(value), name)

    def made(self, value: Any) -> Made | None:
        """What made a value, where it is bad."""
        if not is_checked(value) or not self._bad(value):
            return None
        known = self._of.get(memory_of(value))
        return known[1] if known is not None and known[1] is not None else self._given(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._alone and func.namespace in _COLLECTIVES:
            raise CannotRunAgain(f"{func.namespace}::{name_of(func)} waits for other processes")
        inputs = [one for one in flat((args, kwargs)) if is_checked(one)]
        parents = tuple(made for one in inputs if (made := self._looked_at(one)) is not None)
        before = _as_they_are(args) if writes(func) else args
        result = func(*args, **kwargs)
        node = _node_of_backward()
        outputs = [one for one in flat(result) if isinstance(one, Tensor)]
        call = Call(func, before, kwargs, outputs, self._line(node), node)
        self._count += 1
        worst = None
        for one in filter(is_checked, (*outputs, *flat(written_by(func, args)))):
            kinds = self._bad(one)
            made = self._note(call, parents, one, kinds) if kinds else None
            worst = made or worst
            self._remember(one, made)
        if node is None:
            self.last = parents[0] if parents and func is _BEGINS_BACKWARD else worst
        return result

    def _looked_at(self, value: Tensor) -> Made | None:
        known = self._of.get(memory_of(value))
        if known is None:
            made = self._given(value) if self._bad(value) else None
            self._remember(value, made)
            return made
        return known[1] if known[1] is not None and self._bad(value) else None

    def _remember(self, value: Tensor, made: Made | None) -> None:
        memory = memory_of(value)
        if made is None and (known := self._of.get(memory)) is not None and known[1] is not None:
            return  # another part of this memory is bad
        self._of[memory] = (StorageWeakRef(value.untyped_storage()), made)

    def _given(self, value: Tensor) -> Made:
        self._count += 1
        kinds = self._bad(value)
        name = self._names.get(memory_of(value), "")
        mask = not name.startswith(_DATA) and not kinds.nan and (value.numel() == 1 or not kinds.plus)
        made = Made(self._count, name or "a tensor that was there before", kinds, (), self._lines.here())
        made.is_given, made.on_purpose, made.output = True, mask, described(value)
        if self.first is None and not mask:
            self.first = made
        return made

    def _note(self, call: Call, parents: tuple[Made, ...], value: Tensor, kinds: Kinds) -> Made:
        made = Made(self._count, call.operation, kinds, parents, call.line)
        made.node = "" if call.node is None else call.node.name()
        if parents:
            made.on_purpose = all(one.on_purpose for one in parents) and not kinds.beyond(one.kinds for one in parents)
        else:
            made.on_purpose = not kinds.nan and _asks_for_infinity(call.args, call.kwargs)
        if not parents or (kinds.nan and not any(one.kinds.nan for one in parents)):
            self._explain(made, call, value)
        if self.first is None and not made.on_purpose:
            self.first = made
        return made

    def _explain(self, made: Made, call: Call, value: Tensor) -> None:
        if self._bad is kinds_of:
            made.why = why(Case(call.operation, call.args, call.kwargs, call.outputs, value, call.function))
        given = [one for one in flat((call.args, call.kwargs)) if isinstance(one, Tensor)]
        made.inputs = [described(one) for one in given[:_MOST_INPUTS]]
        made.output = described(value)

    def _line(self, node: Any) -> Line | None:
        """Of an operation: where it stands, or in a backward pass where that stands whose gradient it computes."""
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            line = self._lines.here()
        else:
            line = self._nodes.get(sequence_number(node), (0, None))[1]
        thread, now = threading.get_ident(), next_sequence_number()
        for number in range(self._next.get(thread, now - 1), now):  # the nodes that it has made
            known = self._nodes.get(number)
            elsewhere = known is not None and known[0] != thread  # each thread counts by itself
            self._nodes[number] = (thread, None if elsewhere else line)
        self._next[thread] = now
        return line


def _node_of_backward() -> Any:
    """The node of autograd's graph that runs; none in a forward, nor where a checkpoint runs a part of one again."""
    node = node_that_runs()
    return None if node is None or any(again for _, again in checkpoints()) else node


def _as_they_are(args: Any) -> list[Any]:
    """Copies of what an operation may write into."""
    return [one.clone() if isinstance(one, Tensor) else one for one in args]


def _asks_for_infinity(args: Any, kwargs: Any) -> bool:
    """Whether a number that was given is infinite, as with `masked_fill(mask, -inf)`."""
    return any(isinstance(one, float) and abs(one) == float("inf") for one in flat((args, kwargs)))
