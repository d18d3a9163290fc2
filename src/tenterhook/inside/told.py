"""What is done at each kind of place, when the copy of a function calls."""

from collections import UserDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tenterhook.inside import engine
from tenterhook.inside.calls import Here, Running, enter, forget
from tenterhook.inside.dispatch import Place, acts, tell
from tenterhook.inside.engine import new_value, older_value, written
from tenterhook.inside.instrument import CALLED, HERE
from tenterhook.inside.operation import called_operation
from tenterhook.inside.variables import PLAIN, holder, holds_tensors, look_up
from tenterhook.platform.compiler import never_compile
from tenterhook.platform.frames import frame_here

_frame = frame_here  # of the function itself: two above what the dispatcher calls


def begin(place: Place, me: Any, here: object, extra: object) -> Here | None:
    """The function begins. Returns what it hands to us from then on."""
    engines = engine.now.get()
    me = me if isinstance(me, nn.Module) else None
    for one in engine.anywhere:
        if one not in engines:
            one.begins_elsewhere(place, me)
    frame = _frame(2)
    found = [running for one in engines if (running := one.begin(frame, place, me)) is not None]
    if found:
        return enter(frame, found)
    forget(frame)
    return None


def stored(place: Place, value: Any, here: Here, extra: object) -> Any:
    """A variable or attribute is about to be assigned."""
    if type(value) in PLAIN or not holds_tensors(value):
        return value
    return _assign(place, value, (running for running in here if running.want.has(place.name)))


def given(place: Place, value: Any, here: Here, extra: object) -> Any:
    """The function begins, and this is what it was given for an argument."""
    if type(value) in PLAIN or not holds_tensors(value):
        return value
    return _assign(place, value, (running for running in here if place.name in running.want.names))


def _assign(place: Place, value: Any, here: Iterable[Running]) -> Any:
    for running in here:
        if not isinstance(value, Tensor):
            running.containers.add((place.name, id(value)))
        new = running.engine.came(running, place, place.name, value, older_value if place.older else new_value)
        value = value if new is None else new
    return value


def wrote(place: Place, nothing: None, here: Here, extra: object) -> None:
    """Something was assigned to an item of a variable."""
    value = look_up(_frame(2), place.name)
    if isinstance(value, Tensor):
        _tell_written(place, place.name, value, here)
    elif place.fills:
        _filled(place, value, here)


def made(place: Place, value: Any, here: Here, container: Any) -> Any:
    """An operator has a result that no variable takes; `container`: what it is an item or attribute of."""
    if isinstance(value, Tensor) and (container is None or isinstance(container, Tensor)):
        return _hand_on(place, place.name, value, here)
    return value


def called(place: Place, value: Any, here: Here, callee: Any) -> Any:
    """A call has a result that no variable takes."""
    if value is None and place.fills:
        _filled(place, look_up(_frame(2), place.fills), here)
    if type(value) in PLAIN or not holds_tensors(value):
        return value
    name = called_operation(callee, place.name)
    if name is None:
        return value
    if place.is_statement and isinstance(value, Tensor):
        held_by = holder(_frame(2), value, place.written)
        if held_by is not None and (held_by in place.written or name.endswith("_")):
            _tell_written(place, held_by, value, here)
            return value
    return _hand_on(place, name, value, here)


def follow(place: Place, callee: Any, here: Here, argument: Any) -> Any:
    """Something is about to be called. Returns what is called."""
    for running in here:
        if running.want.follow:
            callee = running.engine.follow(callee, running, place, argument)
    return callee


def looked(place: Place, value: Any, here: object, extra: object) -> Any:
    """What `locals` and the like return does not show our variables."""
    if type(value) is dict:
        for name in (HERE, CALLED):
            value.pop(name, None)
    elif type(value) is list:
        value[:] = [name for name in value if not (type(name) is str and name in (HERE, CALLED))]
    return value


def _hand_on(place: Place, name: str, value: Any, here: Here) -> Any:
    for running in here:
        if running.want.operations and running.want.has(name):
            new = running.engine.came(running, place, name, value, older_value if place.older else new_value)
            value = value if new is None else new
    return value


def _filled(place: Place, value: Any, here: Here) -> None:
    """Something was added to a list or the like: tell of it when it holds its first tensor."""
    if not isinstance(value, list | dict | UserDict) or not holds_tensors(value):
        return
    name = place.fills
    for running in here:
        if running.want.has(name) and (name, id(value)) not in running.containers:
            running.containers.add((name, id(value)))
            running.engine.came(running, place, name, value, older_value)


def _tell_written(place: Place, name: str, value: Tensor, here: Here) -> None:
    for running in here:
        if running.want.has(name):
            running.engine.came(running, place, name, value, written)


acts.update(begin=begin, given=given, stored=stored, wrote=wrote, made=made, called=called)
acts.update(follow=follow, looked=looked)
never_compile(tell)  # else torch.compile would take what we do as frames of its own, where it breaks a graph for us
