"""Why nothing came to an address inside a forward."""

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from tenterhook.addresses.grammar import matches, split_number
from tenterhook.addresses.sites import Site
from tenterhook.errors import close_matches
from tenterhook.inside.copies import original
from tenterhook.inside.engine import Inside
from tenterhook.inside.functions import codes_of, functions_of, is_followed, part, what_runs
from tenterhook.inside.instrument import codes_in
from tenterhook.inside.operation import attention, is_operation
from tenterhook.inside.pattern import PROBABILITIES

_DEPTH = 5  # calls, of functions that call functions
_NOT_RUN = "no tensor came to it: that line did not run, or it holds something else"


def why_silent(engine: Inside, site: Site) -> str:
    """The most likely reason; empty if the forward never ran."""
    owner = site.module
    name, number = split_number(site.address.inner)
    came = engine.names_that_came(owner)
    if name in came and number is not None:
        return f"it was not assigned {number + 1 if number >= 0 else -number} times within one call"
    codes = [code for code in codes_of(owner) if engine.has_run(code)]
    if not codes:
        return _why_not_run(engine, owner)
    *helpers, last = name.split("/")[1:]
    if elsewhere := [str(site.address._replace(inner=base)) for base in came if base.endswith(f"/{last}")]:
        return f"it came as {', '.join(elsewhere[:4])}"
    if helpers:
        return _why_not_in(engine, helpers[-1], last)
    if last in _variables(codes):
        return _NOT_RUN
    if found := [str(site.address._replace(inner=path)) for path in _paths_below(owner, last)]:
        return f"it is made in a function that the forward calls: ask for {', '.join(found[:4])}"
    deeper = site.address._replace(inner=f"/**/{last}")
    return f"{_why_not_assigned(last, codes)}; what is in functions that it calls is asked for as {deeper}"


def _paths_below(owner: Any, last: str) -> list[str]:
    """The functions called by a forward that may have such a value, as far as their names tell, as paths."""
    found: dict[str, None] = {}
    waiting = [(function, "", 0) for function in functions_of(what_runs(owner))]
    seen = {id(function.__code__) for function, *_ in waiting}
    for function, prefix, depth in waiting:  # which grows meanwhile
        if depth and _may_make(original(function.__code__), last):
            found[f"{prefix}/{last}"] = None
        if last == PROBABILITIES and attention.__name__ in _names_in(function):
            found[f"{prefix}/{attention.__name__}/{last}"] = None
        for one in _called_by(function, owner) if depth < _DEPTH else ():
            code = original(one.__code__)
            if id(code) not in seen and is_followed(code.co_filename):
                seen.add(id(code))
                name = part(code, None)
                waiting.append((one, f"{prefix}/{name}" if name else prefix, depth + 1))
    return list(found)


def _may_make(code: CodeType, name: str) -> bool:
    return name in _variables([code]) or (is_operation(name) and any(name in one.co_names for one in codes_in(code)))


def _names_in(function: FunctionType) -> set[str]:
    return {name for code in codes_in(original(function.__code__)) for name in code.co_names}


def _called_by(function: FunctionType, owner: Any) -> Iterator[FunctionType]:
    """The functions that another one may call: methods of the same object, and those of its module by name."""
    every = [one for code in codes_in(original(function.__code__)) for one in dis.get_instructions(code)]
    read = {one.argval for one in every if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    globally = [function.__globals__.get(name) for name in sorted(read)]
    spaces = [vars(type(owner)), *(vars(thing) for thing in globally if isinstance(thing, ModuleType))]
    attributes = sorted(_names_in(function) - read - {"forward"})
    for thing in (*globally, *(space.get(name) for space in spaces for name in attributes)):
        if isinstance(thing, FunctionType):
            yield thing


def _why_not_in(engine: Inside, helper: str, last: str) -> str:
    """Why no value came from a helper function."""
    named = [code for code in engine.following.codes() if matches(f"/{helper}", f"/{code.co_name.strip('<>')}")]
    ran = [code for code in named if engine.has_run(code)]
    have_it = [code for code in named if last in _variables([code])]
    if not named or (have_it and not any(map(engine.has_run, have_it))):
        what = f"a function {helper}" if "*" not in helper else "such a function"
        return f"no call of {what} was seen in it; see sites(model, *inputs)"
    if not ran:
        return "no such value came from any function that was seen to run in it; see sites(model, *inputs)"
    return _why_not_assigned(last, [code for code in have_it or ran if engine.has_run(code)])


def _why_not_run(engine: Inside, owner: Any) -> str:
    if engine.was_elsewhere:
        return "it ran in another thread, and a session sees the one that entered the block"
    if not isinstance(owner, nn.Module):
        return "it was not called inside this session"
    met, forwards = engine.following.functions(), codes_of(owner)
    is_new = any(one not in met for one in functions_of(owner) if original(one.__code__) in forwards)
    return "its forward was replaced after the block was entered" if is_new else ""


def _why_not_assigned(name: str, codes: list[CodeType]) -> str:
    """Why no value of that name came from some functions that ran."""
    names = sorted(_variables(codes))
    if name in names:
        return _NOT_RUN
    near = close_matches(name, names)
    hint = f"did you mean {', '.join(near)}?" if near else f"its variables are {', '.join(names[:12]) or 'none'}"
    return f"no value of that name came while it ran; {hint} (all of them: sites(model, *inputs))"


def _variables(codes: list[CodeType]) -> set[str]:
    return {variable for code in codes for variable in (*code.co_varnames, *code.co_cellvars)}
