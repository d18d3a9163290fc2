"""One model under watch: its modules and parameters by address, and its description for the run."""

import inspect
import itertools
import linecache
import re
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenterhook.addresses.modules import shape_of, tensors_of, unwrap, walk
from tenterhook.addresses.sites import resolve
from tenterhook.errors import AddressError

_lock = threading.Lock()
_sources: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # of classes
_forwards: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()
_MOST_LINES = 400  # of a forward


class Held(NamedTuple):
    """Where a parameter is. No reference to the tensor itself, not even a weak one: torch cannot swap it then."""

    site: str
    kind: str  # the class of the module that holds it
    holder: Any

    def tensor(self) -> Tensor | None:
        """The parameter, if it is still there."""
        holder, name = self.holder(), self.site.rpartition(".")[2]
        return holder._parameters[name] if holder is not None and name in holder._parameters else None


class Model:
    """One model under watch: the name that a person would know it by, and its modules by address."""

    def __init__(self, name: str, module: nn.Module, selectors: tuple[str, ...]) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.kind = type(unwrap(module)).__name__
        self.modules: list[tuple[str, Any]] = []  # address and weak reference, each module once
        self.parameters: dict[int, Held] = {}  # by id
        self.fused: dict[int, list[int]] = {}  # by the ids of tables of hooks: those of layers that torch may fuse
        self.compiled = False
        self.hooks: dict[str, Any] = {}  # by address, kept for the next sampled step
        self._selectors = selectors
        self._described: dict[str, Any] = {"name": name, "class": self.kind}
        self._texts: dict[str, dict[str, Any]] = {}
        self.look()

    def look(self) -> None:
        """See which modules and parameters there are (a lazy module has more after its first call)."""
        module = self.module()
        if module is None:
            return
        wanted = self._wanted(module)
        modules: dict[int, tuple[str, nn.Module]] = {}
        for name, one in walk(module):
            modules.setdefault(id(one), (name, one))
        self.fused = _tables_of_fused(one for _, one in modules.values())
        self.modules = [(name, weakref.ref(one)) for name, one in modules.values() if wanted is None or name in wanted]
        self.parameters = {}
        for name, (holder, tensor) in tensors_of(module, "parameter"):
            if wanted is None or name in wanted or name.rpartition(".")[0] in wanted:
                self.parameters.setdefault(id(tensor), Held(name, type(holder).__name__, weakref.ref(holder)))

    def _wanted(self, module: nn.Module) -> set[str] | None:
        if not self._selectors:
            return None
        found = set()
        for selector in self._selectors:
            try:
                found |= {site.address.name for site in resolve(module, selector)}
            except AddressError:
                continue  # another model has it, or none has: the verdict then says that nothing was recorded
        return found

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Address and tensor of those that are still there; without those of lazy layers that have no values yet."""
        for held in self.parameters.values():
            tensor = held.tensor()
            if tensor is not None and not is_lazy(tensor):
                yield held.site, tensor

    def sources(self) -> dict[str, dict[str, Any]]:
        """The forward() of each class that torch does not have, by where the class is written."""
        classes = {type(one) for _, reference in self.modules if (one := reference()) is not None}
        self._texts |= {where: text for cls in classes if (where := _source(cls)) and (text := _forward(cls))}
        return self._texts

    def describe(self) -> dict[str, Any]:
        """As the run has it on disk: the tree of modules, with their classes and where those are written."""
        module = self.module()
        if module is None:  # it is gone; what was said last time holds
            return self._described
        tree = [_described(name, one) for name, reference in self.modules if (one := reference()) is not None]
        known = {id(p): p for p in module.parameters() if not is_lazy(p)}
        total = sum(p.numel() for p in known.values())
        trained = sum(p.numel() for p in known.values() if p.requires_grad)
        facts = {"name": self.name, "class": self.kind, "parameters": total, "trainable": trained}
        self._described = {**facts, "compiled": self.compiled, "modules": tree}
        return self._described


def _described(name: str, module: nn.Module) -> dict[str, Any]:
    """One module, as the run has it on disk."""
    shapes = {k: list(shape_of(p)) for k, p in module._parameters.items() if p is not None}
    return {"site": name, "class": type(module).__name__, "source": _source(type(module)), "shapes": shapes}


def _forward(cls: type) -> dict[str, Any]:
    """The text of its forward and the line that it begins with; nothing where there is none, or it is torch's."""
    try:
        if cls not in _forwards:
            forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
            is_torchs = (forward.__module__ or "").startswith("torch.")
            lines, first = ([], 0) if is_torchs else inspect.getsourcelines(forward)
            _forwards[cls] = {"line": first, "text": "".join(lines[:_MOST_LINES])} if lines else {}
        return _forwards[cls]
    except (OSError, SystemError, SyntaxError, TypeError, AttributeError, ValueError):
        return {}


def _tables_of_fused(modules: Iterable[nn.Module]) -> dict[int, list[int]]:
    """By the ids of tables of hooks: the ids of the layers around them that torch may fuse."""
    found: dict[int, list[int]] = {}
    for layer in filter(_may_be_fused, modules):
        for part in layer.modules():
            for table in (part._forward_hooks, part._forward_pre_hooks):
                found.setdefault(id(table), []).append(id(layer))
    return found


def _may_be_fused(module: nn.Module) -> bool:
    """Whether torch may run a module as one operation: not if it has a forward of its own that calls no other."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    own = itertools.takewhile(lambda cls: cls is not nn.TransformerEncoderLayer, type(module).__mro__)
    codes = [part.__code__ for cls in own for part in vars(cls).values() if isinstance(part, FunctionType)]
    return all(code.co_name != "forward" for code in codes) or any("forward" in code.co_names for code in codes)


def _source(cls: type) -> str:
    """The file and line of a class. `inspect` parses the whole file for that, which takes long beside a training."""
    try:
        if cls not in _sources:
            file = inspect.getsourcefile(cls) or ""
            begins = re.compile(rf"\s*class\s+{re.escape(cls.__name__)}\b").match
            lines = [number for number, line in enumerate(linecache.getlines(file), 1) if begins(line)]
            with _lock:  # Python's parser fails where two threads use it
                _sources[cls] = f"{file}:{lines[0] if len(lines) == 1 else inspect.getsourcelines(cls)[1]}"
    except (OSError, SystemError):
        _sources[cls] = ""
    except TypeError:  # it has no source, or is not hashable
        return ""
    return _sources[cls]
