"""What capture costs, side by side with hand-written hooks and with the peers that are installed.

    python benchmarks/capture.py            a table; every row is a ratio taken in this one run
    python benchmarks/capture.py --quick    fewer rounds, for a look

All contestants of a group are run in turn, round after round, so that whatever else the machine does hits them
alike; a time is the 10th percentile over the rounds, which a busy neighbour moves least. "added" is the time
beyond the bare model's.
"""

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import common
import torch
from common import Rows, Stack, interleave
from torch import nn

from tenterhook import capture
from tenterhook.addresses.sites import resolve


def by_hand(
    model: nn.Module,
    names: list[str],
    keep: Callable[[torch.Tensor], torch.Tensor],
    run: Callable[[], object],
):
    modules = dict(model.named_modules())

    def go() -> dict[str, torch.Tensor]:
        kept: dict[str, torch.Tensor] = {}
        handles = []
        for name in names:

            def hook(module: nn.Module, args: object, output: torch.Tensor, name: str = name) -> None:
                kept[name] = keep(output)

            handles.append(modules[name].register_forward_hook(hook))
        run()
        for handle in handles:
            handle.remove()
        return kept

    return go


def peers(names: list[str], x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The same job by other libraries, for those that are installed, each on a model of its own."""
    found: dict[str, Callable[[], object]] = {}
    with contextlib.suppress(ImportError):
        layer_activation = importlib.import_module("captum.attr").LayerActivation
        for_captum = Stack()
        layers = list(for_captum.blocks)
        found["captum"] = lambda: layer_activation(for_captum, layers).attribute(x)
    with contextlib.suppress(ImportError):
        wrapped = importlib.import_module("nnsight").NNsight(Stack())

        def nnsight_run() -> None:
            with wrapped.trace(x):
                for block in wrapped.blocks:
                    block.output.save()

        found["nnsight"] = nnsight_run
    with contextlib.suppress(ImportError):
        hook_session = importlib.import_module("tdhook.session").HookSession
        target, for_tdhook = importlib.import_module("tdhook.targets").Target, Stack()
        targets = [target(name, "activation", -1, tuple(range(64))) for name in names]

        def tdhook_run() -> object:
            with hook_session(for_tdhook) as session:
                captured = [session.capture(one) for one in targets]
                for_tdhook(x)
            return captured

        found["tdhook"] = tdhook_run
    return found


def twelve_outputs(rounds: int, with_peers: bool = False) -> Rows:
    model, x = Stack(), torch.randn(4, 64)
    names = [f"blocks.{i}" for i in range(12)]

    def ours(**options: bool) -> Callable[[], object]:
        def go() -> object:
            with capture(model, *names, **options) as seen:
                model(x)
            return seen

        return go

    contestants = {
        "bare": lambda: model(x),
        "by hand, cloning": by_hand(model, names, lambda t: t.detach().clone(), lambda: model(x)),
        "by hand, aliasing": by_hand(model, names, lambda t: t.detach(), lambda: model(x)),
        "tenterhook": ours(),
        "tenterhook copy=False": ours(copy=False),
    }
    others = peers(names, x) if with_peers else {}
    if with_peers and not others:
        return []
    with torch.no_grad():
        t = interleave(contestants | others, rounds)
    added = {name: t[name] - t["bare"] for name in t}
    rows: Rows = []
    for name in t:
        if name.startswith("tenterhook"):
            base, goal = ("by hand, aliasing", "1.1") if "copy" in name else ("by hand, cloning", "1.2")
        elif name.startswith("by hand") or name == "bare":
            continue
        else:
            base, goal = "by hand, cloning", "–"
        ratio = f"{added[name] / added[base]:.2f}"
        rows.append((f"12 outputs, enter to exit: {name}", f"added ÷ {base}", ratio, goal))
    if with_peers:
        return [(f"{what}, peers loaded", measure, figure, "–") for what, measure, figure, _ in rows]
    rows.append(("12 outputs: time added by hand", "µs", f"{added['by hand, cloning'] * 1e6:.0f}", "–"))
    return rows


def beside_peers(rounds: int) -> Rows:
    """Last, since they load torch's compiler, which every session must then set to one side."""
    return twelve_outputs(rounds, with_peers=True)


def after_exit(rounds: int) -> Rows:
    model, twin, x = Stack(), Stack(), torch.randn(4, 64)
    with capture(model, grad=True):
        model(x).sum().backward()
    with torch.no_grad():
        t = interleave({"never hooked": lambda: twin(x), "after exit": lambda: model(x)}, rounds)
    return [("forward after exit", "÷ a model never hooked", f"{t['after exit'] / t['never hooked']:.2f}", "1.0")]


def gpt2(rounds: int) -> Rows:
    model = common.gpt2()
    if model is None:
        return [("83 modules of GPT-2, values and gradients", "÷ by hand", "transformers is not installed", "1.3")]
    ids = torch.randint(0, 1000, (2, 64))
    n = sum(not isinstance(m, nn.ModuleList) for m in model.modules())

    def step() -> None:
        model(ids).last_hidden_state.sum().backward()

    def hand() -> object:
        values: dict[str, list[torch.Tensor]] = {}
        grads: dict[str, list[torch.Tensor]] = {}
        handles = []
        for name, module in model.named_modules():

            def hook(module: nn.Module, args: object, output: object, name: str = name) -> None:
                whole = tuple(output.values()) if isinstance(output, dict) else output
                leaves = [t for t in (whole if isinstance(whole, tuple) else (whole,)) if isinstance(t, torch.Tensor)]
                values[name] = [t.detach().clone() for t in leaves]
                for t in leaves:
                    if t.requires_grad:
                        t.register_hook(lambda g: grads.setdefault(name, []).append(g.detach().clone()))

            handles.append(module.register_forward_hook(hook))
        step()
        for handle in handles:
            handle.remove()
        return values, grads

    def ours() -> object:
        with capture(model, grad=True) as seen:
            step()
        return seen

    t = interleave({"bare": step, "hand": hand, "ours": ours}, rounds // 4)
    ratio = (t["ours"] - t["bare"]) / (t["hand"] - t["bare"])
    return [
        (
            f"{n} modules of a 6-layer GPT-2, values and gradients",
            "added ÷ forward + tensor hooks",
            f"{ratio:.2f}",
            "1.3",
        ),
        ("the same", "step ÷ bare step", f"{t['ours'] / t['bare']:.2f}", "–"),
        ("the same, by hand", "step ÷ bare step", f"{t['hand'] / t['bare']:.2f}", "–"),
    ]


def resolving(rounds: int) -> Rows:
    model = nn.Sequential(*(nn.Sequential(*(nn.ReLU() for _ in range(99))) for _ in range(100)))
    t = interleave({"resolve": lambda: resolve(model, "**")}, max(5, rounds // 100))
    n = len(resolve(model, "**"))
    return [(f"'**' on {n:,} modules", "ms", f"{t['resolve'] * 1e3:.0f}", "50")]


def importing(rounds: int) -> Rows:
    def seconds(code: str) -> float:
        timed = f"import torch, time; s = time.perf_counter()\n{code}\nprint(time.perf_counter() - s)"
        return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)

    lazy = median(seconds("import tenterhook") for _ in range(3))
    used = median(seconds("from tenterhook import capture, observe, sites") for _ in range(3))
    return [
        ("import tenterhook, after import torch", "ms", f"{lazy * 1e3:.1f}", "30"),
        ("the same, and its names used for the first time", "ms", f"{used * 1e3:.1f}", "–"),
    ]


def memory(rounds: int) -> Rows:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    with capture(model) as seen:
        model(torch.randn(4, 64))
    kept = [seen[address] for address in seen]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
    asked = sum(t.numel() * t.element_size() for t in kept)
    return [("bytes held", "÷ bytes captured", f"{held / asked:.2f}", "1.0")]


if __name__ == "__main__":
    common.main((twelve_outputs, gpt2, after_exit, resolving, importing, memory, beside_peers))
