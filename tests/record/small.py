"""A small training, and what a run has recorded of it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(many, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(many)
    ]


def train(model, data, *, accumulate=1, optimizer=None, each=lambda k: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for k, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        losses.append(loss.item())
        if (k + 1) % accumulate == 0:
            each(k)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def rows(run, **wanted):
    """The recorded rows with these values, as dicts."""
    return [row for row in run.stats().to_pylist() if all(row[key] == value for key, value in wanted.items())]


def agrees(row, tensor):
    values = torch.as_tensor(tensor).detach().double().numpy().ravel()
    assert row["count"] == values.size
    assert row["zeros"] == (values == 0).sum()
    assert row["min"] == pytest.approx(values.min(), rel=1e-6)
    assert row["max"] == pytest.approx(values.max(), rel=1e-6)
    assert row["mean"] == pytest.approx(values.mean(), rel=1e-5, abs=1e-6 * np.abs(values).max())
    assert row["rms"] == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)
    assert row["std"] == pytest.approx(values.std(), rel=1e-4, abs=1e-7)
    assert sum(row["counts"]) == row["sampled"]


def losses_and_skips(run):
    table = run.open().steps().to_pydict()
    return table["loss"], table["skipped"]


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)
