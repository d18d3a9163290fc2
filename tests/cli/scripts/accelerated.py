"""accelerate, with gradient accumulation and workers that load the data."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", "-q", type=int, default=24)
    return parser.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    classifier = Classifier(32)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
    loader = DataLoader(data, 32, shuffle=True, num_workers=2)
    classifier, optimizer, loader = accelerator.prepare(classifier, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        if step == args.steps:
            break
        with accelerator.accumulate(classifier):
            loss = F.cross_entropy(classifier(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(classifier.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % args.every == 0:
            accelerator.print("loss", loss.item().hex())


if __name__ == "__main__":
    main()
