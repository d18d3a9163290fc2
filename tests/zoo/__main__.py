"""`python -m tests.zoo NAME` trains one; `--check [NAME …]` runs each bare and watched, and compares."""

import argparse
import hashlib
import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo.registry import Training, trainings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true", help="run each bare and watched (all, without names)")
    parser.add_argument("--list", action="store_true", help="the names, styles and what is expected")
    parser.add_argument("--workers", type=int, default=1, help="how many at the same time (1)")
    parser.add_argument("--device", default="cpu", help="where the trainings run (cpu)")
    parser.add_argument("--options", default="", help="for `tenterhook run`, e.g. --options='--every 10'")
    parser.add_argument("--table", type=Path, help="write a table as in docs/zoo.md to this file")
    parser.add_argument("--texts", action="store_true", help="print each finding in full")
    options = parser.parse_args()
    known = trainings()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no training named {', '.join(unknown)}; --list has all")
    if options.list:
        for one in known.values():
            print(f"{one.name:40}{one.style:24}{_expected(one)}")
        return 0
    if options.check:
        return _check([known[name] for name in options.names or known], options)
    if len(options.names) != 1:
        parser.error("name one training, or say --check or --list")
    _train(known[options.names[0]], options.device)
    return 0


def _train(training: Training, device: str) -> None:
    if device != "cpu":
        torch.set_default_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    print("weights", _digest(training.train()))


def _digest(trained: Any) -> str:
    digest = hashlib.sha256()
    for tensor in _tensors(trained):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(trained: Any) -> Iterator[Tensor]:
    if isinstance(trained, nn.Module):
        trained = trained.state_dict()
    if isinstance(trained, Tensor):
        yield trained
        return
    for one in trained.values() if isinstance(trained, dict) else trained:
        yield from _tensors(one)


def _check(chosen: list[Training], options: argparse.Namespace) -> int:
    from tests.zoo.check import GOOD, check  # needs tenterhook, which the trainings do not

    words = shlex.split(options.options)
    results = []
    with ThreadPoolExecutor(options.workers) as pool:
        for result in pool.map(lambda one: check(one, words, options.device), chosen):
            results.append(result)
            one = result.training
            print(f"{result.verdict:8}{one.name:40}{one.style:24}{_expected(one)} → {result.said or '–'}")
            if result.detail:
                print(f"        {result.detail}")
            for text in result.texts if options.texts or result.verdict == "accused" else ():
                print(f"        {text}")
            sys.stdout.flush()
    if options.table:
        options.table.write_text("\n".join(_table(results)) + "\n")
    print("\n".join(_summary(results)))
    return int(any(result.verdict not in (*GOOD, "missed") for result in results) or not _enough(results))


def _expected(one: Training) -> str:
    return " or ".join(sorted(one.rules)) or "healthy"


def _enough(results: list[Any]) -> bool:
    """Whether nine in ten of the faults were named."""
    faults = [result.verdict for result in results if result.training.rules and result.verdict != "skipped"]
    return faults.count("missed") <= 0.1 * len(faults)


def _summary(results: list[Any]) -> Iterator[str]:
    for kind, some in _halves(results):
        if not some:
            continue
        counts = Counter(result.verdict for result in some)
        yield f"{len(some)} {kind}: " + ", ".join(f"{many} {verdict}" for verdict, many in counts.most_common())


def _halves(results: Iterable[Any]) -> list[tuple[str, list[Any]]]:
    faults = [result for result in results if result.training.rules]
    return [("faults", faults), ("healthy", [result for result in results if not result.training.rules])]


HEAD = """# The zoo

Small real trainings, each run bare and under `tenterhook run`: same weights to the last bit, same output, same exit
code. `make zoo` runs them and writes this page; their code is in `tests/zoo/trainings`. A rule in brackets is a note.
A fault is *named* by any of the rules that are expected of it, *noted* where that is a note only, or *missed*; a
healthy training is *clean*, or *accused* where there is more than a note."""


def _table(results: list[Any]) -> Iterator[str]:
    yield HEAD
    for kind, some in _halves(results):
        what = "what is wrong" if kind == "faults" else "what it does"
        yield f"\n## {kind.capitalize()}\n"
        yield from _summary(some)
        yield f"\n| training | style | {what} | found | |\n|---|---|---|---|---|"
        for result in some:
            one = result.training
            yield f"| {one.name} | {one.style} | {one.about} | {result.said or '–'} | {result.verdict} |"


sys.exit(main())
