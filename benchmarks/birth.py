"""What it costs that every loss and gradient is looked at, beside anomaly mode; and what finding a birth takes.

    python benchmarks/birth.py            a table
    python benchmarks/birth.py --quick    fewer rounds, for a look
    python benchmarks/birth.py --gpu      GPT with 8 × 1024 tokens in bfloat16 on a CUDA device

A healthy step is one in which nothing is sampled, so that all that is left is what belongs to every step.
"""

import functools
import sys
import tempfile
from pathlib import Path

import common
import torch
from common import Rows, device
from torch import nn
from watch import Make, blocks_of, digits, gpt, middle, seconds

from tenterhook.record.watch import Options, Recording


def cases() -> dict[str, Make]:
    if device() == "cuda":
        return {"GPT, 50,304 words, 8 × 1024": functools.partial(gpt, 50304, 768, 12, 12, 8, 1024)}
    return {
        "digits CNN, 64 images": digits,
        "4-layer transformer, 8 × 64": functools.partial(gpt, 256, 128, 4, 4, 8, 64),
    }


def healthy(rounds: int) -> Rows:
    """A step in which all is well."""
    rows: Rows = []
    for name, make in cases().items():
        found = blocks_of(make, Options(every=10**9), 30, 10, max(rounds // 40, 10))
        rows.append((f"{name}: healthy step", "step ÷ bare", f"{middle(w / b for w, b in found):.3f}", "≤ 1.03"))
        rows.append((f"{name}: anomaly mode", "step ÷ bare", f"{anomaly(make, max(rounds // 100, 4)):.2f}", "–"))
        rows.append((f"{name}: localising", "bare steps", f"{localising(make):.1f}", "≤ 20"))
    return rows


def anomaly(make: Make, blocks: int) -> float:
    """The same with torch's anomaly mode."""
    _, step = make()
    seconds(step, 10)
    found = []
    for _ in range(blocks):
        bare = seconds(step, 5)
        with torch.autograd.set_detect_anomaly(True):
            found.append(seconds(step, 5) / bare)
    return middle(found)


def localising(make: Make) -> float:
    """A step that is bad, less a bare one, in bare steps: a parameter's gradient is spoilt by a hook."""
    model, step = make()
    seconds(step, 10)
    bare = seconds(step, 10)
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), Options(every=10**9), None, [])
        recording.recorder.install([("model", model)])
        seconds(step, 30)
        spoil = next(one for one in model.modules() if isinstance(one, nn.Linear))
        handle = spoil.register_forward_hook(lambda module, args, output: output / 0)
        took = seconds(step, 1)
        handle.remove()
        recording.close("finished")
        assert any(finding.rule == "non-finite values" for finding in recording.judge.findings)
    return (took - bare) / bare


if __name__ == "__main__":
    if "--gpu" in sys.argv:
        torch.set_float32_matmul_precision("high")
    common.main([healthy])
