"""Variables of a forward in compiled code.

While such a session's code is compiled, the copies of code call `tell` here in place of the dispatcher's. torch.compile
traces it: where the forward of a module begins that is asked about, an operation says that a call begins, and an
assignment that is meant hands the value over. Which address it has is known when it is traced, for what is called, and
how often a variable was assigned, is then known. What comes is handed to the engine as if a copy had told it.
"""

import builtins
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import matches, may_cover
from tenterhook.hooks.tap import part_of
from tenterhook.hooks.tracing import CALL_BITS, CALL_MASK, Traced, active, number_of, trace_gradient
from tenterhook.inside import dispatch, engine
from tenterhook.inside.calls import Call, Where
from tenterhook.inside.dispatch import NAME, Place
from tenterhook.inside.engine import new_value, older_value
from tenterhook.inside.functions import is_forward
from tenterhook.inside.told import given, stored
from tenterhook.platform import compiler, twins
from tenterhook.platform.autograd import next_sequence_number
from tenterhook.platform.bytecode import COMPREHENSIONS
from tenterhook.platform.frames import CALLS
from tenterhook.values.outline import Outline, take_apart
from tenterhook.values.tree import Path

if TYPE_CHECKING:
    from tenterhook.inside.engine import Inside
    from tenterhook.inside.taps import InnerTap

_NOTHING, _BEGIN, _VALUE, _PERHAPS = range(4)  # what a place means for those that are traced


class _Running(NamedTuple):
    """A forward that is traced."""

    number: int  # of who asks
    owner: int
    counts: dict[str, int]


class _Site(NamedTuple):
    """An assignment in a forward."""

    owner: int
    name: str
    number: int  # among its assignments within the call, from 0 on
    place: Place


_owners: "list[weakref.ref[nn.Module]]" = []
_running: list[_Running] = []
_sites: list[_Site] = []


class TracedInside(Traced):
    """A session's engine, for compiled code."""

    hook: "Inside"

    def __init__(self, engine: "Inside", model: Any) -> None:
        self.more = tuple(sorted(str(one.tap.site) for some in engine.patterns.of.values() for one in some))
        super().__init__(engine, model)
        self._begun: set[int] = set()  # the ids of the modules whose forward ran
        self._waiting: dict[int, dict[InnerTap, dict[int, Path]]] = {}  # by assignment
        dispatch.can_reach_by.append(tell)
        setattr(builtins, NAME, tell)

    def over(self) -> None:
        dispatch.can_reach_by.remove(tell)
        if tell not in dispatch.can_reach_by:
            dispatch.install()

    def token(self, outline: int, graded: Sequence[int], grads: bool) -> int:
        """A call of a module begins; `outline` is the number of the module."""
        owner = _owners[outline]()
        if owner is None or not self._is_on():
            return -1
        if id(owner) not in self._begun:
            self._begun.add(id(owner))
            self.hook.ran(owner)
        return self.serial << CALL_BITS | self.hook.calls.begins(owner)

    def inside(self, leaves: Sequence[Tensor], call: int, site: int, outline: Outline, graded: Sequence[int]) -> None:
        """A variable is assigned."""
        one = _sites[site]
        owner = _owners[one.owner]()
        if owner is None or call >> CALL_BITS != self.serial or not self._is_on():
            return
        hand = older_value if one.place.older else new_value

        def come(taps: "list[InnerTap]", value: Any) -> None:
            hand([tap for tap in taps if not tap.site.address.grad], value)
            known = self._waiting.get(site, {})
            self._waiting[site] = {tap: known[tap] for tap in taps if tap in known}  # not those of an earlier batch
            for tap in taps:
                if tap.site.address.grad:
                    self._wait(tap, site, value, leaves, graded)

        where = Where(owner, "", Call(call & CALL_MASK, {f"/{one.name}": one.number}))
        self.hook.handed(where, one.name, outline.fill(leaves), one.place, come)

    def _wait(self, tap: "InnerTap", site: int, value: Any, leaves: Sequence[Tensor], graded: Sequence[int]) -> None:
        """The gradients of these leaves will come."""
        call = tap.own_call()
        if call is None or not tap.scope.is_open:
            return
        path_of = tap.paths_in(value)
        if path_of and () not in path_of.values():
            tap.action.on_structure(tap, part_of(value, tap.site.address.leaf), call.number)
        wanted = {i: path_of[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in path_of}
        for i in wanted.keys() - set(graded):
            tap.note_no_graph(leaves[i], call.number)
        waiting = {i: path for i, path in wanted.items() if i in graded}
        if waiting:
            tap.born = next_sequence_number() - 0.5
            self._waiting[site][tap] = waiting

    def _is_on(self) -> bool:
        """Whether what runs now is the session's."""
        return self.hook in engine.now.get() and not self.hook.scope.rests

    def arrived(self, grad: Tensor, token: int, outline: int, leaf: int) -> None:
        """The gradient of one leaf; `outline` is the number of the assignment."""
        if token >> CALL_BITS != self.serial or not self.hook.scope.is_open:
            return
        call = token & CALL_MASK
        for tap, paths in self._waiting.get(outline, {}).items():
            if leaf in paths and may_cover(tap.site.address.call, call):
                tap.arrive(call, paths[leaf], grad)


def tell(value: Any, number: int, here: Any, extra: Any) -> Any:
    """What `dispatch.tell` does, in a form that torch.compile can trace."""
    if here is None:
        return value
    if not torch.compiler.is_dynamo_compiling():  # what is done there looks at the frame two above its own
        place = dispatch.place_of(number)
        return value if place is None else place.act(place, value, here, extra)
    kind = _kind_of(number)
    if kind == _BEGIN:
        id(value)  # from here on the code is this module's: another of the class may not be asked about
        running = _begins(number)
        if running < 0:
            return None
        asks, owner = _who_asks(running)
        return torch.ops.tenterhook.token(asks, owner, [], False), running
    if kind == _NOTHING:
        return value
    if kind == _PERHAPS:
        if value is not None:
            _refuse(number)
        return value
    found: list[Tensor] = []
    spec = take_apart(value, found)
    if found:
        call, running = here
        asks, _ = _who_asks(running)
        site, of_gradient = _site_of(running, number)
        if site >= 0:
            can_have = of_gradient and torch.is_grad_enabled()
            graded = [i for i, leaf in enumerate(found) if leaf.requires_grad] if can_have else []
            torch.ops.tenterhook.inside(found, call, asks, site, number_of(spec), graded, torch.is_grad_enabled())
            for i in graded:
                trace_gradient(found[i], call, asks, site, i)
    return value


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kind_of(number: int) -> int:
    place = dispatch.place_of(number)
    if place is None or place.act is dispatch.acts["looked"]:
        return _NOTHING
    if place.act is dispatch.acts["begin"]:
        return _BEGIN
    if place.act in (stored, given):
        return _VALUE
    if place.act is not dispatch.acts["called"] or place.fills:
        _refuse_place(place)
    return _PERHAPS


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse(number: int) -> None:
    place = dispatch.place_of(number)
    if place is not None:
        _refuse_place(place)


def _refuse_place(place: Place) -> None:
    twins.refuse(f"{place.code.co_name} has a statement that may write into a variable ({place.source})")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _begins(number: int) -> int:
    """The number of a forward that begins; -1 where nobody asks about it."""
    place = dispatch.place_of(number)
    asking = [one for one in active.values() if isinstance(one, TracedInside)]
    if place is None or not asking:
        return -1
    if len(asking) > 1 or place.code.co_name in COMPREHENSIONS:
        twins.refuse("several sessions look inside at once" if len(asking) > 1 else "it has a comprehension")
        return -1
    (one,) = asking
    own, caller = twins.functions_that_are_traced() or (None, None)
    me = None if own is None else own.first
    if not isinstance(me, nn.Module) or caller is None:
        twins.refuse(f"{place.code.co_name} is no method of a module that is known when it is compiled")
        return -1
    if id(me) not in one.hook.patterns.of:
        return -1
    is_called = caller.file == CALLS or (isinstance(caller.first, nn.Module) and caller.first is not me)
    if not is_called or place.code.co_name != "forward" or not is_forward(place.code, me):
        twins.refuse(f"the forward of a {type(me).__name__} is called by another function than the module's own call")
        return -1
    twins.refuse_parts(f"values inside a {type(me).__name__} are asked for, and the code is compiled in parts")
    _owners.append(weakref.ref(me))
    _running.append(_Running(one.number, len(_owners) - 1, {}))
    return len(_running) - 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _who_asks(running: int) -> tuple[int, int]:
    return _running[running][:2]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _site_of(running: int, number: int) -> tuple[int, bool]:
    """The number of an assignment that is meant, -1 of another; and whether its gradient is asked for."""
    now, place = _running[running], dispatch.place_of(number)
    asks = active[now.number]
    owner = _owners[now.owner]()
    if place is None or owner is None or not isinstance(asks, TracedInside):
        return -1, False
    patterns = asks.hook.patterns
    if place.name not in patterns.want(place.code).names:
        return -1, False
    count = now.counts.get(place.name, 0)
    now.counts[place.name] = count + 1
    # Whatever its number is: the engine counts them.
    meant = [one.tap.site for one in patterns.of[id(owner)] if matches(one.name, f"/{place.name}")]
    if not meant:
        return -1, False
    if any(site.address.grad for site in meant) and not twins.HOOKS_ARE_TRACED:
        twins.refuse("PyTorch before 2.13 cannot compile the gradients of values inside a forward")
    _sites.append(_Site(now.owner, place.name, count, place))
    return len(_sites) - 1, any(site.address.grad for site in meant)


compiler.never_compile(tell)
