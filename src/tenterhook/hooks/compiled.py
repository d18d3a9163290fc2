"""The taps of sessions in compiled code.

PyTorch traces the hooks that a module has when its code is compiled. So when compiled code is called inside a session,
each of our hooks becomes one that can be traced (traced.py, tracing.py), and the code is compiled as a twin of the
user's (platform/twins.py), once for each set of such hooks. `Compiled` is what a session has of this; it is imported
when first needed. Where a hook cannot be traced, compiled code runs as it is written, and the report says so.
"""

from typing import Any

from tenterhook.hooks.every import Every
from tenterhook.hooks.gradients import GradientTap
from tenterhook.hooks.inputs import After, InputTap
from tenterhook.hooks.outputs import OutputTap, StartHook
from tenterhook.hooks.scope import here
from tenterhook.hooks.session import Session, lock
from tenterhook.hooks.traced import TracedAfter, TracedEvery, TracedInput, TracedOutput, TracedStart
from tenterhook.hooks.tracing import Traced, active
from tenterhook.platform import compiler, twins
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.checkpoints import may_be_checkpointed
from tenterhook.platform.hook_tables import Hook

_IN_COMPILED = "compiled code had the taps in it and fuses nothing across a tap: last bits may differ from it without"
_KINDS: tuple[tuple[type, Any], ...] = (
    (OutputTap, TracedOutput),
    (InputTap, TracedInput),
    (After, TracedAfter),
    (Every, TracedEvery),
    (StartHook, TracedStart),
)


class Compiled:
    """What a session has in compiled code."""

    is_over = False

    def __init__(self, session: Session) -> None:
        self._traced: list[Traced] = []
        self.used: list[twins.Twin] = []  # twins that ran, or could not be made
        self.why = why_not(session)
        if not self.why:
            model = session.model()
            session.places.exchange(lambda hook: self._made(hook, model))
            for mode in session.modes:
                self._add(mode.traced(model))

    def _made(self, hook: Hook, model: Any) -> Hook:
        traced = next(cls(hook, model) for kind, cls in _KINDS if isinstance(hook, kind))
        return self._add(traced)

    def _add(self, traced: Traced) -> Traced:
        active[traced.number] = traced
        self._traced.append(traced)
        return traced

    def over(self) -> None:
        """The session is over."""
        with lock:
            self.is_over = True
            for traced in self._traced:
                active.pop(traced.number, None)
                traced.over()
            self._traced.clear()

    def note(self) -> str:
        """What a report says of it."""
        if why := self.why or next((twin.why for twin in self.used if twin.why), ""):
            return f"compiled code ran eagerly while this session was open: {why}"
        return _IN_COMPILED if self.used else ""


def why_not(session: Session) -> str:
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
    if isinstance(tap, GradientTap) and tap.site.kind == "inner":
        return ""  # one of the values of an address
    if tap.site.kind == "inner":
        return str(tap.why_not_compiled)
    if tap.site.kind in ("parameter", "buffer"):
        return "is changed, and a checkpoint would have to know" if tap.changes else ""
    return str(tap.action.why_not_compiled)


def choose(callback: Any) -> Any:
    """What Dynamo calls back for compiled code that is called now; None where it is to run as it is written."""
    if callback is None or callback is False:
        return None
    if not here() and graph_task() == -1:
        return None
    with lock:
        return _choose(callback)


def _choose(callback: Any) -> Any:
    sessions: list[Session] = compiler.holders()
    why = _why_not_now(sessions)
    own = [session for session in sessions if session.scope in here() or not here()]
    for session in own:
        if session.compiled is None or session.compiled.is_over:
            session.compiled = Compiled(session)
    if why or any(session.compiled.why for session in own):
        for session in own:
            session.compiled.why = session.compiled.why or why or "another session needs it"
        return None
    # Edits of one place are made in turn, so that their order matters.
    twin = twins.twin_of(callback, (frozenset(active), tuple(n for n, one in active.items() if one.changes)))
    for session in own:
        if twin is None:
            session.compiled.why = "it was compiled in a way that is not known here"
        elif twin not in session.compiled.used:
            session.compiled.used.append(twin)
    return twin


def _why_not_now(sessions: list[Session]) -> str:
    """Why compiled code has to run eagerly in this call, whatever is asked for."""
    if here() and any(session.scope not in here() for session in sessions):
        return "another thread or async task has a session open, too"
    if any(session.modes for session in sessions) and (graph_task() != -1 or may_be_checkpointed()):
        return "values inside a forward are asked for, and a checkpoint runs it"
    return compiler.stance_of_user()
