"""Data, and the few models and loops that many scripts share."""

import gzip
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@cache
def _digits() -> np.ndarray:
    package = Path(find_spec("sklearn").origin).parent  # without importing it, which takes a second
    with gzip.open(package / "datasets/data/digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return table[np.random.RandomState(0).permutation(len(table))]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Handwritten digits, 8 × 8, from 0 to 1: those to train on, and those to test with."""
    table = torch.from_numpy(_digits()).to(torch.get_default_device())
    x, y = table[:, :64] / 16, table[:, 64].long()
    return x[:1400], y[:1400], x[1400:], y[1400:]


def loader(x: Tensor, y: Tensor, size: int = 64, shuffle: bool = True) -> DataLoader:
    generator = torch.Generator(x.device) if x.is_cuda else None
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=shuffle, generator=generator)


def mlp(n_in: int = 64, n_out: int = 10, width: int = 128) -> nn.Sequential:
    layers = [nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, n_out)]
    return nn.Sequential(*layers)


class CNN(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 8, 8)
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def fit(model, batches, optimizer, epochs=15, criterion=F.cross_entropy) -> None:
    """The loop of every tutorial."""
    for _ in range(epochs):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    print("last loss", round(loss.item(), 4))


def test(model, x: Tensor, y: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        print("accuracy", round((model(x).argmax(1) == y).float().mean().item(), 3))


def curve(many: int = 512) -> tuple[Tensor, Tensor]:
    """A regression: a noisy wave of four features."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    x = torch.randn(many, 4, generator=generator)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.05 * torch.randn(many, 1, generator=generator)
    return x, y


def forever(batches: DataLoader) -> Iterator:
    while True:
        yield from batches


def learn_digits(model, epochs=12, lr=1e-3, criterion=F.cross_entropy):
    x, y, *held = digits()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=lr), epochs, criterion)
    test(model, *held)
    return model
