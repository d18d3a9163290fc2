"""One of the two: a model that tells of each value when it comes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.grammar import Address, escape, split_number
from tenterhook.addresses.sites import Site, resolve
from tenterhook.comparing.source import Event, Key
from tenterhook.hooks.session import Session
from tenterhook.hooks.tap import Action, Call, Tap
from tenterhook.values.tree import Path, leaves, version_of
from tenterhook.verbs.taps import tap_for

Listener = Callable[[Event], Any]  # returns what takes the place of the value, or None


class _Frame:
    """A call that is running."""

    def __init__(self, key: Key, given: Any) -> None:
        self.key = key  # of its output
        self._given = [(tensor, version_of(tensor)) for _, tensor in leaves(given)]

    def wrote(self) -> bool:
        """Whether something that it was given was written into since."""
        return any(version_of(tensor) != version for tensor, version in self._given)


class Side:
    """The calls of a model's modules, told to a listener. `modules` are those with a partner, by their name in a."""

    def __init__(self, modules: Mapping[str, nn.Module], listen: Listener, *, changes: bool = False) -> None:
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}
        self.tell = listen
        self._changes = changes
        self._frames: list[_Frame] = []
        self._calls: dict[str, int] = {}
        self.went: list[str] = []  # the calls that an exception ended, the innermost first

    def run(self, call: Callable[[], Any], inner: Sequence[str] = (), grad: bool = False) -> Any:
        """Make a call and tell of it; `inner`: the modules inside whose forwards to look."""
        session = Session(self._modules["."], verb="compare", changes=self._changes, eager=True)
        session.taps = [tap_for(site, session.scope, lambda: _Tell(self)) for site in self._sites(inner, grad)]
        try:
            with session:
                return call()
        except Exception:
            self.went = [frame.key.name for frame in reversed(self._frames)]
            raise

    def _sites(self, inner: Sequence[str], grad: bool) -> Iterable[Site]:
        for name, module in self._modules.items():
            address = Address(escape(name))
            yield Site(address._replace(role="in"), module, "module", True)
            yield Site(address, module, "module", True)
            if grad:
                yield Site(address.with_grad(True), module, "module", True)
                yield Site(address._replace(role="in", grad=True), module, "module", True)
        for name in (name for name in inner if name in self._modules):
            yield from (site.unshared() for site in resolve(self._modules[name], "./**"))

    def came(self, site: Site, value: Any, call: int) -> Any:
        """A value came. Returns what takes its place, or None."""
        name = self._names[id(site.owner())]
        if site.kind == "inner":
            return self._inside(site, name, value, call)
        return self._enters(name, value) if site.address.role == "in" else self._leaves(name, value, call)

    def _enters(self, name: str, value: Any) -> Any:
        number = self._calls[name] = self._calls.get(name, -1) + 1
        new = self.tell(Event(Key(name, "in", number), value, self._around()))
        self._frames.append(_Frame(Key(name, "out", number), value if new is None else new))
        return new

    def _leaves(self, name: str, value: Any, call: int) -> Any:
        frame = None
        while self._frames and (frame is None or frame.key.name != name):  # others ended in an exception
            frame = self._frames.pop()
        key, wrote = (Key(name, "out", call), False) if frame is None else (frame.key, frame.wrote())
        return self.tell(Event(key, value, self._around(), wrote))

    def _inside(self, site: Site, name: str, value: Any, call: int) -> Any:
        base, number = split_number(site.address.inner)
        frames = [frame.key.call for frame in self._frames if frame.key.name == name]
        key = Key(name, f"{base}#{number or 0}", frames[-1] if frames else call)
        return self.tell(Event(key, value, self._around(), spot=site.spot))

    def gradient(self, site: Site, grad: Tensor, call: int, path: Path) -> Any:
        """A gradient came."""
        name = self._names[id(site.owner())]
        leaf = "".join(f"[{key}]" for key in path)
        if site.address.role == "in":
            return self.tell(Event(Key(name, f"grad:in{leaf}", call), grad, owner=name))
        return self.tell(Event(Key(name, f"grad{leaf}", call), grad, owner=self._parent(name)))

    def _parent(self, name: str) -> str:
        """The nearest module around another, by name: its code used what that one gave."""
        while name != "." and (name := name.rpartition(".")[0] or ".") not in self._modules:
            pass
        return name

    def _around(self) -> tuple[Key, ...]:
        return tuple([frame.key for frame in self._frames])


class _Tell(Action):
    """Tell a side."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.changes = side._changes

    def fired(self, tap: Tap) -> int:
        return tap.calls

    def on_value(self, tap: Tap, value: Any, call: Call) -> Any:
        return self._side.came(tap.site, value, call.number)

    def on_gradient(self, tap: Tap, grad: Tensor | None, call: int, path: Path) -> Tensor | None:
        return None if grad is None else self._side.gradient(tap.site, grad, call, path)
