"""Layers with weights, from the input to the output of a model, for the rules that compare depths."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tenterhook.record.places import Place
from tenterhook.record.rule import Checked
from tenterhook.record.step import Floats, Rows, Step

_OTHERS = ("Norm", "Embedding", "LSTM", "GRU", "RNN")
Chain = tuple[tuple[str, str], ...]  # model and site of layers, from the first to an output
_KEPT = 64  # layouts; a model with experts has many


def is_weight(place: Place) -> bool:
    """Whether it is of a weight that multiplies: no bias, no norm, no embedding."""
    return place.site.endswith("weight") and not any(word in place.kind for word in _OTHERS)


def depth(place: Place, step: Step) -> int:
    """When the forward comes to the module that holds a parameter, or -1."""
    return step.order.get(at_module(place.model, place.site), -1)


def at_module(model: str, site: str) -> tuple[str, str]:
    """Model and site of the module that holds a parameter."""
    return model, site.rpartition(".")[0] or "."


def place_of(model: str, site: str, step: Step) -> Place:
    """That of a parameter or a module, one without a number where nothing was measured of it."""
    found = (place for place in step.rows.places if (place.model, place.site) == (model, site))
    return next(found, Place(-1, model, site, "parameter", ""))


class OfLayers(Checked):
    """A base for rules that compare layers: what tells their order is recorded with the outputs."""

    def __init__(self) -> None:
        self._layers = Layers()

    @property
    def unchecked(self) -> str | None:
        """Why nothing was checked, or None."""
        if not self.has_looked and self._layers.are_unordered:
            return "the order of the layers is not known: what they give was not seen on the way to a loss"
        return super().unchecked


class Layers:
    """The weights that get gradients, in the order in which they lead to an output of a model, for each output apart.

    Which these are is worked out once for each layout, and again when a loss is made of something new.
    """

    def __init__(self) -> None:
        self.are_unordered = False  # whether there are some, but not what tells of the order
        self._chains: dict[Chain, None] = {}
        self._known: dict[bytes, list[tuple[list[Place], NDArray[np.int64]]]] = {}

    def gradients(self, step: Step) -> list[tuple[list[Place], Floats]]:
        """Places and RMS, for each output."""
        if any(chain not in self._chains for chain in step.chains):
            self._chains.update(dict.fromkeys(step.chains))
            self._known.clear()
        rows = step.of("parameter_grad")
        if not len(rows) or step.skipped:
            return []
        known = self._known.get(rows.layout)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[rows.layout] = _layers(rows, self._chains)
            self.are_unordered |= not known and any(map(is_weight, rows.places))
        return [(places, step.gradient_rms[which]) for places, which in known]


def _layers(rows: Rows, chains: Iterable[Chain]) -> list[tuple[list[Place], NDArray[np.int64]]]:
    at: dict[tuple[str, str], list[int]] = {}
    for i, place in enumerate(rows.places):
        if is_weight(place):
            at.setdefault(at_module(place.model, place.site), []).append(i)
    found = [tuple(i for layer in chain for i in at.get(layer, ())) for chain in by_model(chains)]
    whole = [which for which in dict.fromkeys(found) if not any(set(which) < set(other) for other in found)]
    return [([rows.places[i] for i in which], np.array(which, np.int64)) for which in whole if which]


def by_model(chains: Iterable[Chain]) -> list[Chain]:
    """Cut into pieces that are each of one model, each piece once."""
    found: dict[Chain, None] = {}
    for chain in chains:
        for model in dict.fromkeys(model for model, _ in chain):
            found[tuple(layer for layer in chain if layer[0] == model)] = None
    return list(found)


def steepest(values: Floats) -> int:
    """Where a value and the next grow by the largest factor; the index of the first of the two."""
    return int(np.argmax(np.diff(np.log10(np.maximum(values, 1e-45)))))
