"""After a step was run again, all is as it was: buffers with any memory, and what a forward keeps in attributes."""

import random

import numpy as np
import torch
from torch import nn

from tenterhook.birth.state import as_it_was


class Keeps(nn.Module):
    """Writes into every kind of buffer, and puts new ones and other things into attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("moved", torch.zeros(3))
        self.register_buffer("row", torch.zeros(1).expand(5))
        self.register_buffer("column", torch.zeros(4, 2)[:, 1])
        self.register_buffer("graph", torch.eye(2).to_sparse())
        self.register_buffer("nothing", None)
        with torch.inference_mode():
            self.register_buffer("inferred", torch.zeros(3))
        self.unused = nn.LazyBatchNorm1d()
        self.calls, self.hidden = 0, torch.zeros(2)

    def forward(self):
        self.mean.add_(1)
        self.moved = self.moved + 1
        self.row.data[0] += 1
        self.column.add_(1)
        with torch.inference_mode():
            self.inferred.add_(1)
        self.calls += 1
        self.hidden = self.hidden + 1
        self.made_here = True


def values(model):
    return {name: one.to_dense().tolist() for name, one in model.named_buffers() if not nn.parameter.is_lazy(one)}


def test_buffers_and_attributes():
    model = nn.Sequential(Keeps(), Keeps())
    for part in model:
        part()
    buffers, hidden, before = dict(model.named_buffers()), model[1].hidden, values(model)
    versions = {name: buffers[name]._version for name in ("0.moved", "0.graph")}
    with as_it_was([model, model[1]]):
        for part in model:
            part()
            part()
        assert values(model) != before and model[0].calls == 3
    assert values(model) == before and model[1].hidden is hidden and hidden.tolist() == [1, 1]
    assert all(one is buffers[name] for name, one in model.named_buffers())
    assert [part.calls for part in model] == [1, 1]
    assert versions == {name: buffers[name]._version for name in versions}


def test_what_is_new_is_gone():
    model = Keeps()
    with as_it_was([model]):
        model()
        model.register_buffer("another", torch.ones(1))
    assert not hasattr(model, "made_here") and not hasattr(model, "another")
    assert "another" not in dict(model.named_buffers())


def test_generators_and_what_raises():
    model, before = Keeps(), values(Keeps())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    try:
        with as_it_was([model]):
            model()
            random.random(), np.random.rand(), torch.rand(1)
            raise KeyError
    except KeyError:
        pass
    assert values(model) == before
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
