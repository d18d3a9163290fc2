"""What holds a module: the variables of the code that calls it, or any other object."""

import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any

from torch import nn

from tenterhook.addresses.modules import unwrap, walk
from tenterhook.platform.frames import CALLS, all_variables, frames_from

_OURS = __name__.partition(".")[0]
_MOST_FRAMES, _OUTERMOST = 40, 400
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # files of libraries
_OF_NO_MODEL = ("torch.nn.utils.", "torch.ao.")  # call parametrizations and observers


def callers(frame: FrameType | None, most: int = _MOST_FRAMES) -> Iterator[FrameType]:
    """A frame and those around it, without torch's and ours."""
    for one in itertools.islice(frames_from(frame), most + 1):
        if one.f_globals.get("__name__", "").partition(".")[0] not in ("torch", _OURS):
            yield one


def largest(frame: FrameType | None, size_of: Callable[[nn.Module], int]) -> nn.Module | None:
    """The largest module among the variables of the frames that call."""
    best: nn.Module | None = None
    size = 0
    for one in callers(frame):
        for value in all_variables(one).values():
            if issubclass(type(value), nn.Module) and (held := size_of(value)) > size:
                size, best = held, value
    return best


def name_of(module: nn.Module, frame: FrameType | None) -> str:
    """The name that the user knows a module by: that of the outermost variable, or attribute of a `self`; or its class.

    A library's variables, and names such as `self` or `_`, are no names of the user's.
    """
    found = ""
    for one in callers(frame, _OUTERMOST):
        if not _INSTALLED.search(one.f_code.co_filename):
            variables = all_variables(one)
            found = _key_of(module, variables) or _key_of(module, _attributes(variables.get("self"))) or found
    return found or type(unwrap(module)).__name__


def _key_of(module: nn.Module, names: Mapping[str, Any]) -> str:
    """What holds the module itself, or else what is inside its wrapper, or a wrapper of it."""
    usual = {name: value for name, value in names.items() if name[:1] != "_" and name not in ("self", "module", "mod")}
    found = {name: value for name, value in usual.items() if issubclass(type(value), nn.Module)}
    exact = (name for name, value in found.items() if value is module)
    return next(exact, "") or next((name for name, value in found.items() if unwrap(value) is unwrap(module)), "")


def _attributes(owner: Any) -> Mapping[str, Any]:
    held = getattr(owner, "__dict__", {})
    return {**held, **held["_modules"]} if issubclass(type(owner), nn.Module) else held


def is_called_for_torch(frame: FrameType | None) -> bool:
    """Whether a module is called by what parametrizes or quantizes another one."""
    names = (one.f_globals.get("__name__", "") for one in frames_from(frame) if one.f_code.co_filename != CALLS)
    return next((name for name in names if name.partition(".")[0] != _OURS), "").startswith(_OF_NO_MODEL)


def count_if_held(whole: nn.Module, parts: list[nn.Module]) -> int:
    """How many modules it holds, if these are among them."""
    ids = {id(m) for m in whole.modules()} | {id(m) for _, m in walk(whole)}
    return len(ids) if all(id(part) in ids or id(unwrap(part)) in ids for part in parts) else 0


def is_slice(module: nn.Module, whole: nn.Module) -> bool:
    """Whether this is a Sequential of some layers of one in a module, in their order."""
    if type(module) is not nn.Sequential or not len(module):
        return False
    for one in whole.modules():
        layers = iter(one._modules.values())
        if isinstance(one, nn.Sequential) and all(any(part is other for other in layers) for part in module):
            return True
    return False


def is_kept(module: nn.Module) -> bool:
    """Whether an attribute, a list, a closure or the like has a module: more than the calls that run now.

    This looks at all objects that there are, and takes some tens of milliseconds.
    """
    passing: list[Any] = [module]
    for _ in range(0 if gc.get_freeze_count() else 6):  # those that are frozen are not looked at
        above = []  # bound methods, and the variables of inner functions: who has these?
        found = gc.get_referrers(*passing)
        for one in found:
            if one is found or one is passing or _is_running(one, module):
                continue
            if type(one) not in (MethodType, CellType) and not (type(one) is tuple and type(one[0]) is CellType):
                return True
            above.append(one)
        if not above:
            return False
        passing = above
        del found, one  # else they would be found, too
    return True


def _is_running(one: Any, module: nn.Module) -> bool:
    """Whether this is a call, the function in torch's that a module's call runs, or what `guarded` was given."""
    if type(one) is tuple:
        return len(one) > 1 and one[-2] is module and type(one[-1]) is tuple
    return type(one) is FrameType or (type(one) is FunctionType and one.__code__.co_filename == CALLS)
