"""The taps of sessions in compiled code.

PyTorch traces the hooks that a module has when its code is compiled. So when compiled code is called inside a session,
each of our hooks becomes one that can be traced (`TracedOutput`, …): in compiled code it is an operation that carries a
number and hands over what comes; run as plain Python, it is the tap. The code is compiled as a twin of the user's
(platform/twins.py), once for each set of numbers. `Compiled` is what a session has of this; imported when first needed.

A number stands for a place and for what is done there, not for a session: the next one that asks for the same finds
the code that was compiled for this one.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.hooks.every import Every
from tenterhook.hooks.inputs import InputTap
from tenterhook.hooks.outputs import OutputTap
from tenterhook.hooks.scope import here
from tenterhook.hooks.tap import Tap
from tenterhook.platform import compiler, tap_ops, twins
from tenterhook.platform.autograd import graph_task, next_sequence_number
from tenterhook.platform.hook_tables import Hook
from tenterhook.values.inputs import Inputs
from tenterhook.values.outline import Outline, Spec, take_apart
from tenterhook.values.tree import Path, leaves

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

_IN_COMPILED = "compiled code had the taps in it, and fuses nothing across a tap: last bits may differ from it without them"
_CALLS = 40  # bits of a token for the number of the call; those above it are of the session
_serials = itertools.count()
_free_numbers = itertools.count()
_numbers: "weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], int]]" = weakref.WeakKeyDictionary()
_active: "dict[int, Traced]" = {}  # by number
_outlines: dict[Spec, int] = {}
_outline_of: list[Outline] = []


def _number_for(module: Any, sort: tuple[Any, ...]) -> int:
    """The number of what is done in a module, of several that do the same the first that is free."""
    known = _numbers.setdefault(module, {})
    for nth in itertools.count():
        number = known.setdefault((*sort, nth), next(_free_numbers))
        if number not in _active:
            return number
    raise AssertionError


class Traced(Hook):
    """A hook of ours in a form that compiled code can have in it."""

    gradient = False

    def __init__(self, hook: Any, module: Any) -> None:
        self.hook = hook
        self.changes = hook.changes
        self.serial = next(_serials)
        self.number = _number_for(module, (type(self).__name__, self.gradient))
        self._paths: dict[int, dict[int, Path]] = {}  # by outline and leaf: where it is in what was asked for

    def value(self, leaves: Sequence[Tensor], outline: Outline) -> None:
        """A value comes from compiled code."""
        raise NotImplementedError


class TracedTap(Traced):
    """That of a tap."""

    hook: Tap

    def __init__(self, tap: Tap, model: Any) -> None:
        self.gradient = tap.site.address.grad
        super().__init__(tap, tap.site.owner())

    def given(self, value: Any) -> Any:
        """The value as the tap has it."""
        return value

    def value(self, leaves: Sequence[Tensor], outline: Outline) -> None:
        tap = self.hook
        if tap.action.may_keep_given:  # this memory is the compiled code's, which uses it again
            leaves = [leaf.clone() for leaf in leaves]
        reached = tap.reached(self.given(outline.fill(leaves)))
        if reached is not None:
            call, part = reached
            tap.changed(part, call)

    def token(self, outline: int, graded: Sequence[int]) -> int:
        """A value comes whose gradient is waited for; `graded`: its leaves that have one. Returns what tells its call."""
        tap = self.hook
        stand_ins = _outline_of[outline].stand_ins()
        reached = tap.reached(self.given(_outline_of[outline].fill(stand_ins)))
        if reached is None or not tap.scope.is_open:
            return -1
        call, part = reached
        if not isinstance(part, Tensor):
            tap.action.on_structure(tap, part, call.number)
        path_of = {id(tensor): path for path, tensor in leaves(part)}
        wanted = {i: path_of[id(one)] for i, one in enumerate(stand_ins) if id(one) in path_of}
        self._paths[outline] = {i: path for i, path in wanted.items() if i in graded}
        for i in wanted.keys() - set(graded):
            tap.note_no_graph(stand_ins[i], call.number)
        if self._paths[outline]:
            tap.born = next_sequence_number() - 0.5
        return self.serial << _CALLS | call.number

    def arrived(self, grad: Tensor, token: int, outline: int, leaf: int) -> None:
        """The gradient of one leaf."""
        is_own = token >> _CALLS == self.serial and self.hook.scope.is_open
        if is_own and (path := self._paths.get(outline, {}).get(leaf)) is not None:
            self.hook.arrive(token & ((1 << _CALLS) - 1), path, grad)


class TracedOutput(TracedTap):
    """That of a tap on a module's output."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _trace(self.number, self.gradient, output)
        return self.hook(module, args, output)  # type: ignore[operator]


class TracedInput(TracedTap):
    """That of a tap on a module's inputs."""

    hook: InputTap

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _trace(self.number, False, (args, kwargs))
        return self.hook(module, args, kwargs)

    def given(self, value: Any) -> Any:
        return Inputs(*value, self.hook.names)


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
    outline = _number_of(take_apart(value, found))
    if not gradient:
        torch.ops.tenterhook.value(found, number, outline)
        return
    graded = [i for i, leaf in enumerate(found) if leaf.requires_grad] if torch.is_grad_enabled() else []
    token = torch.ops.tenterhook.token(number, outline, graded)
    for i in graded:
        _trace_gradient(found[i], token, number, outline, i)


def _trace_gradient(leaf: Tensor, token: Tensor, number: int, outline: int, i: int) -> None:
    if leaf.is_leaf:  # a hook on it would stay when the session is over
        _refuse("a value whose gradient is asked for is a parameter or an input, handed on as it is")
        return
    leaf.register_hook(lambda grad: torch.ops.tenterhook.gradient(grad, token, number, outline, i))


@torch.compiler.assume_constant_result
def _number_of(spec: Spec) -> int:
    if spec not in _outlines:
        _outline_of.append(Outline(spec))
        _outlines[spec] = len(_outline_of) - 1
    return _outlines[spec]


@torch.compiler.assume_constant_result
def _refuse(why: str) -> None:
    twins.refuse(why)


# What comes when it runs.


class _Receiver:
    def value(self, leaves: Sequence[Tensor], tap: int, outline: int) -> None:
        if (traced := _active.get(tap)) is not None:
            traced.value(leaves, _outline_of[outline])

    def token(self, tap: int, outline: int, graded: Sequence[int]) -> int:
        traced = _active.get(tap)
        return traced.token(outline, graded) if isinstance(traced, TracedTap) else -1

    def gradient(self, grad: Tensor, call: int, tap: int, outline: int, leaf: int) -> None:
        if isinstance(traced := _active.get(tap), TracedTap):
            traced.arrived(grad, call, outline, leaf)


tap_ops.receiver = _Receiver()
compiler.never_compile(TracedOutput.__call__, TracedInput.__call__, TracedEvery.__call__)


# Sessions.


class Compiled:
    """What a session has in compiled code."""

    is_over = False

    def __init__(self, session: "Session") -> None:
        self._traced: list[Traced] = []
        self.used: list[twins.Twin] = []  # twins that ran, or could not be made
        self.why = why_not(session)
        if not self.why:
            model = session.model()
            session.places.exchange(lambda hook: self._made(hook, model))

    def _made(self, hook: Hook, model: Any) -> Hook:
        traced = next(cls(hook, model) for kind, cls in _KINDS if isinstance(hook, kind))
        _active[traced.number] = traced
        self._traced.append(traced)
        return traced

    def over(self) -> None:
        """The session is over."""
        self.is_over = True
        for traced in self._traced:
            _active.pop(traced.number, None)

    def note(self) -> str:
        """What a report says of it."""
        if why := self.why or next((twin.why for twin in self.used if twin.why), ""):
            return f"compiled code ran eagerly while this session was open: {why}"
        return _IN_COMPILED if self.used else ""


_KINDS: tuple[tuple[type, type[Traced]], ...] = ((OutputTap, TracedOutput), (InputTap, TracedInput), (Every, TracedEvery))


def why_not(session: "Session") -> str:
    """Why what is compiled has to run eagerly in a session; empty if it has not to."""
    if session.eager:
        return "eager=True asks for it"
    if session.scope.frozen:
        return "frozen=True gives values another graph than they were compiled with"
    for tap in session.taps:
        if why := _why_not(tap):
            return f"{tap.site} {why}"
    return ""


def _why_not(tap: Any) -> str:
    address = tap.site.address
    if tap.site.kind == "inner":
        return "is a value inside a forward"
    if tap.site.kind in ("parameter", "buffer"):
        return "is changed, and a checkpoint would have to know" if tap.changes else ""
    if tap.changes:
        return "is edited"
    if tap.site.kind == "module" and address.role == "in" and address.grad:
        return "is the gradient of an input, found in the graph of its module"
    return "keeps the graph (detach=False)" if tap.action.needs_graph else ""


def choose(callback: Any) -> Any:
    """What Dynamo calls back for compiled code that is called now; None where it is to run as it is written."""
    if callback is None or callback is False:
        return None
    if not here() and graph_task() == -1:
        return None
    sessions: list[Session] = compiler.holders()
    for session in sessions:
        if session.compiled is None or session.compiled.is_over:
            session.compiled = Compiled(session)
    why = compiler.stance_of_user()
    if why or any(session.compiled.why for session in sessions):
        for session in sessions:
            session.compiled.why = session.compiled.why or why or "another session needs it"
        return None
    twin = twins.twin_of(callback, frozenset(_active))
    for session in sessions:
        if twin is None:
            session.compiled.why = "it was compiled in a way that is not known here"
        elif twin not in session.compiled.used:
            session.compiled.used.append(twin)
    return twin
