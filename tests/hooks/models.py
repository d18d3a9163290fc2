"""Models that several tests of hooks use."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp(inplace=True):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))


x = torch.randn(3, 4)

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Segments(nn.Module):
    """Three segments; `shared` runs in all of them, twice in each."""

    def __init__(self, reentrant=None, p=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.shared = nn.Linear(4, 4)
        self.drop = nn.Dropout(p)
        self.reentrant = reentrant

    def segment(self, layer, x):
        h = self.shared(layer(x)).tanh()
        return self.drop(self.shared(h)).sin()

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = self.segment(layer, x)
            else:
                x = checkpoint(self.segment, layer, x, use_reentrant=self.reentrant)
        return x


ADDRESSES = ("layers.*", "shared", "drop", "shared:in", "layers.1:in")
