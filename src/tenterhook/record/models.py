"""The models of a training, found by their calls: their names, their modules, and what is known of their parameters."""

import gc
import inspect
import itertools
import linecache
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from tenterhook.addresses.modules import shape_of, tensors_of, unwrap, walk
from tenterhook.addresses.sites import resolve
from tenterhook.errors import AddressError
from tenterhook.platform.frames import CALLS, all_variables, frames_from

_OURS = __name__.partition(".")[0]
_MOST_FRAMES = 40
MOST_MODELS = 32  # a program may make one after the other
_lock = threading.Lock()
_sources: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # of classes


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
        self.look()

    def look(self) -> None:
        """See which modules and parameters there are (a lazy module has more after its first call)."""
        module = self.module()
        if module is None:
            return
        wanted = self._wanted(module)
        seen: set[int] = set()
        self.modules = []
        self.fused = {}
        for name, one in walk(module):
            if id(one) not in seen:
                seen.add(id(one))
                for part in one.modules() if _may_be_fused(one) else ():
                    for table in (part._forward_hooks, part._forward_pre_hooks):
                        self.fused.setdefault(id(table), []).append(id(one))
                if wanted is None or name in wanted:
                    self.modules.append((name, weakref.ref(one)))
        kept: dict[int, Held] = {}
        for name, (holder, tensor) in tensors_of(module, "parameter"):
            if id(tensor) not in kept and (wanted is None or name in wanted or name.rpartition(".")[0] in wanted):
                kept[id(tensor)] = Held(name, type(holder).__name__, weakref.ref(holder))
        self.parameters = kept

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
        """Address and tensor of those that are still there."""
        for held in self.parameters.values():
            tensor = held.tensor()
            if tensor is not None:
                yield held.site, tensor

    def describe(self) -> dict[str, Any]:
        """As the run has it on disk: the tree of modules, with their classes and where those are written."""
        module = self.module()
        if module is None:  # it is gone; what was said last time holds
            return self._described
        tree = []
        for name, reference in self.modules:
            one = reference()
            if one is not None:
                shapes = {k: list(shape_of(p)) for k, p in one._parameters.items() if p is not None}
                tree.append({"site": name, "class": type(one).__name__, "source": _source(type(one)), "shapes": shapes})
        known = {id(p): p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)}
        total = sum(p.numel() for p in known.values())
        trained = sum(p.numel() for p in known.values() if p.requires_grad)
        facts = {"name": self.name, "class": self.kind, "parameters": total, "trainable": trained}
        self._described = {**facts, "compiled": self.compiled, "modules": tree}
        return self._described


class Models:
    """All models that were seen, and whose a module or a parameter is."""

    def __init__(self, selectors: tuple[str, ...] = ()) -> None:
        self.all: list[Model] = []
        self.passed_over = 0
        self._selectors = selectors
        self._modules: dict[int, Any] = {}
        self._kept: dict[Any, bool] = {}  # by place in the code: whether what it calls is more than made there

    def knows(self, module: nn.Module) -> bool:
        """Whether a module belongs to one of the models."""
        known = self._modules.get(id(module))
        return known is not None and known() is module

    def add(self, name: str, module: nn.Module) -> Model:
        """Watch one more model."""
        taken = {model.name for model in self.all}
        unique = next(n for k in range(1, 1_000_000) if (n := name if k == 1 else f"{name}-{k}") not in taken)
        model = Model(unique, module, self._selectors)
        self.all.append(model)
        self._remember(module)
        return model

    def look(self) -> None:
        """See which modules and parameters the models have by now."""
        for model in self.all:
            module = model.module()
            if module is not None:
                model.look()
                self._remember(module)

    def discover(self, module: nn.Module, frame: FrameType | None) -> Model | None:
        """The model that a module that was called belongs to: itself, or one in a variable of the code that calls.

        None where there are too many already, and for what was only made for this call, such as a slice or a ReLU: its
        layers, if it has any, are called next. A slice that is kept belongs to the model that it is of.
        """
        name, whole = _largest(frame, lambda one: _held(one, [module]))
        if whole is None and self._is_passing(module, frame):
            for part in module.modules():
                if not _has_parameters(part):
                    self._modules[id(part)] = weakref.ref(part)  # not to look for it again
            return None
        if whole is None or whole is module:
            wholes = (one for model in self.all if (one := model.module()) is not None and _is_slice(module, one))
            name, whole = name or type(unwrap(module)).__name__, next(wholes, module)
        found = next((model for model in self.all if model.module() is whole), None)
        if found is not None:
            found.look()
        elif len(self.all) < MOST_MODELS:
            found = self.add(name, whole)
        else:
            self.passed_over += 1
        self._remember(whole)
        self._modules[id(module)] = weakref.ref(module)
        return found

    def _is_passing(self, module: nn.Module, frame: FrameType | None) -> bool:
        """Whether a module that no variable holds is only there for this call, and nothing is lost without it."""
        layers = [one for one in module.modules() if _has_parameters(one)]
        new = [one for one in layers if not self.knows(one)]
        if layers and type(module) is not nn.Sequential:  # it may do other things with them than to call them
            return False
        if new and _largest(frame, lambda one: _held(one, new))[1] is None:
            return False
        place = next(((one.f_code, one.f_lasti, type(module)) for one in _callers(frame)), None)
        if place not in self._kept:
            self._kept[place] = _is_kept(module)
        return not self._kept[place]

    def find_holder(self, parameter: Tensor, frame: FrameType | None) -> None:
        """Watch the model in a variable around that has this parameter, where none is known by its calls."""
        name, whole = _largest(
            frame, lambda one: len(list(one.modules())) * any(p is parameter for p in one.parameters())
        )
        if whole is not None and len(self.all) < MOST_MODELS and all(model.module() is not whole for model in self.all):
            self.add(name, whole).compiled = True

    def parameter(self, tensor: Tensor) -> tuple[str, str, str] | None:
        """The model's name, the address and the holder's class of a parameter."""
        for model in self.all:
            known = model.parameters.get(id(tensor))
            if known is not None and known.tensor() is tensor:
                return model.name, known.site, known.kind
        return None

    def _remember(self, module: nn.Module) -> None:
        for one in (module, *module.modules(), *(m for _, m in walk(module))):
            self._modules[id(one)] = weakref.ref(one)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, without torch's and ours."""
    for one in itertools.islice(frames_from(frame), _MOST_FRAMES + 1):
        if one.f_globals.get("__name__", "").partition(".")[0] not in ("torch", _OURS):
            yield one


def _largest(frame: FrameType | None, size_of: Callable[[nn.Module], int]) -> tuple[str, nn.Module | None]:
    """The largest module among the variables of the frames that call, and its name there."""
    best: tuple[str, nn.Module | None] = ("", None)
    size = 0
    for one in _callers(frame):
        for name, value in all_variables(one).items():
            if issubclass(type(value), nn.Module) and (held := size_of(value)) > size:
                size, best = held, (_readable(name, value), value)
    return best


def _held(whole: nn.Module, parts: list[nn.Module]) -> int:
    """How many modules it holds, if these are among them."""
    ids = {id(m) for m in whole.modules()} | {id(m) for _, m in walk(whole)}
    return len(ids) if all(id(part) in ids or id(unwrap(part)) in ids for part in parts) else 0


def _may_be_fused(module: nn.Module) -> bool:
    """Whether torch may run a module as one operation: not if it has a forward of its own that calls no other."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    own = itertools.takewhile(lambda cls: cls is not nn.TransformerEncoderLayer, type(module).__mro__)
    codes = [part.__code__ for cls in own for part in vars(cls).values() if isinstance(part, FunctionType)]
    return all(code.co_name != "forward" for code in codes) or any("forward" in code.co_names for code in codes)


def _is_slice(module: nn.Module, whole: nn.Module) -> bool:
    """Whether this is a Sequential of some layers of one in a module, in their order."""
    if type(module) is not nn.Sequential or not len(module):
        return False
    for one in whole.modules():
        layers = iter(one._modules.values())
        if isinstance(one, nn.Sequential) and all(any(part is other for other in layers) for part in module):
            return True
    return False


def _is_kept(module: nn.Module) -> bool:
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


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _readable(name: str, module: nn.Module) -> str:
    return type(unwrap(module)).__name__ if name in ("self", "_", "module", "mod") else name


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
