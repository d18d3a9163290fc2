"""A short training; the words after it ask for trouble on the way. Prints each loss."""

import multiprocessing
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
STEPS = int(os.environ.get("STEPS", "30"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def spawned(index, model):
    print("spawned", index, sum(p.numel() for p in model.parameters()), model(torch.zeros(1, 8)).shape[0], flush=True)


def trouble(step, model):
    if step == 7 and "fork" in sys.argv:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            model(torch.zeros(4, 8)).sum().backward()
            print("child")
            sys.exit(4)
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if step == 8 and "fork" in sys.argv:
        process = multiprocessing.get_context("fork").Process(target=spawned, args=(0, model))
        process.start()
        process.join()
    if step == 9 and "spawn" in sys.argv:
        torch.multiprocessing.spawn(spawned, (model,), nprocs=1)
    if step == 9 and "raise" in sys.argv:
        raise RuntimeError("out of luck")
    if step == 9 and "break" in sys.argv:
        from tenterhook.record.sources.outputs import OutputHook

        OutputHook._see = None
    if step == 9 and "break-writing" in sys.argv:
        from tenterhook.store import RankWriter

        RankWriter.write = None


def main():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32 * STEPS, 8)
    workers = 2 if "workers" in sys.argv else 0
    for step, (batch,) in enumerate(DataLoader(TensorDataset(x), 32, num_workers=workers)):
        loss = F.mse_loss(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item().hex())
        trouble(step, model)


if __name__ == "__main__":
    main()
