"""The hooks of taps in a form that torch.compile can trace; run as plain Python, each is the tap."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.errors import EditError
from tenterhook.hooks.every import Every
from tenterhook.hooks.gradients import GradientTap
from tenterhook.hooks.inputs import After, InputTap
from tenterhook.hooks.outputs import OutputTap, StartHook
from tenterhook.hooks.tap import part_of, with_part
from tenterhook.hooks.tracing import (
    CALL_BITS,
    CALL_MASK,
    Traced,
    outline_of,
    trace,
    trace_edit,
    trace_input,
    trace_return,
)
from tenterhook.platform import compiler
from tenterhook.platform.autograd import next_sequence_number, saves_hooked
from tenterhook.values.inputs import Inputs
from tenterhook.values.outline import Outline
from tenterhook.values.tree import Path, leaves

_WHOLE: dict[int, Path] = {0: ()}  # of a value that is one tensor


class TracedTap(Traced):
    """That of a tap."""

    hook: GradientTap

    def __init__(self, tap: GradientTap, model: Any) -> None:
        self.gradient = tap.site.address.grad
        self.needs_all = str(tap.site) if tap.action.needs_all else ""
        self.more = (tap.site.address.leaf, tap.action.needs_all)
        super().__init__(tap, tap.site.owner())

    def value(self, leaves: Sequence[Tensor], outline: Outline) -> None:
        if self.hook.action.may_keep_given:  # this memory is the compiled code's, which uses it again
            leaves = [leaf.clone() for leaf in leaves]
        self.show(outline.fill(leaves))

    def given(self, value: Any) -> Any:
        """A value as the tap has it."""
        return value

    def wanted(self, outline: Outline) -> tuple[int, ...]:
        """Which leaves are asked for."""
        stand_ins = outline.stand_ins()
        found = self.hook.paths_in(self.given(outline.fill(stand_ins)))
        return tuple(i for i, one in enumerate(stand_ins) if id(one) in found)

    def show(self, value: Any) -> Any:
        """Have the tap look at a value. Returns what takes its place, or None."""
        raise NotImplementedError

    def token(self, outline: int, graded: Sequence[int], grads: bool) -> int:
        """A value comes whose gradient is waited for. Returns what tells of which call it is."""
        tap, is_plain = self.hook, saves_hooked(False) is None
        # In compiled code they are off. Where they are on around it, only a checkpoint that hooks what is saved may
        # run it again.
        with torch.set_grad_enabled(grads and is_plain):
            call = tap.own_call()
        if call is None or not tap.scope.is_open:
            return -1
        whole = outline_of[outline]
        if whole.is_tensor and graded and not tap.site.address.leaf:
            self._paths[outline] = _WHOLE
        else:
            with torch.set_grad_enabled(grads):
                self._want(outline, whole, graded, call.number)
        if self._paths.get(outline):
            tap.born = next_sequence_number() - 0.5
        elif grads:
            tap.check_editable(call.number)
        return self.serial << CALL_BITS | call.number

    def _want(self, number: int, outline: Outline, graded: Sequence[int], call: int) -> None:
        """Note which leaves of a structure are asked for, and why some of them have no gradient."""
        tap, stand_ins = self.hook, outline.stand_ins()
        value = self.given(outline.fill(stand_ins))
        path_of = tap.paths_in(value)
        if path_of and () not in path_of.values():
            tap.action.on_structure(tap, part_of(value, tap.site.address.leaf), call)
        wanted = {i: path_of[id(one)] for i, one in enumerate(stand_ins) if id(one) in path_of}
        self._paths[number] = {i: path for i, path in wanted.items() if i in graded}
        for i in wanted.keys() - set(graded):
            tap.note_no_graph(stand_ins[i], call)

    def arrived(self, grad: Tensor, token: int, outline: int, leaf: int) -> Tensor | None:
        """The gradient of one leaf. Returns what takes its place, or None."""
        is_own = token >> CALL_BITS == self.serial and self.hook.scope.is_open
        if is_own and (path := self._paths.get(outline, {}).get(leaf)) is not None:
            return self.hook.arrive(token & CALL_MASK, path, grad)
        return None

    def edit(self, inner: Sequence[Tensor], outline: Outline) -> list[Tensor] | None:
        """A value comes from compiled code, which goes on with what is returned."""
        new = self.show(outline.fill(inner))
        made = None if new is None else [leaf for _, leaf in leaves(new)]
        if made is not None and any(_has_others(leaf, inner) for leaf in made):
            what = "it uses a tensor that requires a gradient, which compiled code would not give it"
            raise EditError(f"{self.hook.site} cannot be edited: {what}; say edit(..., eager=True)")
        return made


class TracedOutput(TracedTap):
    """That of a tap on a module's output."""

    hook: OutputTap

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if self.changes:
                return trace_edit(self.number, self.gradient, output)
            return trace(self.number, self.gradient, output)
        return self.hook(module, args, output)

    def show(self, value: Any) -> Any:
        return self.hook(None, (), value)


class TracedInput(TracedTap):
    """That of a tap on a module's inputs."""

    hook: InputTap

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if self.gradient or self.changes:
                return trace_input(self.number, self.gradient, self.changes, (args, kwargs))
            return trace(self.number, False, (args, kwargs))
        return self.hook(module, args, kwargs)

    def given(self, value: Any) -> Any:
        args, kwargs = value
        return Inputs(args, kwargs, self.hook.names)

    def show(self, value: Any) -> Any:
        given = self.given(value)
        reached = self.hook.reached(given)
        new = None if reached is None else self.hook.changed(reached[1], reached[0])
        if new is None:
            return None
        whole = with_part(given, self.hook.site.address.leaf, new)
        return whole.args, whole.kwargs


class TracedAfter(Traced):
    """That of what waits for a module to return, where its inputs are edited or their gradients are asked for."""

    hook: After

    def __init__(self, hook: After, model: Any) -> None:
        self.gradient = not hook.changes
        super().__init__(hook, hook.tap.site.owner())

    def __call__(self, module: nn.Module, *given_and_output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return trace_return(given_and_output) if self.gradient else None
        return self.hook(module, *given_and_output)


class TracedStart(Traced):
    """That of what tells a value that a module made from one that it hands on: in compiled code, nothing."""

    hook: StartHook

    def __call__(self, module: nn.Module, args: Any) -> Any:
        return None if torch.compiler.is_dynamo_compiling() else self.hook(module, args)


class TracedEvery(Traced):
    """That of the counter of the model's calls."""

    hook: Every

    def __call__(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return trace(self.number, False, None)
        return self.hook(module, args)

    def value(self, leaves: Sequence[Tensor], outline: Outline) -> None:
        self.hook.count()


def _has_others(leaf: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether what an edit made has the graph of other tensors than those that it was given."""
    own = {id(one) for one in given}
    waiting, seen = [leaf.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) not in own:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


compiler.never_compile(TracedOutput.__call__, TracedInput.__call__, TracedAfter.__call__)
compiler.never_compile(TracedEvery.__call__, TracedStart.__call__)
