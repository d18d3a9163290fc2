"""What torch.compile traces of our hooks, and what it hands over when it runs.

In compiled code a hook is an operation (platform/tap_ops.py) that carries a number. A number stands for a place and for
what is done there, not for a session: the next one that asks for the same finds the code that was compiled for this
one. `Traced` is a hook in such a form; the kinds are in traced.py.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.platform import tap_ops, twins
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.outline import Outline, Spec, can_exchange, exchanged, take_apart
from tenterhook.values.tree import Path

CALL_BITS = 40  # bits of a token for the number of the call; those above it are of the session
CALL_MASK = (1 << CALL_BITS) - 1
_serials = itertools.count()
_free_numbers = itertools.count()
_numbers: "weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], int]]" = weakref.WeakKeyDictionary()
active: "dict[int, Traced]" = {}  # by number
_outlines: dict[Spec, int] = {}
outline_of: list[Outline] = []


def number_for(module: Any, sort: tuple[Any, ...]) -> int:
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
    needs_all = ""  # the address for which the objects in a structure are needed that are no tensors
    more: tuple[Any, ...] = ()  # what else tells it from others of the same module, when it is compiled

    def __init__(self, hook: Any, module: Any) -> None:
        self.hook = hook
        self.changes = getattr(hook, "changes", False)
        self.serial = next(_serials)
        self.number = number_for(module, (type(self).__name__, self.gradient, self.changes, *self.more))
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

    def edit(self, inner: Sequence[Tensor], outline: Outline) -> list[Tensor] | None:
        """A value comes, and the model goes on with what is returned."""
        raise NotImplementedError

    def wanted(self, outline: Outline) -> tuple[int, ...]:
        """Which leaves are asked for."""
        return ()

    def over(self) -> None:
        """The session is over."""


# What is traced. Nothing in it may depend on a session: what is compiled is used again by others.


def trace(number: int, gradient: bool, value: Any) -> None:
    """Hand over a value, or say that its gradient is waited for."""
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


def trace_input(number: int, gradient: bool, changes: bool, value: Any) -> Any:
    """Exchange the inputs of a module, or wait for its share in their gradients."""
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


def trace_return(given_and_output: Any) -> None:
    """A module returns that was given inputs of ours."""
    *given, output = given_and_output
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    take_apart(given, inputs)
    take_apart(output, outputs)
    if any([one is other for one in inputs for other in outputs]):
        _refuse("a module hands on an input whose gradient is asked for")


def trace_edit(number: int, gradient: bool, value: Any) -> Any:
    """Go on with another value, or with this one and another gradient."""
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
    return active[number].wanted(outline_of[outline])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check(number: int, outline: int) -> None:
    """Refuse to hand over a value without the objects in it that are no tensors, where these are needed."""
    address, others = active[number].needs_all, outline_of[outline].others
    if others and address:
        twins.refuse(f"{address} holds a {others[0]}, which compiled code cannot hand over")


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
        return None if traced is None else traced.edit(leaves, outline_of[outline])


tap_ops.receiver = _Receiver()
