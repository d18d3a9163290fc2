"""What watching a training costs: time, side by side with the bare training in this one run, and disk.

On a CPU the time is that of the process, so that others on the machine do not count.

    python benchmarks/watch.py            a table
    python benchmarks/watch.py --quick    fewer rounds, for a look
    python benchmarks/watch.py --gpu      GPT-2-small with 8 × 1024 tokens in bfloat16 on a CUDA device, and the kernel

"default" is every 10th step within a budget of 3 %, after the first 20, of which each is sampled; "with the start"
counts those too.
"""

import contextlib
import functools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import common
import torch
import torch.nn.functional as F
from common import Rows, device, wait
from torch import nn

from tenterhook.record.places import KINDS
from tenterhook.record.recorder import Recorder
from tenterhook.record.sources import wrapped
from tenterhook.record.watch import Options, Recording
from tenterhook.store import open_run

Step = Callable[[], object]
Make = Callable[[], tuple[nn.Module, Step]]
SOME = ("output", "output_grad", "parameter")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(self.act(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, words: int, width: int, depth: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def digits() -> tuple[nn.Module, Step]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        rows = torch.randint(0, 1500, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()

    return model, step


def gpt(words: int, width: int, depth: int, heads: int, rows: int, tokens: int) -> tuple[nn.Module, Step]:
    model = GPT(words, width, depth, heads, tokens).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device() == "cuda")
    ids = torch.randint(0, words, (rows, tokens + 1), device=device())

    def step() -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda"):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def gpt2() -> tuple[nn.Module, Step]:
    """transformers' own, as people train it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0)).to(device()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 50257, (8, 1024), device=device())

    def step() -> None:
        with torch.autocast(device(), torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def seconds(step: Step, many: int) -> float:
    clock = time.perf_counter if device() == "cuda" else time.process_time
    wait()
    start = clock()
    for _ in range(many):
        step()
    wait()
    return (clock() - start) / many


@contextlib.contextmanager
def asleep(recorder: Recorder) -> Iterator[None]:
    """Nothing of torch is wrapped, and the time does not count for the recorder, which keeps to its budget."""
    start = time.perf_counter()
    recorder._guard.on = False
    recorder._steps.remove()
    wrapped.stop(recorder._listeners)
    assert not wrapped._wrapped
    yield
    wrapped.listen(recorder._listeners)
    recorder._steps.listen()
    recorder._guard.on = True
    recorder._mark += time.perf_counter() - start


def blocks_of(make: Make, options: Options, warm: int, block: int, blocks: int) -> list[tuple[float, float]]:
    """Seconds of a watched step and of a bare one: two trainings of the same kind in turn, a block of steps each, for
    the machine's clock varies; the bare ones are those before and after. Some are not timed,
    for Python has to get used to functions that were exchanged.
    """
    (model, step), (_, bare) = make(), make()
    seconds(bare, block)
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), options, None, [])
        recording.recorder.install([("model", model)])
        seconds(step, warm)
        found, before = [], float("nan")
        for _ in range(blocks + 1):
            seconds(step, block)
            watched = seconds(step, block)
            with asleep(recording.recorder):
                seconds(bare, 4)
                after = seconds(bare, block)
            found.append((watched, (before + after) / 2))
            before = after
        recording.close("finished")
    assert recording.recorder.failed is None
    return found[1:]


def middle(figures: Iterable[float]) -> float:
    """The mean, less a tenth at either end."""
    found = sorted(figures)
    return statistics.fmean(found[len(found) // 10 : len(found) - len(found) // 10])


def ratio(make: Make, options: Options, warm: int, block: int, blocks: int) -> float:
    """A watched step ÷ a bare one."""
    return middle(watched / bare for watched, bare in blocks_of(make, options, warm, block, blocks))


def with_start(make: Make, options: Options, many: int) -> float:
    """The first steps of a watched training ÷ those of a bare one."""
    (model, step), (_, bare) = make(), make()
    seconds(bare, 5)
    before = seconds(bare, many)
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), options, None, [])
        recording.recorder.install([("model", model)])
        watched = seconds(step, many)
        recording.close("finished")
    return 2 * watched / (before + seconds(bare, many))


def trainings(rounds: int) -> Rows:
    if device() == "cuda":
        return on_gpu(rounds)
    times = 1 if rounds < 1000 else 2
    rows: Rows = []
    cases: dict[str, Make] = {
        "digits CNN, 64 images": digits,
        "4-layer transformer, 8 × 64": functools.partial(gpt, 256, 128, 4, 4, 8, 64),
    }
    for name, make in cases.items():
        default = ratio(make, Options(budget=0.03), 20, 10, 100 * times)
        rows.append((f"{name}: default", "step ÷ bare", f"{default:.3f}", "≤ 1.03"))
        often = ratio(make, Options(every=1), 20, 4, 50 * times)
        rows.append((f"{name}: every step", "step ÷ bare", f"{often:.2f}", "≤ 1.25"))
    start = with_start(digits, Options(budget=0.03), 300)
    rows.append(("digits CNN, 64 images: default, with the start", "300 steps ÷ bare", f"{start:.3f}", "–"))
    return rows


def mlp(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, step


def unsampled(rounds: int) -> Rows:
    """What a step costs in which nothing is measured."""
    if device() == "cuda":
        return []
    rows: Rows = []
    for kind in (torch.optim.SGD, torch.optim.Adam):
        found = blocks_of(functools.partial(mlp, kind), Options(every=10**9), 30, 50, max(rounds // 10, 40))
        added = middle(watched - bare for watched, bare in found) * 1e6
        rows.append((f"unsampled step, small MLP, {kind.__name__}", "µs added", f"{added:.0f}", "≤ 30"))
    return rows


PROGRAM = """
import torch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
"""


def starting(rounds: int) -> Rows:
    """What `tenterhook run` adds to a training of one step, start to end."""
    if device() == "cuda":
        return []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(PROGRAM)
        ours = ["-m", "tenterhook", "run", "--out", folder]
        times = [(cpu_seconds([*ours, str(script)]), cpu_seconds([str(script)])) for _ in range(7)]
    added = statistics.median(watched - bare for watched, bare in times)
    return [("start and end of a watched training", "s of CPU added", f"{added:.2f}", "≤ 0.3")]


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def on_gpu(rounds: int) -> Rows:
    rows: Rows = []
    cases: dict[str, Make] = {"transformers' GPT-2-small": gpt2}
    for words in (50257, 50304):
        cases[f"plain GPT-2-small, {words:,} words"] = functools.partial(gpt, words, 768, 12, 12, 8, 1024)
    for case, make in cases.items():
        _, step = make()
        seconds(step, 10)
        name = f"{case}, 8 × 1024, bfloat16"
        rows.append((f"{name}: bare", "ms", f"{seconds(step, 30) * 1e3:.1f}", "–"))
        del step
        for what, kinds, every, limit in (
            ("every step, outputs + gradients + parameters", SOME, 1, "≤ 1.15"),
            ("every step, everything", KINDS, 1, "–"),
            ("default, outputs + gradients + parameters", SOME, 10, "≤ 1.02"),
            ("default, everything", KINDS, 10, "≤ 1.02"),
        ):
            options = Options(every=every, what=kinds, budget=0.03 if every > 1 else None)
            figure = ratio(make, options, 20, 10, 20)
            rows.append((f"{name}: {what}", "step ÷ bare", f"{figure:.3f}", limit))
    return rows + bandwidth()


def bandwidth() -> Rows:
    """The kernel on 1 GiB, beside a copy: bytes read a second ÷ bytes read and written a second."""
    from tenterhook.stats.cuda import measure_cuda

    rows: Rows = []
    for dtype in (torch.bfloat16, torch.float32):
        data = torch.randn(2**30 // dtype.itemsize, device="cuda").to(dtype)
        other = torch.empty_like(data)
        times: dict[str, list[float]] = {"copy": [], "measure": []}
        runs: dict[str, Callable[[], object]] = {
            "copy": functools.partial(other.copy_, data),
            "measure": functools.partial(measure_cuda, [data]),
        }
        for _ in range(20):
            for name, run in runs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(10):  # one after another, so that the device never waits for Python
                    run()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end))
        share = statistics.median(times["copy"]) / 2 / statistics.median(times["measure"])
        rows.append((f"moments, counts and histogram of 1 GiB of {dtype}", "÷ copy", f"{share:.2f}", "≥ 0.8"))
        del data, other, runs
    return rows


def disk(rounds: int) -> Rows:
    """A training of 100 modules: bytes for each site and sample, and how long the run of 10,000 steps takes to open."""
    if device() == "cuda":
        return []
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(99)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), Options(what=("output",)), None, [])
        recording.recorder.install([("model", model)])
        seconds(step, 2_000 if rounds < 1000 else 10_000)
        recording.close("finished")
        file = Path(folder) / "rank-0" / "stats.arrows"
        start = time.perf_counter()
        run = open_run(folder)
        table = run.stats()
        run.steps()
        took = time.perf_counter() - start
        size = file.stat().st_size / len(table)
    many = f"{len(table):,} rows of 100 sites"
    return [
        (f"disk, {many}, with histograms", "bytes ÷ site and sample", f"{size:.0f}", "≤ 200"),
        ("open_run, and read its statistics and steps", "s", f"{took:.2f}", "≤ 1"),
    ]


if __name__ == "__main__":
    if "--gpu" in sys.argv:
        torch.set_float32_matmul_precision("high")
    common.main([trainings, unsampled, starting, disk])
