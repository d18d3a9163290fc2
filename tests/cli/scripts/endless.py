"""Trains until somebody stops it. With `handler`, SIGTERM is handled; with `saves`, Ctrl-C is."""

import atexit
import signal
import sys
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stop = False


def on_term(number, frame):
    global stop
    print("handled", signal.Signals(number).name, flush=True)
    stop = True


def train():
    step = 0
    while not stop:
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        Path("progress").write_text(f"{step} {loss.item().hex()}")
        Path("progress").replace("done")
        step += 1


if "handler" in sys.argv:
    signal.signal(signal.SIGTERM, on_term)
atexit.register(print, "atexit", flush=True)
try:
    train()
except KeyboardInterrupt:
    if "saves" not in sys.argv:
        raise
    print("saved", flush=True)
    sys.exit(7)
print("left the loop", flush=True)
