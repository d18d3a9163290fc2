"""A tap: one site of a session, made of small parts.

    role      how it is attached, a class for each: OutputTap, InputTap, TensorTap, NodeTap, and InnerTap in inside/
    action    what is done with each value or gradient: keep it, show it or replace it; the verbs define them
    calls     which calls are the session's own, counted here

A call that is not in the session's scope is counted as elsewhere, and nothing else happens. A call inside a backward
pass is a checkpoint's recomputation: it has the number that it had the first time, and only what changes a value
is done again.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tenterhook.addresses.grammar import may_cover
from tenterhook.addresses.sites import Site
from tenterhook.addresses.why import why_never_called
from tenterhook.hooks.missing import Passed, Ungraded, why_no_graph, why_not_reached
from tenterhook.hooks.scope import Scope, here
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.checkpoints import Replays, may_be_checkpointed
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.inputs import Inputs
from tenterhook.values.tree import Path, describe, leaves, paths_of, pick, put, version_of

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session


_INDEX = re.compile(r"[-\d:,.\s]+").fullmatch


class Call(NamedTuple):
    """One call that a tap acts on."""

    number: int
    again: bool = False  # a checkpoint makes it a second time
    has_graph: bool = True  # False where only a later recomputation will have one


class Action:
    """What is done with the values and gradients at one site. What a method returns takes the place; None leaves it."""

    changes = False  # whether the model may go on with another value than it computed
    may_keep_given = False  # whether it may keep the tensor itself that it is shown
    needs_all = True  # whether it needs the objects in a structure that are no tensors
    why_not_compiled = ""  # why it cannot be had in compiled code

    def fired(self, tap: "Tap") -> int:
        """How often something came."""
        raise NotImplementedError

    def has_come(self, tap: "Tap") -> bool:
        """Whether anything came: asked after each backward pass."""
        return bool(self.fired(tap))

    def on_value(self, tap: "Tap", value: Any, call: Call) -> Any:
        """The value at the site; of a structure, the part that was asked for."""
        raise NotImplementedError

    def restart(self) -> None:
        """Forget what came, for the next batch."""

    def on_structure(self, tap: "Tap", value: Any, call: int) -> None:
        """A structured value, before the gradients of its leaves come."""

    def on_gradient(self, tap: "Tap", grad: Tensor | None, call: int, path: Path) -> Tensor | None:
        """The gradient of one leaf of the value of a call."""
        raise NotImplementedError


class Tap(Hook):
    """An action at one site. The roles are subclasses: `place` attaches them to a model."""

    calls = 0  # of this session, so far
    elsewhere = 0
    recomputed = 0
    number = 0  # among the taps of its session
    missed = ""  # why nothing came when it was called, for the report
    note = ""  # for the report, whatever came
    born: float | None = None  # of a gradient: the number of the graph node whose gradient was last waited for
    ungraded: Ungraded | None = None  # the last value that came without a graph
    passed: Passed | None = None  # the last backward pass that brought nothing
    is_view = False  # of a gradient: whether a value was a view, whose hook is lost when its base is written into
    _replays: Replays | None = None

    def __init__(self, site: Site, scope: Scope, action: Action) -> None:
        self.site = site
        self.scope = scope
        self.action = action

    def place(self, session: "Session") -> None:
        """Attach it, until the session is over."""
        raise NotImplementedError

    def each(self) -> "Sequence[Tap]":
        """Itself; of an address inside a forward, the taps of the values that it turned out to mean."""
        return (self,)

    def restart(self) -> None:
        """Begin to count again, for the next batch; it stays where it is attached."""
        if self.calls:  # else the reason was known before
            self.missed = ""
        self.calls = self.elsewhere = self.recomputed = 0
        self.note, self._replays = "", None
        self.action.restart()

    def own_calls(self) -> Iterable[int]:
        """The numbers of the calls in which a value can have come."""
        return range(self.calls)

    @property
    def fired(self) -> int:
        """How often something came."""
        return self.action.fired(self)

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """True if the model may go on with another value: an edit, or one that frozen=True gave a gradient."""
        return self.action.changes or (self.scope.frozen and self.site.address.grad)

    def arrive(self, call: int, path: Path, grad: Tensor | None) -> Tensor | None:
        """The gradient of one leaf; a hook on a tensor calls this."""
        return self.action.on_gradient(self, grad, call, path)

    def reached(self, value: Any) -> tuple[Call, Any] | None:
        """The call that a value belongs to, and the part of it that is asked for; None where it is not meant."""
        call = self._next_call()
        if call is None or not may_cover(self.site.address.call, call.number):
            return None
        try:
            return call, part_of(value, self.site.address.leaf)
        except LookupError:
            self.missed = _no_such_leaf(value, self.site.address.leaf)
            return None

    def own_call(self) -> Call | None:
        """The call in which a value comes; None where it is not meant."""
        call = self._next_call()
        return None if call is None or not may_cover(self.site.address.call, call.number) else call

    def paths_in(self, value: Any) -> dict[int, Path]:
        """By the id of each tensor in the part of a value that is asked for: where it is there."""
        try:
            return {id(tensor): path for path, tensor in leaves(part_of(value, self.site.address.leaf))}
        except LookupError:
            self.missed = _no_such_leaf(value, self.site.address.leaf)
            return {}

    def changed(self, part: Any, call: Call) -> Any:
        """What the action makes of a value; None where it stays."""
        return None if call.again and not self.changes else self.action.on_value(self, part, call)

    def _next_call(self) -> Call | None:
        if graph_task() != self.scope.task:
            self.recomputed += 1
            return self._call_again()
        if self.scope not in here():
            self.elsewhere += not self.scope.rests
            return self._call_again()
        if self.scope.rests:
            return None
        call = self.calls
        self.calls = call + 1
        runs_again = self.changes or (self.site.address.grad and not torch.is_grad_enabled())
        if runs_again and may_be_checkpointed():
            if self._replays is None:
                self._replays = Replays()
            self._await(self._replays.remember(call))
        return Call(call)

    def _call_again(self) -> Call | None:
        known = None if self._replays is None else self._replays.next_call()
        if known is None:
            return None
        call, has_graph, new_checkpoints = known
        self._await(new_checkpoints)
        return Call(call, True, has_graph)

    def _await(self, checkpoints: Sequence[Any]) -> None:
        """Have the session there when these run again."""
        for checkpoint in checkpoints if self.changes or self.site.kind == "inner" else ():
            self.scope.again_in(checkpoint)

    def may_come_again(self, call: int) -> bool:
        """True if a call was made in a checkpoint that can still run again."""
        return self._replays is not None and self._replays.knows(call)

    def is_at(self, site: Site) -> bool:
        """True if it taps the same inputs or outputs of the same module, or the same value inside it."""
        mine, other = self.site.address, site.address
        return self.site.owner is site.owner and (mine.role, mine.inner) == (other.role, other.inner)

    has_wide_answers = False  # whether it is a wide address inside a forward, and some of its values came

    def is_shown(self, others_came: bool) -> bool:
        """True if a report has a row for it; `others_came`: whether any tap has wide answers."""
        return True

    def why_silent(self, model: Any, session: "Session | None" = None) -> str:
        """The reason that it never fired, as far as it is known."""
        if self.missed:
            return self.missed
        if self.site.kind == "module" and not self.calls:
            return self._why_not_called(model, session)
        if self.site.address.grad and self.ungraded is not None and self.born is None:
            return why_no_graph(self, model, self.ungraded)
        if self.site.address.grad:
            return why_not_reached(self, model, None if session is None else session.passes)
        return f"it was called {self.calls} times, but not the call that was asked for"

    def _why_not_called(self, model: Any, session: "Session | None") -> str:
        if self.elsewhere:
            return f"its {self.elsewhere} calls came from another thread or async task than this session's"
        if self.recomputed:
            return "called only inside a backward pass, where a checkpoint recomputes; open the session earlier"
        return why_never_called(model, self.site, something_ran=session is None or session.saw_anything())


def check_unchanged(before: list[tuple[Tensor, int]], who: str) -> None:
    """Raise if a user's function wrote into what it was shown."""
    if any(version_of(tensor) != version for tensor, version in before):
        raise RuntimeError(f"{who} changed the value in place; observing must change nothing")


def part_of(value: Any, path: Path) -> Any:
    """The part of a site's value that an address means; LookupError where there is none."""
    if path and isinstance(value, Inputs):
        return pick(value[path[0]], path[1:])
    return pick(value, path)


def with_part(value: Any, path: Path, part: Any) -> Any:
    """A site's value with another part in the place that an address means."""
    if path and isinstance(value, Inputs):
        return value.with_argument(path[0], put(value[path[0]], path[1:], part))
    return put(value, path, part)


def _no_such_leaf(value: Any, path: Path) -> str:
    asked = "".join(f"[{key}]" for key in path)
    if isinstance(value, Inputs):
        have = ", ".join(f"[{key}]" for key in value) or "no arguments"
        return f"it was called without {asked}; it was given {have}"
    if isinstance(value, torch.Tensor):
        return f"its value has no leaf {asked}; it is one tensor, {describe(value)}{_index_hint(path)}"
    return f"its value has no leaf {asked}; it is {describe(value)}, with leaves {paths_of(value)}"


def _as_slice(part: str) -> str:
    return "slice(None)" if part == ":" else f"slice({', '.join(end or 'None' for end in part.split(':'))})"


def _index_hint(path: Path) -> str:
    """How to get a part of a tensor, which is no leaf."""
    text = str(path[0])
    if len(path) != 1 or not _INDEX(text):
        return ""
    parts = [part.strip() for part in text.split(",")]
    index = [_as_slice(part) if ":" in part else part for part in parts]
    given = index[0] if len(index) == 1 else f"({', '.join(index)})"
    return f"; index what was captured, seen[...][{text}]; an edit of a part is at({given}, change)"
