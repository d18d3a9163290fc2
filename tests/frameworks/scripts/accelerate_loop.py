"""Accelerate's quicktour: five lines in a loop of one's own, here with accumulation, a scheduler and clipping."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digest import digest
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=114)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, 32, shuffle=True), scheduler
    )
    steps = 0
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                    steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print("loss", loss.item().hex())
    print("steps", steps)
    print("weights", digest(accelerator.unwrap_model(model)))


if __name__ == "__main__":
    main()
