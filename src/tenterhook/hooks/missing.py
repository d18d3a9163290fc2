"""Why a gradient is missing: what is known of a value that had no graph, and of backward passes that did not reach one.

What is noted costs nothing where gradients come: of a value without a graph, how it was made; of a backward pass that
left a gradient out, what its graph holds. Only when the reason is asked for is the source read (addresses/cuts.py), to
name the operation between two places that are known not to be connected.
"""

import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tenterhook.addresses.cuts import LIVE, NOTHING, Stretch, Value, Way, where_gradients_are_off
from tenterhook.addresses.modules import walk
from tenterhook.addresses.source import is_users
from tenterhook.hooks.scope import here
from tenterhook.platform.autograd import graph_task, sequence_number
from tenterhook.platform.engine import Asked, listen, nodes_behind, unlisten
from tenterhook.platform.frames import CALLS, all_variables, frame_here, frames_from, given_to_module
from tenterhook.values.tree import describe, leaves

if TYPE_CHECKING:
    from tenterhook.hooks.session import Session

_MOST_PASSES = 10  # of which the graph is looked at, where gradients never came
_FRAMES = 30
_CALLERS = 5
_OPT_IN = "frozen=True gives it one all the same"


class Ungraded(NamedTuple):
    """A value that came without a graph, though its dtype could have one."""

    is_on: bool  # whether gradients were on
    given: bool | None  # whether what it was made from requires a gradient; None where that cannot be seen
    lines: tuple[tuple[CodeType, int], ...]  # the user's functions that ran, the innermost first


def ungraded(tensor: Tensor, is_input: bool, spot: Any) -> Ungraded:
    """To be called where a tensor that requires no gradient has come."""
    if not torch.is_grad_enabled():
        frames = [one for one in frames_from(frame_here(1)) if is_users(one.f_code)][:_FRAMES]
        return Ungraded(False, None, tuple((one.f_code, one.f_lineno) for one in frames))
    if is_input:
        return Ungraded(True, False, ())
    if spot is not None:
        return Ungraded(True, _variables_require(spot.code), ())
    return Ungraded(True, any(t.requires_grad for _, t in leaves(given_to_module(frame_here(1)))), ())


def _variables_require(code: CodeType) -> bool | None:
    """Whether anything that a running function holds requires a gradient."""
    for frame in frames_from(frame_here(2)):
        if (frame.f_code.co_filename, frame.f_code.co_firstlineno) == (code.co_filename, code.co_firstlineno):
            values = all_variables(frame).values()
            return any(t.requires_grad for value in values for t in _tensors_in(value))
    return None


def _tensors_in(value: Any) -> list[Tensor]:
    return list(value.parameters()) if isinstance(value, nn.Module) else [tensor for _, tensor in leaves(value)]


class Caller(NamedTuple):
    """A function of the user's that has led to a backward pass."""

    code: CodeType
    line: int
    names: dict[str, "weakref.ref[Any]"]  # of its variables: what can be called
    known: dict[str, Any]  # its globals


class Passed(NamedTuple):
    """A backward pass that did not bring a gradient to a site that it could have come to."""

    failed: str  # the exception that ended it
    has_it: bool  # whether the value is in the graph of the loss
    asked_others: bool  # whether the pass was for other gradients only
    first: str  # the module whose weights are used first, of what is in the graph and came after the value
    reaches: tuple[str, ...]  # the parameters in the graph
    callers: "tuple[Caller, ...]"  # the functions that started it, the innermost first


class Passes:
    """The backward passes of one session, as far as gradients that it waits for did not come."""

    def __init__(self, session: "Session") -> None:
        self._session = weakref.ref(session)
        self.pending: list[Any] = []  # the taps of gradients to which nothing has come
        self._looked_at = 0
        self.count = 0

    def start(self) -> None:
        """From here on."""
        listen(self.ran)

    def stop(self) -> None:
        """No more."""
        unlisten(self.ran)

    def ran(self, asked: Asked, failed: str) -> None:
        """A backward pass is over."""
        session = self._session()
        if session is None or session.scope not in here() or graph_task() != session.scope.task:
            return
        self.count += not failed
        self.pending = [tap for tap in self.pending if not tap.action.has_come(tap)]
        waiting = [tap for tap in self.pending if tap.born is not None]
        if waiting and self._looked_at < _MOST_PASSES:
            self._looked_at += 1
            self._look(waiting, asked, failed, session.model())

    def _look(self, waiting: list[Any], asked: Asked, failed: str, model: Any) -> None:
        nodes = list(nodes_behind(asked))
        variables = {id(leaf): leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None}
        parameters = list(model.named_parameters()) if isinstance(model, nn.Module) else []
        names = {id(parameter): name for name, parameter in parameters}
        reaches = tuple(name for number, name in names.items() if number in variables)
        made = sorted(((sequence_number(n), n) for n in nodes if not hasattr(n, "variable")), key=lambda pair: pair[0])
        numbers = {number for number, _ in made}
        frames = [one for one in frames_from(frame_here(2)) if is_users(one.f_code)][:_CALLERS]
        callers = tuple(Caller(f.f_code, f.f_lineno, _callables(all_variables(f)), f.f_globals) for f in frames)
        for tap in waiting:
            has_it = id(tap.site.tensor) in variables if tap.site.tensor is not None else tap.born in numbers
            first = next((own for number, node in made if number > tap.born and (own := _owner_of(node, names))), "")
            tap.passed = Passed(failed, has_it, bool(asked.inputs), first, reaches, callers)


def _owner_of(node: Any, names: dict[int, str]) -> str:
    """The module whose weight a node uses."""
    for following, _ in node.next_functions:
        for one in (following, *(deeper for deeper, _ in following.next_functions)) if following is not None else ():
            name = names.get(id(getattr(one, "variable", None)), "")
            if name:
                return name.rpartition(".")[0] or "."
    return ""


def _callables(variables: dict[str, Any]) -> dict[str, "weakref.ref[Any]"]:
    found = {}
    for name, value in variables.items():
        if isinstance(value, nn.Module) or (callable(value) and hasattr(value, "__code__")):
            found[name] = weakref.ref(value)
    return found


# In words, when somebody asks.


def why_no_graph(tap: Any, model: Any, fact: Ungraded) -> str:
    """Why a value had no graph."""
    if not fact.is_on:
        cut = next((cut for code, line in fact.lines if (cut := where_gradients_are_off(code, line))), None)
        where = f", opened by {cut}" if cut is not None else ""
        return f"it ran under torch.no_grad() or inference_mode(), where there are no gradients{where}"
    site, module = tap.site, tap.site.module
    if site.kind == "inner":
        return _why_inner(site, model, fact)
    own = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
    if site.address.role == "out" and (fact.given or own):
        value = Way(None).through(module, LIVE if fact.given else NOTHING)
        what = "what it is given requires" if fact.given else "its parameters require"
        return f"{what} a gradient and its output does not: {_cut_in('inside it', value)}"
    return _why_before(model, module, Stretch(module, "in"), own)


def _why_inner(site: Any, model: Any, fact: Ungraded) -> str:
    owner = site.module
    end = Stretch(code=site.spot.code, line=site.spot.line)
    way = Way(None, end)
    if fact.given and isinstance(owner, nn.Module):
        way.through(owner, LIVE)
    elif fact.given:
        way.through_function(owner.function)
    elif isinstance(model, nn.Module):
        return _why_before(model, owner, end, [])
    else:
        return f"frozen: nothing before it requires a gradient; {_OPT_IN}"
    if not way.arrived.cuts:
        return "it requires no gradient: nothing that it is made from does, or it is cut off, where is unknown"
    return _cut_in("there or before it", way.arrived)


def _why_before(model: Any, module: Any, end: Stretch, own: list[Any]) -> str:
    trained = isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())
    if not trained:
        return f"frozen: nothing before it requires a gradient; {_OPT_IN}"
    way = Way(None, end)
    way.through(model)
    if way.arrived.cuts:
        return f"what it is made from requires no gradient: {_cut_in('before it', way.arrived)}"
    why = "what it is made from requires no gradient" + ("" if own else ", and neither do parameters of its own")
    return f"{why}; {_OPT_IN}"


def _cut_in(where: str, value: Value) -> str:
    if not value.cuts:
        return f"the graph is cut {where}, by what operation is unknown"
    perhaps = "perhaps by" if value.live else "by"
    return f"the graph is {_cut_by(value).replace('by', f'{where} {perhaps}', 1)}"


def _cut_by(value: Value) -> str:
    return "cut by " + " or ".join(map(str, value.cuts[:3]))


def why_not_reached(tap: Any, model: Any, passes: "Passes | None") -> str:
    """Why no gradient came to a value that has a graph."""
    view = ", or the base of this view was changed in place" if tap.is_view and tap.passed is not None else ""
    return f"no backward inside this session reached it: {_which_pass(tap, model, passes)}{view}"


def _which_pass(tap: Any, model: Any, passes: "Passes | None") -> str:
    passed: Passed | None = tap.passed
    if passed is None:
        return "those that ran came before it" if passes is not None and passes.count else "none ran"
    if passed.has_it and passed.failed:
        return f"{passed.failed} ended it"
    if passed.has_it and passed.asked_others:
        return "the pass was for other gradients (inputs=, or autograd.grad), which are nearer to the loss"
    if passed.has_it:
        return "it is in the graph of the loss, and what is in between handed no gradient on"
    after = f", which begins after it with {passed.first}" if passed.first else ""
    if not passed.first and isinstance(model, nn.Module):
        after = f", which leads to {_names_of(passed.reaches)}"
    value = NOTHING if tap.is_view else _way_to_loss(tap, model, passed)
    if value.cuts and not value.live:
        return f"the graph is {_cut_by(value)}; it is not in the graph of the loss{after}"
    unknown = f"perhaps {_cut_by(value)}" if value.cuts else "where is unknown"
    return f"it is not in the graph of the loss{after}: it is not used for the loss, or cut off before that, {unknown}"


def _way_to_loss(tap: Any, model: Any, passed: Passed) -> Value:
    """From the value to where the backward was started, through the source of both."""
    if not isinstance(model, nn.Module):
        return NOTHING
    site = tap.site
    if site.kind == "inner":
        start = Stretch(code=site.spot.code, line=site.spot.line)
    else:
        start = Stretch(site.module, _role(site))
    for one in passed.callers:
        things = {name: thing for name, ref in one.names.items() if (thing := ref()) is not None}
        value = Way(start).to_line(one.code, one.line, things, one.known.get)
        if value.live or value.cuts:
            return value
    value = Way(start).through(model)
    parts = [part for _, part in value.parts] or [value]  # the loss may be made from any
    return value if all(part.cuts and not part.live for part in parts) else NOTHING


def _role(site: Any) -> str:
    return site.address.name.rpartition(".")[2] if site.kind == "parameter" else site.address.role


def _names_of(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "no parameter of the model") + more


# Exceptions.


class Raised(NamedTuple):
    """The exception that ended the block, and the modules that were running."""

    what: str
    given: "weakref.WeakKeyDictionary[nn.Module, str]"  # what each was called with

    def innermost(self, model: Any) -> str:
        """The address of the module that was called last, with what it was given."""
        last = next(reversed(list(self.given.items())), None)
        if last is None or not isinstance(model, nn.Module):
            return ""
        name = next((name for name, module in walk(model) if module is last[0]), type(last[0]).__name__)
        return f"{name}, called with {last[1]}"


def raised(error: BaseException | None = None, trace: Any = None) -> Raised:
    """What an exception tells, by the frames that it came through."""
    given: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == CALLS:
            values = all_variables(trace.tb_frame)
            if isinstance(module := values.get("self"), nn.Module):
                given[module] = _in_words(values.get("args", ()), values.get("kwargs", {}))
        trace = trace.tb_next
    text = str(error).strip().partition("\n")[0][:200]
    return Raised(f"{type(error).__name__}: {text}" if text else type(error).__name__, given)


def _in_words(args: Any, kwargs: Any) -> str:
    named = [f"{name}={describe(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(describe, args), *named]) or "nothing"
