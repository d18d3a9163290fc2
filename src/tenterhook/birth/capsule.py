"""A bad step in a file, to be run again somewhere else: safetensors, with JSON in the header. No code, no pickle.

    save(file, calls, models, …)      models, what they were called with, and the random numbers
    Capsule.read(file).replay(models)   the same models, built anew, run again under the localiser

The loss behind the models is code, and not in it: gradients are those of the sum of what a model gives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenterhook.addresses.modules import tensors_of, unwrap, walk
from tenterhook.birth.birth import Birth
from tenterhook.birth.replay import RootCall, forward_again
from tenterhook.birth.state import RandomState, as_it_was
from tenterhook.birth.trace import CannotRunAgain
from tenterhook.errors import CaptureError, TenterhookError
from tenterhook.values.tensor_file import TensorFile
from tenterhook.values.tree import rebuild_live
from tenterhook.values.written import Reading, Writing, text

_FILE = TensorFile("tenterhook.capsule", "a step", CaptureError, "`tenterhook run --capsule`")
_VERSION = 1
_KINDS = ("parameter", "buffer")


def save(
    file: Path, calls: Iterable[RootCall], models: Sequence[tuple[str, nn.Module]], birth: str, versions: dict[str, str]
) -> None:
    """Write what can be written of the calls of a step; `CaptureError` where that is nothing."""
    writing, left_out = Writing(CaptureError), list[str]()
    models_written = [_model_written(writing, name, unwrap(model)) for name, model in models]
    numbers = {id(unwrap(model)): number for number, (_, model) in enumerate(models)}
    written = []
    for k, call in enumerate(calls):
        number = numbers.get(id(unwrap(call.model)))
        try:
            call.check()
            if number is None:
                raise CannotRunAgain("it is of a part of a model")
            written.append({"model": number, **_call_written(writing, call, f"call {k}")})
        except (CannotRunAgain, TenterhookError) as error:
            left_out.append(f"call {k}: {error}")
    if not written:
        raise CaptureError("; ".join(left_out) or "no model was called in it")
    left_out += writing.notes()
    content = {"version": _VERSION, "versions": versions, "birth": birth, "models": models_written, "calls": written}
    _FILE.write(file, writing.tensors, {**content, "with_gradient": writing.with_gradient, "left_out": left_out})


def _model_written(writing: Writing, name: str, model: nn.Module) -> dict[str, Any]:
    tensors = {kind: [] for kind in _KINDS}  # type: dict[str, list[Any]]
    for kind in _KINDS:
        for path, tensor in _tensors(model, kind):
            writing.begin(lambda _, path=path: f"{name}/{path}")  # type: ignore[misc]
            tensors[kind].append([path, writing.of(tensor)])
    training = [path for path, module in walk(model) if module.training]
    return {"name": name, "class": type(model).__name__, **tensors, "training": training}


def _tensors(model: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Without those of lazy layers that were never called."""
    return ((path, tensor) for path, (_, tensor) in tensors_of(model, kind) if not is_lazy(tensor))


def _call_written(writing: Writing, call: RootCall, name: str) -> dict[str, Any]:
    def begin(what: str) -> None:
        writing.begin(lambda path: f"{name} {what}" + "".join(f"[{key}]" for key in path))

    begin("args")
    args = writing.of(call.args)
    begin("kwargs")
    kwargs = writing.of(call.kwargs)
    begin("random")
    state = call.random
    random = writing.of([state.cpu, list(state.cuda)])
    autocast = writing.of([list(one) for one in call.autocast])
    return {"args": args, "kwargs": kwargs, "random": random, "autocast": autocast}


class Capsule:
    """What is in such a file."""

    def __init__(self, content: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        if content["version"] != _VERSION:
            raise CaptureError(f"it is of version {content['version']}, this tenterhook reads {_VERSION}")
        self.birth = "\n".join(map(text, str(content["birth"]).split("\n")))
        self.versions = {text(name): text(version) for name, version in content["versions"].items()}
        self.left_out = [text(one) for one in content["left_out"]]
        for name in content["with_gradient"]:
            tensors[name].requires_grad_()
        reading = Reading(tensors)
        self._models = [_Model(one, reading) for one in content["models"]]
        self._calls = [_Call(one, reading, len(self._models)) for one in content["calls"]]

    @classmethod
    def read(cls, file: str | Path) -> "Capsule":
        """From a file."""
        content, tensors = _FILE.read(file)
        try:
            return cls(content, tensors)
        except CaptureError as error:
            raise CaptureError(f"{file} cannot be read as {_FILE.what}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
            raise CaptureError(f"{file} cannot be read as {_FILE.what}: {error!r}") from error

    @property
    def models(self) -> list[str]:
        """Their names."""
        return [one.name for one in self._models]

    def replay(self, made: Any) -> Birth | None:
        """Load the models, `made` as these were, and run each call again; the first birth."""
        modules = self._matched(made)
        for saved, module in zip(self._models, modules, strict=True):
            saved.load(module)
        names = self.models if len(modules) > 1 else [""]
        models = [*zip(names, modules, strict=True)]
        with as_it_was(modules):
            for call in self._calls:
                found = forward_again(call.of(modules), models)
                if found is not None:
                    return found
        return None

    def _matched(self, made: Any) -> list[nn.Module]:
        """The modules that a factory has made, in the order of the models."""
        if isinstance(made, Mapping):
            made = [made.get(name) for name in self.models]
        modules = list(made) if isinstance(made, tuple | list) else [made]
        if len(modules) != len(self._models) or not all(isinstance(one, nn.Module) for one in modules):
            got = ", ".join(type(one).__name__ for one in modules)
            wanted = ", ".join(f"{one.name} (a {one.kind})" for one in self._models)
            several = ": as a tuple, or a dict by these names" if len(self._models) > 1 else ""
            raise CaptureError(f"the factory is to return {wanted}{several}; it returned {got}")
        return [unwrap(one) for one in modules]


class _Model:
    """A model's tensors and modes."""

    def __init__(self, content: Mapping[str, Any], reading: Reading) -> None:
        self.name, self.kind = text(content["name"]), text(content["class"])
        self._training = {text(one) for one in content["training"]}
        self._tensors = {kind: {text(path): reading.of(value) for path, value in content[kind]} for kind in _KINDS}
        if not all(isinstance(one, Tensor) for some in self._tensors.values() for one in some.values()):
            raise ValueError("a parameter in it is no tensor")

    def load(self, module: nn.Module) -> None:
        """Have a module be what this one was."""
        for kind in _KINDS:
            there = dict(_tensors(module, kind))
            saved = self._tensors[kind]
            wrong = [path for path in {**saved, **there} if not _fit(saved.get(path), there.get(path))]
            if wrong:
                raise CaptureError(self._misfit(kind, wrong[0], there.get(wrong[0]), len(wrong)))
            with torch.no_grad():
                for path, tensor in there.items():
                    tensor.copy_(saved[path])
        for path, one in walk(module):
            one.training = path in self._training

    def _misfit(self, kind: str, path: str, there: Tensor | None, many: int) -> str:
        saved = self._tensors[kind].get(path)
        parts = [f"{list(one.shape)}" if one is not None else "none" for one in (saved, there)]
        more = f", and {many - 1} more" if many > 1 else ""
        what = f"the {kind} {path} is {parts[0]} in the capsule and {parts[1]} in the factory's{more}"
        return f"the factory makes another model than {self.name}: {what}; give it the arguments of that run"


def _fit(saved: Tensor | None, there: Tensor | None) -> bool:
    return saved is not None and there is not None and saved.shape == there.shape


class _Call:
    """A call of a model."""

    def __init__(self, content: Mapping[str, Any], reading: Reading, models: int) -> None:
        self._number = content["model"]
        if type(self._number) is not int or not 0 <= self._number < models:
            raise ValueError("a call in it is of no model")
        self._args, self._kwargs = reading.of(content["args"]), reading.of(content["kwargs"])
        if type(self._args) is not tuple or not isinstance(self._kwargs, dict):
            raise TypeError("the arguments of a call in it are none")
        cpu, cuda = reading.of(content["random"])
        self._random = RandomState(None, None, cpu, tuple(cuda))
        autocast = [(text(device), on, dtype) for device, on, dtype in reading.of(content["autocast"])]
        if not all(type(on) is bool and isinstance(dtype, torch.dtype) for _, on, dtype in autocast):
            raise TypeError("what it says about autocast is no such thing")
        self._autocast = tuple(autocast)

    def of(self, modules: Sequence[nn.Module]) -> RootCall:
        """As a call of one of these."""
        model = modules[self._number]
        device = next((one.device for one in model.parameters()), None)
        args, kwargs = _on(self._args, device), _on(self._kwargs, device)
        return RootCall.of(model, args, kwargs, self._random, self._autocast)


def _on(value: Any, device: torch.device | None) -> Any:
    """On the device of the model."""
    return rebuild_live(value, lambda path, tensor: tensor.to(device))
