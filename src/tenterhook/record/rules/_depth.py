"""Layers with weights, from the input to the output of a model, for the rules that compare depths."""

import numpy as np
from numpy.typing import NDArray

from tenterhook.record._step import Rows, Step

_OTHERS = ("Norm", "Embedding", "LSTM", "GRU", "RNN")


def weights(rows: Rows) -> Rows:
    """The rows of weights that multiply: no biases, no norms, no embeddings."""
    mask = [p.site.endswith("weight") and not any(word in p.kind for word in _OTHERS) for p in rows.places]
    return rows.where(np.array(mask, bool))


def by_model(rows: Rows) -> list[Rows]:
    """Apart for each model."""
    names = np.array([place.model for place in rows.places])
    return [rows.where(names == name) for name in dict.fromkeys(names.tolist())]


def in_order(rows: Rows, step: Step) -> Rows:
    """Sorted by when the forward reaches the module that holds them; those that it does not are left out."""
    keys = [step.reached.get((p.model, p.site.rpartition(".")[0]), -1) for p in rows.places]
    order = sorted((key, i) for i, key in enumerate(keys) if key >= 0)
    return rows.where(np.array([i for _, i in order], int))


def steepest(values: NDArray[np.float64]) -> int:
    """Where a value and the next differ by the largest factor; the index of the first of the two."""
    logs = np.log10(np.maximum(values, 1e-45))
    return int(np.argmax(np.abs(np.diff(logs))))
