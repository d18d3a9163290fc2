"""What it costs to compare two models, side by side with running both.

    python benchmarks/compare.py            a table; every row is taken in this one run
    python benchmarks/compare.py --quick    fewer rounds, for a look

The two are GPT-2-small with one weight of the sixth block changed, so that there is something to find; "equal" are two
copies. The last row is how much memory is taken beyond two models, in a process of its own, where the activations of
each have 500 MB.
"""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
from common import Rows, device, interleave
from torch import nn

from tenterhook import compare

_MEMORY = """
import resource, sys, torch
from torch import nn
from tenterhook import compare

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(125))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

torch.set_num_threads(1)
a, b = Wide(), Wide()
b.load_state_dict(a.state_dict())
with torch.no_grad():
    b.layers[60].weight[0, 0] += 0.1
x = torch.randn(15625, 64)  # 4 MB, 125 times
small = torch.randn(4, 64)
compare(a, b, small)
with torch.no_grad():
    a(x), b(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = compare(a, b, x)
assert found.first.address == "layers.60"
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def gpt2_small() -> nn.Module | None:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    config = GPT2Config(bos_token_id=0, eos_token_id=0, attn_implementation="eager", use_cache=False)
    return GPT2LMHeadModel(config).eval().to(device())


def speed(rounds: int) -> Rows:
    a = gpt2_small()
    if a is None:
        return [("compare of GPT-2-small", "÷ both forwards", "transformers is not installed", "–")]
    equal, other = copy.deepcopy(a), copy.deepcopy(a)
    with torch.no_grad():
        other.get_parameter("transformer.h.5.mlp.c_fc.weight")[0, 0] += 0.1
    ids = torch.randint(0, 50000, (1, 256), device=device())
    torch.set_num_threads(torch.get_num_interop_threads())

    def both() -> None:
        with torch.no_grad():
            a(ids), other(ids)

    runs = {
        "equal, modules": (lambda: compare(a, equal, ids), "≤ 3"),
        "modules": (lambda: compare(a, other, ids), "≤ 3"),
        "equal, everything inside": (lambda: compare(a, equal, ids, match="**/**"), "≤ 8"),
        "everything inside": (lambda: compare(a, other, ids, match="**/**"), "≤ 8"),
    }
    assert compare(a, other, ids).first.address == "transformer.h.5.mlp.c_fc"
    rounds = max(rounds // 200, 3)
    t = interleave({"both": both, **{name: run for name, (run, _) in runs.items()}}, rounds)
    where = f"GPT-2-small, 1 × 256 tokens, {torch.get_num_threads()} threads"
    rows = [
        (f"compare, {name}, {where}", "÷ both forwards", f"{t[name] / t['both']:.2f}", limit)
        for name, (_, limit) in runs.items()
    ]
    peers = _torchlens(a, other, ids)  # after the others: torch's functions stay wrapped
    t = interleave({"both": both, **peers}, rounds)
    figure = f"{t['torchlens'] / t['both']:.2f}" if peers else "not installed"
    return [*rows, (f"torchlens, first divergence, {where}", "÷ both forwards", figure, "–")]


def gradients(rounds: int) -> Rows:
    a = gpt2_small()
    if a is None:
        return []
    equal, other = copy.deepcopy(a), copy.deepcopy(a)
    with torch.no_grad():
        other.get_parameter("transformer.h.5.mlp.c_fc.weight")[0, 0] += 0.1
    ids = torch.randint(0, 50000, (1, 256), device=device())

    def loss(output: Any) -> torch.Tensor:
        return output.logits.square().mean()

    def both() -> None:
        for model in (a, other):
            torch.autograd.grad(loss(model(ids)), [*model.parameters()])

    runs = {
        "equal, modules and gradients": lambda: compare(a, equal, ids, grad=True, loss=loss),
        "modules and gradients": lambda: compare(a, other, ids, grad=True, loss=loss),
    }
    t = interleave({"both": both, **runs}, max(rounds // 200, 3))
    where = f"GPT-2-small, 1 × 256 tokens, {torch.get_num_threads()} threads"
    return [
        (f"compare, {name}, {where}", "÷ both forwards and backwards", f"{t[name] / t['both']:.2f}", "–")
        for name in runs
    ]


def _torchlens(a: nn.Module, b: nn.Module, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    try:
        import torchlens
        from torchlens.debug import first_divergence
    except ImportError:
        return {}

    def run() -> object:
        return first_divergence(*(torchlens.trace(model, ids) for model in (a, b)))

    return {"torchlens": run}


def memory(rounds: int) -> Rows:
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    return [("compare, 500 MB of activations", "MB beyond both models", f"{float(done.stdout):.0f}", "< 100")]


if __name__ == "__main__":
    common.main((speed, gradients, memory))
