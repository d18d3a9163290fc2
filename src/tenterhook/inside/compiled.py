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

from tenterhook.hooks.traced import Traced, active, number_of
from tenterhook.inside import dispatch, engine
from tenterhook.inside.calls import Call, Where
from tenterhook.inside.dispatch import NAME, Place
from tenterhook.inside.engine import new_value, older_value
from tenterhook.inside.functions import is_forward
from tenterhook.inside.told import given, stored
from tenterhook.platform import compiler, twins
from tenterhook.platform.bytecode import COMPREHENSIONS
from tenterhook.platform.frames import CALLS
from tenterhook.values.outline import Outline, take_apart

if TYPE_CHECKING:
    from tenterhook.inside.engine import Inside

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
        dispatch.can_reach_by.append(tell)
        setattr(builtins, NAME, tell)

    def over(self) -> None:
        dispatch.can_reach_by.remove(tell)
        if tell not in dispatch.can_reach_by:
            dispatch.install()

    def token(self, outline: int, graded: Sequence[int], grads: bool) -> int:
        """A call of a module begins; `outline` is the number of the module."""
        owner = _owners[outline]()
        return -1 if owner is None or self.hook not in engine.now.get() else self.hook.calls.begins(owner)

    def inside(self, leaves: Sequence[Tensor], call: int, site: int, outline: Outline) -> None:
        """A variable is assigned."""
        one = _sites[site]
        owner = _owners[one.owner]()
        if call >= 0 and owner is not None and self.hook in engine.now.get() and not self.hook.scope.rests:
            where = Where(owner, "", Call(call, {f"/{one.name}": one.number}))
            hand = older_value if one.place.older else new_value
            self.hook.handed(where, one.name, outline.fill(leaves), one.place, hand)


def tell(value: Any, number: int, here: Any, extra: Any) -> Any:
    """What `dispatch.tell` does, in a form that torch.compile can trace."""
    if not torch.compiler.is_dynamo_compiling():
        return dispatch.tell(value, number, here, extra)
    kind = _kind_of(number)
    if kind == _BEGIN:
        running = _begins(number)
        if running < 0:
            return None
        asks, owner = _who_asks(running)
        return torch.ops.tenterhook.token(asks, owner, [], False), running
    if here is None or kind == _NOTHING:
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
        site = _site_of(running, number)
        if site >= 0:
            torch.ops.tenterhook.inside(found, call, asks, site, number_of(spec))
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
    one.hook.ran(place.code)
    _owners.append(weakref.ref(me))
    _running.append(_Running(one.number, len(_owners) - 1, {}))
    return len(_running) - 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _who_asks(running: int) -> tuple[int, int]:
    return _running[running][:2]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _site_of(running: int, number: int) -> int:
    """The number of an assignment that is meant, -1 of another."""
    now, place = _running[running], dispatch.place_of(number)
    asks = active[now.number]
    owner = _owners[now.owner]()
    if place is None or owner is None or not isinstance(asks, TracedInside):
        return -1
    patterns = asks.hook.patterns
    if place.name not in patterns.want(place.code).names:
        return -1
    count = now.counts.get(place.name, 0)
    now.counts[place.name] = count + 1
    if not any(pattern.means(f"/{place.name}", count) for pattern in patterns.of[id(owner)]):
        return -1
    _sites.append(_Site(now.owner, place.name, count, place))
    return len(_sites) - 1


compiler.never_compile(tell)
