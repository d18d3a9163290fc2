"""A tap: what to do at one site, as a PyTorch hook.

A tap works out whether a call is its session's own and which call it is, and hands the value on: `reach` for a
value, `arrive` for the gradient of each leaf, which it gets by a tensor hook. What these return takes the place of
the value or gradient; None leaves it. The verbs are kinds of Tap.

A call that is not in the session's scope only counts. One inside a backward pass is a checkpoint's recomputation and
is not counted again; a tap that changes something does so there too.
"""

import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable, Container, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tenterhook.addresses.grammar import may_cover, split_number
from tenterhook.addresses.sites import Site
from tenterhook.hooks.scope import Scope, here
from tenterhook.hooks.shares import Input, OwnShares
from tenterhook.platform.checkpoints import Replays, graph_task, may_be_checkpointed
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.inputs import Inputs, argument_names
from tenterhook.values.standins import Standins
from tenterhook.values.tree import (
    Path,
    can_have_gradient,
    describe,
    itself,
    leaves,
    paths_of,
    pick,
    put,
    rebuild,
    version_of,
)


class Started(NamedTuple):
    """When a module was called: the number that autograd's next node gets in this thread, and what it was given."""

    number: int
    given: Set[Any]


class Tap(Hook):
    """What to do at one site, as a hook. A verb overrides `reach` and `arrive`."""

    calls = 0
    elsewhere = 0
    recomputed = 0
    is_view = False
    changes = False  # whether the model may get another value than it computed
    needs_before = False  # whether `own` wants to know when the module was called
    copied: Container[int] = ()  # the ids of the tensors that it put in place of others in its last call
    twins: "list[Tap] | None" = None  # of one that asks for values inside a forward: those that it has got
    asked: "Callable[[], Tap | None] | None" = None  # of such a value: the one that asked for it, which holds it
    number = 0  # among the taps of the session
    older = False  # inside a forward: whether the value is one that the operation was given
    note = ""  # for the report, whatever came
    missed = ""  # why the value was not there when the module ran, for the report
    pending: dict[int, Any]  # by frame: what `after` will need
    started: dict[int, Started]  # by frame: how things were when the module was called
    _replays: Replays | None = None
    _names: tuple[str, ...] = ()
    _on_leaf: dict[tuple[int, Path], RemovableHandle] | None = None

    def __init__(self, site: Site, scope: Scope) -> None:
        self.site = site
        self.scope = scope

    @property
    def fired(self) -> int:
        """How often something came."""
        raise NotImplementedError

    def reach(self, part: Any, call: int) -> Any:
        """The value at the site, as the model has it; of a structure, the part that was asked for."""
        raise NotImplementedError

    def replace(self, value: Any, part: Any, new: Any) -> Any:
        """A value with something else in place of the part that was asked for."""
        return with_part(value, self.site.address.leaf, new)

    def swap(self, tensor: Tensor) -> None:
        """For a tap that changes it: put another value into a parameter or buffer."""

    def swap_back(self) -> None:
        """Undo `swap`."""

    def reach_again(self, part: Any, call: int) -> Any:
        """The same in a checkpoint's recomputation, for a tap that changes it."""

    def expect(self, part: Any, call: int) -> None:
        """The structured value whose leaves' gradients will arrive."""

    def arrive(self, call: int, path: Path, grad: Tensor | None) -> Tensor | None:
        """The gradient of one leaf of the value of that call."""
        raise NotImplementedError

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], last: Any = None) -> Any:
        """The hook: `last` is the output after a forward, the keyword arguments before it."""
        address = self.site.address
        if address.role == "in" and last is None:  # removed while another thread is here: torch forgot with_kwargs
            return None
        frame = id(sys._getframe(1))
        if address.role == "in":
            self.pending.pop(frame, None)  # of a call that ended in an exception, in a frame that lived here before
            value = Inputs(args, last, self._names)
        else:
            value = last
        call, again, has_graph = self._count(), False, True
        if call is None:
            if self._replays is None or (known := self._replays.next_call()) is None:
                return None
            (call, has_graph, inside), again = known, True  # the reentrant kind has a graph only now
            self._again_in(inside)
        elif may_be_checkpointed() and (self.changes or (address.grad and not torch.is_grad_enabled())):
            self._remember(call)
        if not may_cover(address.call, call):
            return None
        try:
            part = part_of(value, address.leaf)
        except LookupError:
            self.missed = no_such_leaf(value, address.leaf)
            return None
        if not address.grad:
            new = self.reach_again(part, call) if again else self.reach(part, call)
            if new is None:
                return None
            whole = self.replace(value, part, new)
            if isinstance(value, Inputs):
                self._await_after(module, frame, None, value, whole)
            return _handed_back(whole)
        own, whole = self.own(part, value, self.started.pop(frame, None) if self.needs_before else None)
        shares = self._reach_gradient(own, part, value, call) if has_graph and self.scope.is_open else None
        if isinstance(value, Inputs):
            self._await_after(module, frame, shares, value, whole)
        return None if whole is value else _handed_back(whole)

    def _reach_gradient(self, own: Any, part: Any, value: Any, call: int) -> OwnShares | None:
        if not isinstance(part, Tensor):
            self.expect(part, call)
        if isinstance(value, Inputs):
            return self.await_shares(own, part, call, value)
        self.hook_leaves(own, call)
        return None

    def _await_after(self, module: Any, frame: int, shares: OwnShares | None, given: Inputs, new: Inputs) -> None:
        """Before the forward: what `after` will need, and for whom the call only begins now."""
        # torch calls the hooks before and after one forward from one frame, whatever else happens in between.
        self.pending[frame] = (shares, None if new is given else Standins(given, new))
        for hook in module._forward_pre_hooks.values() if new is not given else ():
            if isinstance(hook, Before):
                hook.restart(frame)

    def own(self, part: Any, value: Any, since: Started | None) -> tuple[Any, Any]:
        """The part whose gradient will be hooked, and the value with it in place, which the model goes on with."""
        if not self.scope.frozen:
            return part, value
        thawed: dict[int, Tensor] = {}  # a tensor that is there twice stays one tensor

        def thaw(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) not in thawed:
                thawed[id(tensor)] = self.scope.thaw(tensor)
            return thawed[id(tensor)]

        own = rebuild(part, thaw, opaque=itself)
        if own is part:
            return part, value
        return own, rebuild(value, lambda _, tensor: thawed.get(id(tensor), tensor), opaque=itself)

    def prepare(self, module: nn.Module) -> None:
        """Before a hook on inputs is placed: look at the module's signature once."""
        self._names = argument_names(module)
        self.pending = {}

    def hook_leaves(self, part: Any, call: int) -> None:
        """Have `arrive` called with the gradient of each tensor in a value."""
        for path, tensor in leaves(part):
            self.hook(tensor, call, path)

    def hook(self, tensor: Tensor, call: int, path: Path) -> None:
        """Have `arrive` called with the gradient of one tensor."""
        if not tensor.requires_grad:
            self.missed = self._why_no_gradient(tensor, call)
            return
        self.is_view = self.is_view or tensor._is_view()
        is_leaf = tensor.grad_fn is None  # read in any case: torch 2.13 can crash in register_hook otherwise
        handle = tensor.register_hook(Unsaved(self.arrive, call, path))
        self.scope.add(handle)
        if (self.changes or len(here()) != 1) and len(tensor._backward_hooks or ()) > 1:
            later_site_first(tensor, self)
        if is_leaf:  # it outlives the graph, so the last call that returned it owns its gradient
            self._on_leaf = {} if self._on_leaf is None else self._on_leaf
            if (before := self._on_leaf.pop((id(tensor), path), None)) is not None:
                before.remove()
            self._on_leaf[id(tensor), path] = handle
            if len(self._on_leaf) > 1024:
                alive = {key: old for key, old in self._on_leaf.items() if old.hooks_dict_ref() is not None}
                self._on_leaf = alive

    def is_at(self, site: Site) -> bool:
        """Whether it taps the same inputs or outputs of the same module, or the same value inside it."""
        mine, other = self.site.address, site.address
        return self.site.owner is site.owner and (mine.role, mine.inner) == (other.role, other.inner)

    def is_own_answer(self, others_came: bool) -> bool:
        """Whether a report shows it: not for a pattern that has been answered, nor for what it does not mean."""
        if self.twins is not None:
            return not self.answers() and not (others_came and self.site.wide)
        asked = None if self.asked is None else self.asked()
        return asked is None or self in asked.answers()

    def answers(self) -> "list[Tap]":
        """The taps of the values that its address means, now that all have come: `x#-1` is the last of each name."""
        twins = self.twins or []
        last = split_number(self.site.address.inner)[1]
        if last is None or last >= 0:
            return twins
        numbers = [split_number(twin.site.address.inner) for twin in twins]
        most = Counter(name for name, _ in numbers)
        return [twin for twin, (name, k) in zip(twins, numbers, strict=True) if (k or 0) == most[name] + last]

    def twin(self, site: Site) -> "Tap":
        """The same for one of the values that an address means."""
        raise NotImplementedError

    def is_copied_for_us(self, tensor: Tensor) -> bool:
        """Whether an outer session made this copy for the same place, in this very call."""
        owners = map(_owner, (tensor._backward_hooks or {}).values())
        return any(
            isinstance(owner, Tap) and owner is not self and owner.is_at(self.site) and id(tensor) in owner.copied
            for owner in owners
        )

    def _count(self) -> int | None:
        """The number of this call, if it counts."""
        if graph_task() != self.scope.task:
            self.recomputed += 1
        elif self.scope not in here():
            self.elsewhere += 1
        else:
            call = self.calls
            self.calls = call + 1
            return call
        return None

    def _remember(self, call: int) -> None:
        if self._replays is None:
            self._replays = Replays()
        self._again_in(self._replays.remember(call))

    def _again_in(self, around: list[Any]) -> None:
        for checkpoint in around if self.changes or self.site.kind == "inner" else ():
            self.scope.again_in(checkpoint)

    def await_shares(self, own: Any, part: Any, call: int, given: Inputs) -> OwnShares | None:
        """Before the forward: note whose gradients are wanted; `after` finds who used them."""
        inputs = []
        for (path, tensor), (_, original) in zip(leaves(own), leaves(part), strict=True):
            if tensor is not original:  # a copy that only this module will use
                self.hook(tensor, call, path)
            elif tensor.requires_grad and torch.is_grad_enabled():
                if self.is_copied_for_us(tensor):  # likewise, and edited first
                    self.hook(tensor, call, path)
                    continue
                arrive = functools.partial(self.arrive, call, path)
                hook = functools.partial(self._hook_handed_on, tensor, call, path)
                inputs.append(Input(tensor, arrive, hook, self._cannot_share))
            else:
                self.missed = self._why_no_gradient(tensor, call)
        return OwnShares(inputs, given)

    def _hook_handed_on(self, tensor: Tensor, call: int, path: Path) -> None:
        self.note = "the module hands this input on, so the gradient is that of all users of the tensor"
        self.hook(tensor, call, path)

    def _cannot_share(self) -> None:
        self.note = self.missed = "what flows into an input in a second backward (create_graph) is not kept"

    def after(self, frame: int, module: nn.Module, given: Any, output: Any) -> Any:
        """After the forward: hook whatever used the inputs. Returns another output, or None."""
        shares, standins = self.pending.pop(frame, (None, None))
        new = None if standins is None else standins.carry_back(output)
        if shares is not None:
            for handle in shares.hook(module, given, output):
                self.scope.add(handle)
        return new

    def _why_no_gradient(self, tensor: Tensor, call: int) -> str:
        if not can_have_gradient(tensor):
            return f"{str(tensor.dtype).removeprefix('torch.')} values have no gradient"
        stack = torch._C._functorch.get_interpreter_stack()
        if stack and all(one.key() != torch._C._functorch.TransformType.Grad for one in stack):
            return "inside vmap or jvp a value has no gradient of its own; it has one in torch.func.grad or vjp"
        if torch.is_grad_enabled():
            return "frozen: nothing before it requires a gradient; frozen=True gives it one all the same"
        if self._replays is not None and self._replays.knows(call):
            return "its checkpoint was not run again inside this session"
        return "it ran under torch.no_grad() or inference_mode(), where there are no gradients"


class After(Hook):
    """The forward hook beside a tap on the gradient of an input, or one that changes an input."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, *given_and_output: Any) -> Any:
        *given, output = given_and_output
        return self.tap.after(id(sys._getframe(1)), module, given, output)


class Before(Hook):
    """The hook before a forward, beside a tap that must know what is older than the call."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = {tensor.grad_fn for _, tensor in leaves(args)}
        self.tap.started[id(sys._getframe(1))] = Started(torch._C._autograd._get_sequence_nr(), given)

    def restart(self, frame: int) -> None:
        """What took the place of an input is as old as that."""
        if frame in self.tap.started:
            since = self.tap.started[frame]
            self.tap.started[frame] = since._replace(number=torch._C._autograd._get_sequence_nr())


class Unsaved(functools.partial[Any]):
    """A hook on a tensor: torch.save leaves it out, and need not warn of that."""

    __torch_unserializable__ = True


def check_unchanged(before: list[tuple[Tensor, int]], who: str) -> None:
    """Raise if a user's function wrote into what it was shown."""
    if any(version_of(tensor) != version for tensor, version in before):
        raise RuntimeError(f"{who} changed the value in place; observing must change nothing")


def later_site_first(tensor: Tensor, tap: Tap) -> None:
    """Order the hooks on one tensor that has several addresses, as the output of a block is that of its last layer.

    Autograd runs hooks in the order in which they were put, the layer's before the block's. The gradient comes to
    the block first: an edit of the layer's gradient must not show there. At one address the outer session is first.
    """
    hooks = tensor._backward_hooks or {}
    owners = {key: _owner(hook) for key, hook in hooks.items()}
    earlier = {key: owner for key, owner in owners.items() if isinstance(owner, Tap) and not owner.is_at(tap.site)}
    if tap.changes or any(owner.changes for owner in earlier.values()):
        for key in earlier:
            hooks[key] = hooks.pop(key)


def _owner(hook: Any) -> Any:
    """The tap that waits for a gradient."""
    return getattr(getattr(hook, "func", None), "__self__", None)


def _handed_back(value: Any) -> Any:
    return (value.args, value.kwargs) if isinstance(value, Inputs) else value


def with_part(value: Any, path: Path, part: Any) -> Any:
    """A site's value with another part in the place that an address means."""
    if not path or not isinstance(value, Inputs):
        return put(value, path, part)
    twin = copy.copy(value)
    twin[path[0]] = put(value[path[0]], path[1:], part)
    return twin


def part_of(value: Any, path: Path) -> Any:
    """The part of a site's value that an address means; LookupError where there is none."""
    if path and isinstance(value, Inputs):
        return pick(value[path[0]], path[1:])
    return pick(value, path)


def no_such_leaf(value: Any, path: Path) -> str:
    """Says what a value has where the asked leaf was not found."""
    asked = "".join(f"[{key}]" for key in path)
    if isinstance(value, Inputs):
        have = ", ".join(f"[{key}]" for key in value) or "no arguments"
        return f"it was called without {asked}; it was given {have}"
    return f"its value has no leaf {asked}; it is {describe(value)}, with leaves {paths_of(value)}"
