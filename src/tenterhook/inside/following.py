"""Which functions run a copy of their code for one session: those known beforehand, and those that they call."""

import types
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from tenterhook.hooks.session import Session
from tenterhook.inside.copies import ask, original, withdraw
from tenterhook.inside.functions import functions_of, is_followed, what_runs
from tenterhook.inside.instrument import codes_in
from tenterhook.inside.operation import is_own_function
from tenterhook.inside.pattern import Patterns

_PROPERTIES = (property, cached_property)
_CALLED_BY_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, Tensor)


class Following:
    """The functions that one session has met."""

    def __init__(self, patterns: Patterns, session: "weakref.ref[Session]") -> None:
        self._patterns = patterns
        self._session = session
        self._met: dict[int, weakref.ref[FunctionType]] = {}
        self._kinds: set[object] = set()  # what else was seen to be called
        self.refused: dict[str, str] = {}  # the names of those that cannot run a copy, and why

    def start(self) -> None:
        """Those met before, which a checkpoint may run again, and those that are known before anything runs."""
        for function in self.functions():
            self._ask(function)
        for owner in self._owners():
            self._meet_owner(owner)
        if self._patterns.probabilities:
            self.meet(nn.functional.multi_head_attention_forward)
        if self._patterns.all_helpers:
            session = self._session()
            modules = (ref() for ref in (session.modules if session is not None else ()))
            for module in {type(module): module for module in modules}.values():
                self.meet(module)

    def stop(self) -> None:
        """None of them runs a copy for this session any more."""
        withdraw(self)

    def functions(self) -> list[FunctionType]:
        """Those met so far."""
        return [function for ref in self._met.values() if (function := ref()) is not None]

    def codes(self) -> Iterator[CodeType]:
        """The code of each, and of the functions in it."""
        for function in self.functions():
            yield from codes_in(original(function.__code__))

    def _owners(self) -> Iterable[Any]:
        """What the addresses begin with; of many modules that run the same functions, one."""
        found: dict[object, Any] = {}
        for wanted in self._patterns.of.values():
            owner = wanted[0].tap.site.module
            runs_own = not isinstance(owner, nn.Module) or "forward" in vars(owner)
            found.setdefault(id(owner) if runs_own else type(owner), owner)
        return found.values()

    def _meet_owner(self, owner: Any) -> None:
        kind = type(owner)
        for name in self._patterns.helpers:
            self.meet(getattr(kind, name, None))
            self.meet(getattr(nn.functional, name, None))
        self.meet(what_runs(owner))
        if self._patterns.of_helpers:
            members = (member for cls in kind.__mro__ if cls is not nn.Module for member in vars(cls).values())
            for member in members:
                for accessor in ("fget", "fset", "func"):  # of a property, or a cached one
                    self.meet(getattr(member, accessor, None) if isinstance(member, _PROPERTIES) else None)

    def meet(self, thing: Any, method: str = "") -> None:
        """Something may be called: have the functions that run then tell what is wanted of them."""
        for function in functions_of(thing, method):
            known = self._met.get(id(function))
            if known is None or known() is not function:
                self._met[id(function)] = weakref.ref(function)
                if self._is_wanted(function):
                    self._ask(function)

    def _is_wanted(self, function: FunctionType) -> bool:
        code = original(function.__code__)
        if not is_followed(code.co_filename):
            return False
        if is_own_function(function) and code.co_name not in self._patterns.helpers:
            return False
        return any(map(self._patterns.want, codes_in(code)))

    def _ask(self, function: FunctionType) -> None:
        if why := ask(function, self, self._patterns.want):
            self.refused[function.__qualname__] = why

    def follow(self, callee: Any, method: str, argument: Any) -> None:
        """Something is about to be called, maybe with a function as its first argument."""
        if isinstance(argument, FunctionType | MethodType | partial):
            self.meet(argument)
        kind = type(callee)
        if kind is FunctionType:
            known = self._met.get(id(callee))
            if known is None or known() is not callee:
                self.meet(callee)
        elif kind is partial or (kind is MethodType and not isinstance(callee.__self__, nn.Module)):
            self.meet(callee)
        elif not isinstance(callee, _CALLED_BY_C):
            key = id(callee.__func__) if kind is MethodType else id(callee) if kind is type else (kind, method)
            if key not in self._kinds:
                self._kinds.add(key)
                self.meet(callee, method)
