"""What holds a module: the variables of the code that calls it, or any other object."""

import gc
import itertools
from collections.abc import Callable, Iterator
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any

from torch import nn

from tenterhook.addresses.modules import unwrap, walk
from tenterhook.platform.frames import CALLS, all_variables, frames_from

_OURS = __name__.partition(".")[0]
_MOST_FRAMES = 40


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, without torch's and ours."""
    for one in itertools.islice(frames_from(frame), _MOST_FRAMES + 1):
        if one.f_globals.get("__name__", "").partition(".")[0] not in ("torch", _OURS):
            yield one


def largest(frame: FrameType | None, size_of: Callable[[nn.Module], int]) -> tuple[str, nn.Module | None]:
    """The largest module among the variables of the frames that call, and its name there."""
    best: tuple[str, nn.Module | None] = ("", None)
    size = 0
    for one in callers(frame):
        for name, value in all_variables(one).items():
            if issubclass(type(value), nn.Module) and (held := size_of(value)) > size:
                size, best = held, (_readable(name, value), value)
    return best


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


def _readable(name: str, module: nn.Module) -> str:
    return type(unwrap(module)).__name__ if name in ("self", "_", "module", "mod") else name
