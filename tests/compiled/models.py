"""Models, and what eager code computes in them, for the tests of compiled code. Runs on a GPU where there is one."""

import copy

import torch
from torch import nn
from torch._dynamo.utils import counters

from tenterhook.platform import twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["eager", "aot_eager", "inductor"]
# Before 2.13, PyTorch cannot trace a hook on a tensor that is written into afterwards; such code runs eagerly then.
CAN_WRITE = twins.HOOKS_ARE_TRACED


class Net(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.layer, self.act, self.body = nn.Linear(4, 4), nn.ReLU(inplace=CAN_WRITE), body or nn.Tanh()

    def forward(self, x):
        return self.body(self.act(self.layer(x)) + x)


def net():
    return Net(Net()).to(DEVICE)


def batch(rows=2, seed=0):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def by_hand(model, x, loss=lambda out: out.square().sum()):
    """What a copy of the model computes eagerly at every module, kept by PyTorch's own hooks."""
    twin, want = copy.deepcopy(model), {}

    def keep(name, output):
        want[name] = output.detach().clone()
        if output.requires_grad:
            output.register_hook(lambda grad: want.update({f"grad({name})": grad.clone()}))

    for name, module in twin.named_modules():
        module.register_forward_hook(lambda _, args, output, name=name or ".": keep(name, output))
    loss(twin(x)).backward()
    return want | {f"grad({name})": p.grad for name, p in twin.named_parameters()}


def graphs():
    """How many graphs Dynamo has made so far."""
    return counters["stats"]["unique_graphs"]


def close(a, b):
    return torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def note_of(seen):
    """What a report says of compiled code; where an older PyTorch has it run eagerly, that is as good as staying."""
    notes = " ".join(note for note in seen.report().notes if "ompiled code" in note)
    return f"{notes} (had the taps)" if "PyTorch before 2.13" in notes else notes
