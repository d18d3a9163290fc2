"""Where a function runs: in which call of which module's forward, and by way of which helper functions.

A copy keeps what was found when it began in a local variable of its own (`Here`), which goes when its frame goes, so
that nobody has to say when a call has ended. Those that it calls find it by its frame.
"""

import functools
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from tenterhook.hooks.session import Session
from tenterhook.inside.copies import original
from tenterhook.inside.functions import is_decorator, is_forward, is_of_optimizer, is_ours, part
from tenterhook.inside.instrument import Want
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.checkpoints import Again, checkpoint_of
from tenterhook.platform.frames import CALLS, first_argument, read_variable

if TYPE_CHECKING:
    from tenterhook.inside.engine import Inside


class Call(NamedTuple):
    """One call of a module, or of a function that is none."""

    number: int
    counts: dict[str, int]  # by name: how often it was assigned


class Where(NamedTuple):
    """In which call, and what the names of values begin with there."""

    owner: Any  # the module, or the function that is none
    prefix: str
    call: Call
    outside: bool = False  # in a method that no forward has called, but the user's own loop or a trainer

    def copy(self) -> "Where":
        """With counts of its own, for what runs again."""
        return self._replace(call=self.call._replace(counts=dict(self.call.counts)))


NOWHERE = Where(None, "", Call(0, {}))


class Running:
    """A function that runs, as one session sees it."""

    __slots__ = ("containers", "engine", "want", "where")

    def __init__(self, engine: "Inside", want: Want, where: Where) -> None:
        self.engine, self.want, self.where = engine, want, where
        self.containers: set[tuple[str, int]] = set()  # the lists and the like that were seen with tensors in them


class Here(list[Running]):
    """A function that runs, for all sessions that look into it."""

    __slots__ = ("__weakref__", "code")
    code: CodeType  # the copy


_here: dict[int, "weakref.ref[Here]"] = {}  # by the id of the frame


def enter(frame: FrameType, running: Iterable[Running]) -> Here:
    """A function begins."""
    here = Here(running)
    here.code = frame.f_code
    if len(_here) > 1000:
        for number in [number for number, ref in list(_here.items()) if ref() is None]:
            _here.pop(number, None)
    _here[id(frame)] = weakref.ref(here)
    return here


def forget(frame: FrameType) -> None:
    """A function begins that no session looks into: it may have the id of one that has ended."""
    _here.pop(id(frame), None)


class Calls:
    """The calls of a model's modules, and where functions run, for one session."""

    def __init__(self, engine: "Inside", session: Session) -> None:
        self._engine = weakref.ref(engine)
        self._wanted = engine.patterns.of
        self._session = weakref.ref(session)
        self._scope = session.scope
        self.functions: dict[Any, Any] = {}  # by code: those that are no modules and whose calls count
        self._origins: weakref.WeakKeyDictionary[Any, Where] = weakref.WeakKeyDictionary()  # of checkpoints
        # Of those that run again: in which backward pass and frame, and where that is.
        self._again: weakref.WeakKeyDictionary[Any, tuple[int, int, Where]] = weakref.WeakKeyDictionary()
        # By the id of the owner, and the method if that was called from outside: how many there were, as far as known.
        self._numbers: dict[tuple[int, str], int] = {}

    @functools.cached_property
    def _modules(self) -> set[int]:
        session = self._session()
        return set() if session is None else {id(ref()) for ref in session.modules}

    def restart(self) -> None:
        """Begin to count again."""
        self._numbers.clear()

    def begins(self, owner: Any) -> int:
        """A call of a module begins in compiled code. Returns its number."""
        return self._new_call(owner).number

    def is_of_model(self, module: nn.Module) -> bool:
        """Whether it is one of the model's: its methods belong to no other's call."""
        return id(module) in self._wanted or id(module) in self._modules

    def add_function(self, owner: Any) -> None:
        """A function that is no module, of which the calls count."""
        self.functions.update((original(code), owner) for code in owner.codes)

    def locate(self, frame: Any, me: Any) -> Where:
        """Where a function that begins runs; `me`: the module whose method it is, if it is one."""
        where = self._begins_call(frame, me)
        if where is not None:
            return where
        below, nearest = [(frame, me)], 0
        named = below[0]  # the last of them that adds a name of its own
        around: set[int] = set()  # those that only stand around a method
        while (frame := frame.f_back) is not None:
            above = (frame, self_of(frame))
            is_around = stands_around(*above, *named)
            if (known := self._known(frame)) is not None and not (known.outside and (nearest or is_around)):
                where = known
                break
            if (found := self._origin(frame)) is not None:
                where = found
                break
            if frame.f_code.co_filename == CALLS or _ends(frame):
                break
            if is_of_optimizer(frame.f_code.co_filename) and not nearest:
                nearest = len(below)  # what is below is a closure's: a trainer calls its training_step there
            if is_around:
                around.add(len(below))
            else:
                named = above
            below.append(above)
        if where is None:  # in no forward: the address begins at the nearest method
            where = NOWHERE
            below = [one for i, one in enumerate(below[: nearest or None]) if i not in around]
        for frame, me in reversed(below):
            where = self._below(frame, me, where)
        return where

    def _begins_call(self, frame: Any, me: Any) -> Where | None:
        """Where a function runs that torch calls as a module's forward, or that the session asks about."""
        code, back = frame.f_code, frame.f_back
        function = self.functions.get(original(code)) if self.functions else None
        if function is not None and function.is_run_by(frame):
            return Where(function, "", self._new_call(function))
        if back is None:
            return NOWHERE
        if back.f_code.co_filename != CALLS:
            return None
        owner = me if me is not None else read_variable(back, "self")
        if not self.is_of_model(owner) or not is_forward(code, owner):
            return None
        return Where(owner, _prefix(code, owner), self._new_call(owner))

    def _known(self, frame: Any) -> Where | None:
        ref = _here.get(id(frame))
        here = None if ref is None else ref()
        if here is None or here.code is not frame.f_code:  # somebody keeps that of one that has ended
            return None
        return next((one.where for one in here if one.engine is self._engine()), None)

    def _origin(self, frame: Any) -> Where | None:
        """Where what a checkpoint runs again was run the first time, with counts as they were then."""
        one = checkpoint_of(frame)
        origin = self._origins.get(one[0]) if one is not None and one[1] else None
        if one is None or origin is None:
            return None
        now = graph_task(), id(frame)
        known = self._again.get(one[0])
        if known is None or known[:2] != now:
            known = self._again[one[0]] = (*now, origin.copy())
        return known[2]

    def _below(self, frame: Any, me: Any, above: Where) -> Where:
        """Where a function runs, from where the one that called it does."""
        code = frame.f_code
        if code.co_filename == CALLS:
            return above
        if me is not None and self.is_of_model(me):
            is_own = is_forward(code, me)
            if above.owner is not me:  # called from outside, not by way of the module's call
                call = self._new_call(me) if is_own else self._call_of(code.co_name, me, frame)
                above = Where(me, "", call, not is_own and (above is NOWHERE or above.outside))
            if is_own and not is_decorator(code, me):
                return Where(me, "", above.call)  # by its name: by a wrapper, a subclass, another module
        return above if above is NOWHERE else self._in_helper(frame, me, above)

    def _in_helper(self, frame: Any, me: Any, above: Where) -> Where:
        name = part(frame.f_code, me)
        where = above._replace(prefix=f"{above.prefix}/{name}") if name else above
        one = checkpoint_of(frame)
        if one is not None and one[0] not in self._origins:
            self._origins[one[0]] = where.copy()  # its recomputation will happen in no forward
        return where

    def _call_of(self, method: str, owner: Any, frame: Any) -> Call:
        """The call of a module in which a frame runs one of its methods, which another module has called."""
        while (frame := frame.f_back) is not None:
            where = self._known(frame) or self._origin(frame)
            if where is None and checkpoint_of(frame) is not None:
                where = self.locate(frame, self_of(frame))
            if where is not None and where.owner is owner:
                return where.call
        return self._new_call(owner, method)

    def _new_call(self, owner: Any, method: str = "") -> Call:
        """One more call of a module or function, or of a method by somebody else, unless a checkpoint runs again."""
        number = self._numbers.get((id(owner), method), 0)
        if graph_task() == self._scope.task:
            self._numbers[id(owner), method] = number + 1
        return Call(number, {})


def self_of(frame: Any) -> Any:
    """The module whose method a frame runs."""
    code = frame.f_code
    if not code.co_argcount or not (code.co_varnames[0] == "self" or code.co_name == "forward"):
        return None
    first = first_argument(frame)
    return first if isinstance(first, nn.Module) else None


def stands_around(frame: FrameType, me: Any, inner: FrameType, owner: Any) -> bool:
    """Whether a function runs for a method that it calls: a subclass's of the same name, or a decorator's wrapper."""
    name, code = inner.f_code.co_name, original(frame.f_code)
    if owner is None or name == "forward":
        return False
    if frame.f_code.co_name == name:
        return me is owner
    methods = (vars(cls).get(name) for cls in type(owner).__mro__)
    return any(code in _codes_around(method) for method in methods if hasattr(method, "__wrapped__"))


def _codes_around(method: Any) -> Iterable[CodeType]:
    """The code of a decorated method's wrappers, which say what they wrap, as with functools.wraps."""
    while hasattr(method, "__wrapped__"):
        if isinstance(method, FunctionType):
            yield original(method.__code__)
        method = method.__wrapped__


def _ends(frame: Any) -> bool:
    """Whether code of ours runs that is no part of the model: anything but the function of a checkpoint."""
    return is_ours(frame.f_code.co_filename) and frame.f_code is not Again.__call__.__code__


def _prefix(code: Any, owner: Any) -> str:
    return f"/{code.co_name.strip('<>')}" if is_decorator(code, owner) else ""
