"""Which functions run a copy of their code, and the copies that were made.

    ask(function, session, wants)      from here on the function runs a copy, in whatever thread
    withdraw(session)                  and its own code again, once nobody asks

A copy is made once for all who want the same, so that the caches of Python and of torch.compile in it stay warm.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType, FunctionType

from tenterhook.inside.dispatch import Place, can_reach, forget, install, register
from tenterhook.inside.instrument import Want, codes_in, instrument

MOST = 2000  # copies that are kept, whether they run or not
Wants = Callable[[CodeType], Want]
_lock = threading.RLock()
_kept: OrderedDict[tuple[int, tuple[Want, ...]], CodeType] = OrderedDict()
_originals: dict[int, tuple[Callable[[], object], CodeType]] = {}  # by the id of a copy
_changed: dict[int, "_Function"] = {}


class _Function:
    """A function that runs a copy of its code."""

    def __init__(self, function: FunctionType) -> None:
        number = id(function)
        self.function = weakref.ref(function, lambda ref: _changed.pop(number, None) and None)
        self.code = original(function.__code__)
        self.asked: dict[object, Wants] = {}

    def exchange(self, asked: dict[object, Wants]) -> None:
        """Have it run what is asked for; not where somebody else has changed it since."""
        function = self.function()
        if function is not None and original(function.__code__) is self.code:
            function.__code__ = _copy(self.code, list(asked.values())) if asked else self.code
        self.asked = asked


def ask(function: FunctionType, key: object, wants: Wants) -> str:
    """Have a function tell what is wanted of it. Returns why it cannot, or nothing."""
    install()
    if not can_reach(function):
        return "it has builtins of its own"
    with _lock:
        one = _changed.get(id(function))
        if one is None:
            one = _changed[id(function)] = _Function(function)
        try:
            one.exchange({**one.asked, key: wants})
        except Exception as error:  # code that we cannot read
            return f"its code cannot be copied ({type(error).__name__}: {error})"
    return ""


def withdraw(key: object) -> None:
    """Nobody asks for it any more. It may be done again where Ctrl-C came in between."""
    with _lock:
        for number, one in list(_changed.items()):
            if key in one.asked:
                one.exchange({other: wants for other, wants in one.asked.items() if other is not key})
            if not one.asked:
                _changed.pop(number, None)


def original(code: CodeType) -> CodeType:
    """The code that a copy was made of; any other itself."""
    found = _originals.get(id(code))
    return code if found is None else found[1]


def running() -> list[FunctionType]:
    """The functions that run a copy now."""
    with _lock:
        return [function for one in _changed.values() if (function := one.function()) is not None]


def _copy(code: CodeType, asked: list[Wants]) -> CodeType:
    def wants(one: CodeType) -> Want:
        found = Want()
        for want in asked:
            found = found | want(one)
        return found

    every = tuple(map(wants, codes_in(code)))
    if not any(every):
        return code
    key = id(code), every
    copy = _kept.get(key)
    if copy is not None:
        _kept.move_to_end(key)
        return copy
    numbers: list[int] = []

    def number(place: Place) -> int:
        numbers.append(register(place))
        return numbers[-1]

    copy = _kept[key] = instrument(code, wants, number)
    for one, own in zip(codes_in(copy), codes_in(code), strict=True):
        if one is not own:
            _originals[id(one)] = weakref.ref(one, _drop(id(one))), own
    weakref.finalize(copy, forget, numbers)
    while len(_kept) > MOST:
        _kept.popitem(last=False)
    return copy


def _drop(number: int) -> Callable[[object], None]:
    return lambda ref: _originals.pop(number, None) and None
