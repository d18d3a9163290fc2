"""Opacus: a few lines make a training differentially private."""

import warnings

import torch
from digest import digest
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, 64),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    criterion = nn.CrossEntropyLoss()
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            steps += 1
        print("loss", loss.item().hex())
    print("epsilon", privacy_engine.get_epsilon(delta=1e-5))
    print("steps", steps)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
