"""Why nothing came to an address inside a forward."""

from types import CodeType
from typing import Any

from torch import nn

from tenterhook.addresses.grammar import matches, split_number
from tenterhook.addresses.sites import Site
from tenterhook.errors import close_matches
from tenterhook.inside.copies import original
from tenterhook.inside.engine import Inside
from tenterhook.inside.functions import codes_of, functions_of


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
    return _why_not_in(engine, helpers[-1], last) if helpers else _why_not_assigned(last, codes)


def _why_not_in(engine: Inside, helper: str, last: str) -> str:
    """Why no value came from a helper function. Only those that have a variable of that name tell that they ran."""
    every = {code: _variables([code]) for code in engine.following.codes()}
    named = [code for code in every if matches(f"/{helper}", f"/{code.co_name.strip('<>')}")]
    have_it = [code for code in named if last in every[code]]
    if not named or (have_it and not any(map(engine.has_run, have_it))):
        what = f"a function {helper}" if "*" not in helper else "such a function"
        return f"no call of {what} was seen in it; see sites(model, *inputs)"
    return _why_not_assigned(last, have_it or named)


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
        return "no tensor came to it: that line did not run, or it holds something else"
    near = close_matches(name, names)
    hint = f"did you mean {', '.join(near)}?" if near else f"its variables are {', '.join(names[:12]) or 'none'}"
    return f"no value of that name came while it ran; {hint} (all of them: sites(model, *inputs))"


def _variables(codes: list[CodeType]) -> set[str]:
    return {variable for code in codes for variable in (*code.co_varnames, *code.co_cellvars)}
