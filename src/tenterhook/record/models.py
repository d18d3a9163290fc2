"""The models of a training, found by their calls, and whose a module or a parameter is."""

import weakref
from types import FrameType
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.modules import walk
from tenterhook.record.holders import callers, count_if_held, is_kept, is_slice, largest, name_of
from tenterhook.record.model import Model

MOST_MODELS = 32  # a program may make one after the other


class Models:
    """All models that were seen, and whose a module or a parameter is."""

    def __init__(self, selectors: tuple[str, ...] = ()) -> None:
        self.all: list[Model] = []
        self.passed_over = 0
        self._selectors = selectors
        self._modules: dict[int, Any] = {}
        self._none: set[int] = set()  # the ids of what is no model, for it has no parameters, and of its parts
        self._kept: dict[Any, bool] = {}  # by place in the code: whether what it calls is more than made there

    def knows(self, module: nn.Module) -> bool:
        """Whether a module belongs to one of the models, or to none as far as is known."""
        known = self._modules.get(id(module))
        return known is not None and known() is module

    def grows(self, module: nn.Module) -> bool:
        """A module gets a new part or parameter: whether it is of a model. What was none may be one then."""
        if id(module) in self._none:
            for key in self._none:  # which of them it is a part of is not known: all are looked at again
                self._modules.pop(key, None)
            self._none.clear()
        return self.knows(module)

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

        None where there are too many already, for what has no parameters, such as a loss or a metric, and for a slice
        that was only made for this call: its layers are called next. One that is kept belongs to the model it is of.
        """
        whole = largest(frame, lambda one: count_if_held(one, [module]))
        found_or_itself = module if whole is None else whole  # what is compiled has a length, or raises
        if _is_no_model(found_or_itself):
            self._none |= self._remember(found_or_itself)  # not to look for it again
            return None
        if whole is None and self._is_passing(module, frame):
            for part in module.modules():
                if not _has_parameters(part):
                    self._modules[id(part)] = weakref.ref(part)
            return None
        if whole is None or whole is module:
            whole = self._whole_of(module)
        found = self._model_of(whole) or self._add_one_more(whole, frame)
        self._remember(whole)
        self._modules[id(module)] = weakref.ref(module)
        return found

    def _whole_of(self, module: nn.Module) -> nn.Module:
        """The model that a slice is of; of anything else, itself."""
        wholes = (one for model in self.all if (one := model.module()) is not None and is_slice(module, one))
        return next(wholes, module)

    def _model_of(self, module: nn.Module) -> Model | None:
        """What is known of a model, brought up to date."""
        found = next((model for model in self.all if model.module() is module), None)
        if found is not None:
            found.look()
        return found

    def _add_one_more(self, module: nn.Module, frame: FrameType | None) -> Model | None:
        if len(self.all) < MOST_MODELS:
            return self.add(name_of(module, frame), module)
        self.passed_over += 1
        return None

    def _is_passing(self, module: nn.Module, frame: FrameType | None) -> bool:
        """Whether a module that no variable holds is only there for this call, and nothing is lost without it."""
        layers = [one for one in module.modules() if _has_parameters(one)]
        new = [one for one in layers if not self.knows(one)]
        if type(module) is not nn.Sequential:  # it may do other things with them than to call them
            return False
        if new and largest(frame, lambda one: count_if_held(one, new)) is None:
            return False
        place = next(((one.f_code, one.f_lasti, type(module)) for one in callers(frame)), None)
        if place not in self._kept:
            self._kept[place] = is_kept(module)
        return not self._kept[place]

    def find_holder(self, parameter: Tensor, frame: FrameType | None) -> None:
        """Watch the model in a variable around that has this parameter, where none is known by its calls."""
        whole = largest(frame, lambda one: len(list(one.modules())) * any(p is parameter for p in one.parameters()))
        if whole is not None and len(self.all) < MOST_MODELS and all(model.module() is not whole for model in self.all):
            self.add(name_of(whole, frame), whole).compiled = True

    def parameter(self, tensor: Tensor) -> tuple[str, str, str] | None:
        """The model's name, the address and the holder's class of a parameter."""
        for model in self.all:
            known = model.parameters.get(id(tensor))
            if known is not None and known.tensor() is tensor:
                return model.name, known.site, known.kind
        return None

    def _remember(self, module: nn.Module) -> set[int]:
        parts = {id(one): weakref.ref(one) for one in (module, *module.modules(), *(m for _, m in walk(module)))}
        self._modules.update(parts)
        return set(parts)


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _is_no_model(module: nn.Module) -> bool:
    """Whether a module has nothing to train: a loss, an activation, an augmentation, a metric with its own network."""
    metric = any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__)
    return metric or not any(_has_parameters(one) for _, one in walk(module))
