"""Hooks of ours in a form that torch.compile can trace.

In compiled code such a hook is an operation (platform/tap_ops.py) that carries a number and hands over what comes; run
as plain Python, it is the tap. A number stands for a place and for what is done there, not for a session: the next one
that asks for the same finds the code that was compiled for this one.
"""

import itertools
import weakref
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
from tenterhook.platform import compiler, tap_ops, twins
from tenterhook.platform.autograd import next_sequence_number, saves_hooked
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.inputs import Inputs
from tenterhook.values.outline import Outline, Spec, can_exchange, exchanged, take_apart
from tenterhook.values.tree import Path, leaves

CALL_BITS = 40  # bits of a token for the number of the call; those above it are of the session
CALL_MASK = (1 << CALL_BITS) - 1
_WHOLE: dict[int, Path] = {0: ()}  # of a value that is one tensor
_serials = itertools.count()
_free_numbers = itertools.count()
_numbers: "weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], int]]" = weakref.WeakKeyDictionary()
active: "dict[int, Traced]" = {}  # by number
_outlines: dict[Spec, int] = {}
outline_of: list[Outline] = []


def _number_for(module: Any, sort: tuple[Any, ...]) -> int:
    """The number of what is done in a module, of several that do the same the first that is free."""
    known = _numbers.setdefault(module, {})
    for nth in itertools.count():
        number = known.setdefault((*sort, nth), next(_free_numbers))
        if number not in active:
            return number
    raise AssertionError


class Traced(Hook):
    """A hook of ours in a form that compiled code can have in it."""

    gradient = False
    more: tuple[Any, ...] = ()  # what else tells it from others of the same module, when it is compiled

    def __init__(self, hook: Any, module: Any) -> None:
        self.hook = hook
        self.changes = getattr(hook, "changes", False)
        self.serial = next(_serials)
        self.number = _number_for(module, (type(self).__name__, self.gradient, self.changes, *self.more))
        self._paths: dict[int, dict[int, Path]] = {}  # by outline and leaf: where it is in what was asked for

    def value(self, leaves: Sequence[Tensor], outline: Outline) -> None:
        """A value comes from compiled code."""
        raise NotImplementedError

    def token(self, outline: int, graded: Sequence[int], grads: bool) -> int:
        """Something comes of which more will be told. Returns a number by which this is known."""
        raise NotImplementedError

    def inside(self, leaves: Sequence[Tensor], call: int, site: int, outline: Outline, graded: Sequence[int]) -> None:
        """A value inside a forward comes."""
        raise NotImplementedError

    def arrived(self, grad: Tensor, token: int, outline: int, leaf: int) -> Tensor | None:
        """The gradient of one leaf. Returns what takes its place, or None."""
        raise NotImplementedError

    def over(self) -> None:
        """The session is over."""


class TracedTap(Traced):
    """That of a tap."""

    hook: GradientTap

    def __init__(self, tap: GradientTap, model: Any) -> None:
        self.gradient = tap.site.address.grad
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
                return _trace_edit(self.number, self.gradient, output)
            return _trace(self.number, self.gradient, output)
        return self.hook(module, args, output)

    def show(self, value: Any) -> Any:
        return self.hook(None, (), value)


class TracedInput(TracedTap):
    """That of a tap on a module's inputs."""

    hook: InputTap

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if self.gradient or self.changes:
                return _trace_input(self.number, self.gradient, self.changes, (args, kwargs))
            return _trace(self.number, False, (args, kwargs))
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
            return _trace_return(given_and_output) if self.gradient else None
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
            return _trace(self.number, False, None)
        return self.hook(module, args)

    def value(self, leaves: Sequence[Tensor], outline: Outline) -> None:
        self.hook.count()


# What is traced. Nothing in it may depend on a session: what is compiled is used again by others.


def _trace(number: int, gradient: bool, value: Any) -> None:
    found: list[Tensor] = []
    outline = number_of(take_apart(value, found))
    _check(number, outline)
    if not gradient:
        torch.ops.tenterhook.value(found, number, outline)
        return
    graded = [i for i, leaf in enumerate(found) if leaf.requires_grad] if torch.is_grad_enabled() else []
    token = torch.ops.tenterhook.token(number, outline, graded, torch.is_grad_enabled())
    _check_hooks(len(graded))
    for i in graded:
        trace_gradient(found[i], token, number, outline, i)


def trace_gradient(leaf: Tensor, token: Tensor, number: int, outline: int, i: int) -> None:
    """Have the gradient of a tensor handed over."""
    if leaf.is_leaf:  # a hook on it would stay when the session is over
        _refuse("a value whose gradient is asked for is a parameter or an input, handed on as it is")
        return
    leaf.register_hook(lambda grad: torch.ops.tenterhook.gradient(grad, token, number, outline, i))


def _trace_input(number: int, gradient: bool, changes: bool, value: Any) -> Any:
    found: list[Tensor] = []
    spec = take_apart(value, found)
    if not can_exchange(spec):
        _refuse("an object that is given to a module cannot be made anew in compiled code")
        return None
    outline = number_of(spec)
    _check(number, outline)
    graded = [i for i, leaf in enumerate(found) if leaf.requires_grad] if torch.is_grad_enabled() else []
    if not gradient:
        new = [*torch.ops.tenterhook.edit(found, number, outline, graded)]
        for i in _wanted(number, outline):
            found[i] = torch.ops.tenterhook.own(new[i])
        return exchanged(value, found)
    token = torch.ops.tenterhook.token(number, outline, graded, torch.is_grad_enabled())
    _check_hooks(len([i for i in _wanted(number, outline) if i in graded]))
    for i in _wanted(number, outline):
        if i in graded:
            found[i] = torch.ops.tenterhook.own(found[i])  # whose gradient is this module's share
            if changes:
                _trace_new_gradient(found[i], token, number, outline, i)
            else:
                trace_gradient(found[i], token, number, outline, i)
    return exchanged(value, found)


def _trace_return(given_and_output: Any) -> None:
    *given, output = given_and_output
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    take_apart(given, inputs)
    take_apart(output, outputs)
    if any([one is other for one in inputs for other in outputs]):
        _refuse("a module hands on an input whose gradient is asked for")


def _trace_edit(number: int, gradient: bool, value: Any) -> Any:
    found: list[Tensor] = []
    spec = take_apart(value, found)
    if not can_exchange(spec):
        _refuse("an object that is edited cannot be made anew in compiled code")
        return None
    outline = number_of(spec)
    _check(number, outline)
    graded = [i for i, leaf in enumerate(found) if leaf.requires_grad] if torch.is_grad_enabled() else []
    if not gradient:
        return exchanged(value, [*torch.ops.tenterhook.edit(found, number, outline, graded)])
    token = torch.ops.tenterhook.token(number, outline, graded, torch.is_grad_enabled())
    _check_hooks(len(graded))
    for i in graded:
        found[i] = found[i].clone()  # others that use it keep their own gradient; a compiler need not copy for that
        _trace_new_gradient(found[i], token, number, outline, i)
    return exchanged(value, found)


def _trace_new_gradient(leaf: Tensor, token: Tensor, number: int, outline: int, i: int) -> None:
    leaf.register_hook(lambda grad: torch.ops.tenterhook.new_gradient(grad, token, number, outline, i))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _wanted(number: int, outline: int) -> tuple[int, ...]:
    traced = active[number]
    return traced.wanted(outline_of[outline]) if isinstance(traced, TracedTap) else ()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check(number: int, outline: int) -> None:
    """Refuse to hand over a value without the objects in it that are no tensors, where these are needed."""
    traced, others = active[number], outline_of[outline].others
    if others and isinstance(traced, TracedTap) and traced.hook.action.needs_all:
        twins.refuse(f"{traced.hook.site} holds a {others[0]}, which compiled code cannot hand over")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def number_of(spec: Spec) -> int:
    """The number of an outline."""
    if spec not in _outlines:
        outline_of.append(Outline(spec))
        _outlines[spec] = len(outline_of) - 1
    return _outlines[spec]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_hooks(count: int) -> None:
    if count > 1 and not twins.HOOKS_ARE_TRACED:
        twins.refuse("PyTorch before 2.13 cannot compile the gradients of several tensors that come together")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse(why: str) -> None:
    twins.refuse(why)


# What comes when it runs.


class _Receiver:
    def value(self, leaves: Sequence[Tensor], tap: int, outline: int) -> None:
        if (traced := active.get(tap)) is not None:
            traced.value(leaves, outline_of[outline])

    def token(self, tap: int, outline: int, graded: Sequence[int], grads: bool) -> int:
        traced = active.get(tap)
        return -1 if traced is None else traced.token(outline, graded, grads)

    def inside(
        self,
        leaves: Sequence[Tensor],
        call: int,
        tap: int,
        site: int,
        outline: int,
        graded: Sequence[int],
        grads: bool,
    ) -> None:
        if (traced := active.get(tap)) is not None:
            with torch.set_grad_enabled(grads):
                traced.inside(leaves, call, site, outline_of[outline], graded)

    def gradient(self, grad: Tensor, call: int, tap: int, outline: int, leaf: int) -> None:
        self.new_gradient(grad, call, tap, outline, leaf)

    def new_gradient(self, grad: Tensor, call: int, tap: int, outline: int, leaf: int) -> Tensor | None:
        traced = active.get(tap)
        return None if traced is None else traced.arrived(grad, call, outline, leaf)

    def edit(self, leaves: Sequence[Tensor], tap: int, outline: int) -> Sequence[Tensor] | None:
        traced = active.get(tap)
        return traced.edit(leaves, outline_of[outline]) if isinstance(traced, TracedTap) else None


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


tap_ops.receiver = _Receiver()
compiler.never_compile(TracedOutput.__call__, TracedInput.__call__, TracedAfter.__call__)
compiler.never_compile(TracedEvery.__call__, TracedStart.__call__)
