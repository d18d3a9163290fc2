"""Where two models, two runs or two machines first part; and the conditions of `compare(model, x, under=...)`."""

from tenterhook.comparing.conditions import (
    Condition,
    attention,
    autocast,
    batch_of,
    deterministic,
    in_dtype,
    matmul_precision,
    on_device,
    seed,
    threads,
    training,
)

__all__ = [
    "Condition",
    "attention",
    "autocast",
    "batch_of",
    "deterministic",
    "in_dtype",
    "matmul_precision",
    "on_device",
    "seed",
    "threads",
    "training",
]
