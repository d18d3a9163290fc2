"""What edit and sweep cost, side by side with hand-written editing hooks and with one run per edit.

    python benchmarks/edit.py            a table; every row is a ratio taken in this one run
    python benchmarks/edit.py --quick    fewer rounds, for a look

How times are taken is said in benchmarks/capture.py. "by hand" is a closure per module that returns its output
times a number, registered and removed.
"""

from collections.abc import Callable

import common
import torch
from common import Rows, Stack, device, interleave
from torch import nn

from tenterhook import edit, sweep
from tenterhook.changes import at, scale, zero


def by_hand(model: nn.Module, names: list[str], run: Callable[[], object]) -> Callable[[], object]:
    modules = dict(model.named_modules())

    def go() -> object:
        handles = []
        for name in names:

            def hook(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
                return output * 1.5

            handles.append(modules[name].register_forward_hook(hook))
        out = run()
        for handle in handles:
            handle.remove()
        return out

    return go


def twelve_outputs(rounds: int) -> Rows:
    model, x = Stack().to(device()), torch.randn(4, 64, device=device())
    names = [f"blocks.{i}" for i in range(12)]
    half = scale(1.5)

    def ours(changes: Callable[[], dict[str, object]]) -> Callable[[], object]:
        def go() -> object:
            with edit(model, changes()) as edits:
                model(x)
            return edits

        return go

    contestants = {
        "bare": lambda: model(x),
        "by hand": by_hand(model, names, lambda: model(x)),
        "scale(1.5)": ours(lambda: {name: scale(1.5) for name in names}),
        "scale(1.5), made once": ours(lambda: dict.fromkeys(names, half)),
        "lambda v: v * 1.5": ours(lambda: {name: lambda v: v * 1.5 for name in names}),
    }
    rows: Rows = []
    for mode, words in ((torch.no_grad(), ""), (torch.enable_grad(), ", with a graph")):
        with mode:
            t = interleave(contestants, rounds)
        added = {name: t[name] - t["bare"] for name in t}
        for name in list(contestants)[2:]:
            limit = "≤ 1.3" if name.startswith("scale(1.5)") and not words else "–"
            ratio = f"{added[name] / added['by hand']:.2f}"
            rows.append((f"12 output edits, enter to exit{words}: {name}", "added ÷ by hand", ratio, limit))
    rows.append(("12 output edits: time added by hand", "µs", f"{added['by hand'] * 1e6:.0f}", "–"))
    return rows


def steady(rounds: int) -> Rows:
    """Within one session, forward after forward, hooks in place."""
    model, twin, bare = (Stack().to(device()) for _ in range(3))
    x = torch.randn(4, 64, device=device())
    handles = [block.register_forward_hook(lambda module, args, output: output * 1.5) for block in twin.blocks]
    with edit(model, {"blocks.*": scale(1.5)}), torch.no_grad():
        t = interleave({"bare": lambda: bare(x), "hand": lambda: twin(x), "ours": lambda: model(x)}, rounds)
    for handle in handles:
        handle.remove()
    ratio = (t["ours"] - t["bare"]) / (t["hand"] - t["bare"])
    return [("12 output edits, hooks in place: scale(1.5)", "added ÷ by hand", f"{ratio:.2f}", "–")]


def gradients(rounds: int) -> Rows:
    model, x = Stack().to(device()), torch.randn(4, 64, device=device())
    names = [f"blocks.{i}" for i in range(12)]
    modules = dict(model.named_modules())

    def step() -> None:
        model(x).sum().backward()

    def hand() -> None:
        handles = []

        def hook(module: nn.Module, args: object, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: grad * 1.5)

        for name in names:
            handles.append(modules[name].register_forward_hook(hook))
        step()
        for handle in handles:
            handle.remove()

    def ours() -> object:
        with edit(model, {f"grad({name})": scale(1.5) for name in names}) as edits:
            step()
        return edits

    t = interleave({"bare": step, "hand": hand, "ours": ours}, rounds)
    ratio = (t["ours"] - t["bare"]) / (t["hand"] - t["bare"])
    return [("12 gradient edits, enter to exit: scale(1.5)", "added ÷ forward + tensor hooks", f"{ratio:.2f}", "–")]


def sweeping(rounds: int) -> Rows:
    model = common.gpt2()
    if model is None:
        return [("sweep of 64 edits on GPT-2", "one by one ÷ sweep", "transformers is not installed", "≥ 4")]
    model.to(device())
    torch.set_num_threads(torch.get_num_interop_threads())  # all cores: what batching is for
    rows: Rows = []
    for tokens in (8, 16, 64):
        ids = torch.randint(0, 1000, (1, tokens), device=device())
        heads = [(layer, head) for layer in range(6) for head in range(4)]
        edits = [{f"h.{i}.attn.c_proj:in": at((..., slice(32 * j, 32 * j + 32)), zero())} for i, j in heads]
        edits += [{f"h.{i % 6}.mlp": scale(i / 40)} for i in range(40)]

        def one_by_one(ids: torch.Tensor = ids, edits: list[dict[str, object]] = edits) -> list[torch.Tensor]:
            out = []
            for changes in edits:
                with edit(model, changes):
                    out.append(model(ids).last_hidden_state)
            return out

        def swept(ids: torch.Tensor = ids, edits: list[dict[str, object]] = edits) -> list[torch.Tensor]:
            return [out.last_hidden_state for out in sweep(model, ids, edits)]

        with torch.no_grad():
            apart = max(float((a - b).abs().max()) for a, b in zip(one_by_one(), swept(), strict=True))
            assert apart < 1e-4, apart
            t = interleave({"one by one": one_by_one, "sweep": swept}, max(rounds // 100, 4))
        ratio = f"{t['one by one'] / t['sweep']:.1f}"
        what = f"sweep of 64 edits, 6-layer GPT-2, 1 × {tokens} tokens, {torch.get_num_threads()} threads"
        rows.append((what, "one by one ÷ sweep", ratio, "≥ 4"))
    return rows


if __name__ == "__main__":
    common.main((twelve_outputs, steady, gradients, sweeping))
