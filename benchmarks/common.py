"""What the benchmarks share: the model, the way times are taken, the table."""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tenterhook.tables import Table

Rows = list[tuple[str, str, str, str]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """The residual net of the tables: 12 blocks of two linear layers."""

    def __init__(self, depth: int = 12, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gpt2() -> nn.Module | None:
    """A 6-layer GPT-2; None where transformers is not installed."""
    try:
        from transformers import GPT2Config, GPT2Model
    except ImportError:
        return None
    size = {"n_layer": 6, "n_head": 4, "n_embd": 128, "vocab_size": 1000, "n_positions": 128}
    return GPT2Model(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()


def interleave(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of one run of each, taken in turn, one by one: the 10th percentile of the rounds.

    A run that is not timed goes before each, so that nobody pays for what the one before left in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            run()
            wait()
            start = time.perf_counter()
            run()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(found)[len(found) // 10] for name, found in times.items()}


def device() -> str:
    """Where the models are: the CPU, or with --gpu a CUDA device."""
    return "cuda" if "--gpu" in sys.argv else "cpu"


def wait() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def main(groups: Iterable[Callable[[int], Rows]]) -> None:
    """Run every group and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--gpu", action="store_true", help="on a CUDA device")
    rounds = 400 if parser.parse_args().quick else 2000
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for group in groups for row in group(rounds)]
    place = torch.cuda.get_device_name() if device() == "cuda" else f"{platform.machine()}, 1 thread"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {place}, {rounds} rounds")
    print(Table(("what", "measure", "figure", "limit"), rows, right=("figure", "limit")))
