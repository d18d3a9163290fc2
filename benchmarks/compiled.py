"""What a session costs over compiled code, side by side with the compiled code alone.

    python benchmarks/compiled.py            a table; every row is a ratio taken in this one run
    python benchmarks/compiled.py --quick    fewer rounds, for a look
    python benchmarks/compiled.py --gpu      on a CUDA device, with a training step of GPT-2-small

"step with copies" is that of a model that was compiled with hooks of the user's own, which do what cannot be left out:
they copy the same values and gradients. Each way enters and leaves its session in the time that is taken.
"""

from collections.abc import Callable

import common
import torch
from common import Rows, Stack, device, gpt2, interleave
from torch import Tensor, nn

from tenterhook import capture, edit, observe
from tenterhook.changes import scale

BLOCKS = [f"blocks.{i}" for i in range(0, 12, 2)]  # six
Step = Callable[[], object]


def step(model: Callable[..., Tensor], net: nn.Module, x: Tensor) -> Step:
    def run() -> None:
        net.zero_grad()
        model(x).square().mean().backward()

    return run


def with_copies(net: nn.Module) -> None:
    """Hooks that are there before the model is compiled, and copy into buffers."""
    for name in BLOCKS:
        net.get_submodule(name).register_forward_hook(_Copies())


class _Copies:
    value: Tensor | None = None

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.value is None:
            self.value, self.grad = torch.empty_like(output), torch.empty_like(output)
        self.value.copy_(output.detach())
        output.register_hook(self.take)

    def take(self, grad: Tensor) -> None:
        self.grad.copy_(grad)


def stack(rounds: int) -> Rows:
    """Six values and their gradients, of a stack of 12 residual blocks."""
    x = torch.randn(256, 256, device=device())
    nets = [Stack(width=256).to(device()) for _ in range(2)]
    bare, eager = torch.compile(nets[0]), nets[0]
    with_copies(nets[1])
    for _ in range(2):  # so that the buffers are there when it is compiled
        nets[1](x).square().mean().backward()
    copied = torch.compile(nets[1])
    plain = step(bare, nets[0], x)

    def inside(enter: Callable[[], object]) -> Step:
        def run() -> None:
            with enter():  # type: ignore[attr-defined]
                plain()

        return run

    runs = {
        "bare": plain,
        "copies": step(copied, nets[1], x),
        "eager": step(eager, nets[0], x),
        "capture": inside(lambda: capture(bare, *BLOCKS, grad=True)),
        "reduce": inside(lambda: capture(bare, *BLOCKS, grad=True, reduce=torch.norm)),
        "observe": inside(lambda: observe(bare, dict.fromkeys(BLOCKS, lambda value: None))),
        "edit": inside(lambda: edit(bare, dict.fromkeys(BLOCKS, scale(1.0)))),
        "stance": inside(lambda: capture(bare, *BLOCKS, grad=True, eager=True)),
    }
    t = interleave(runs, rounds)
    what = f"12 blocks of width 256, {t['bare'] * 1e3:.1f} ms: "
    ways = {"capture": "6 outputs and their gradients", "reduce": "their norms", "observe": "observe 6 outputs"}
    ways |= {"edit": "edit 6 outputs", "stance": "6 outputs and their gradients, eager=True"}
    ways |= {"eager": "bare, not compiled", "copies": "hooks compiled in that copy the same"}
    rows: Rows = [(what + ways["capture"], "step ÷ step with copies", f"{t['capture'] / t['copies']:.2f}", "≤ 1.05")]
    for name, words in ways.items():
        rows.append((what + words, "step ÷ compiled bare", f"{t[name] / t['bare']:.2f}", "–"))
    return rows


def transformer(rounds: int) -> Rows:
    """The norm of every module's output and gradient: a 6-layer GPT-2; with --gpu GPT-2-small, 8×1024, bf16."""
    model = small() if device() == "cuda" else gpt2()
    if model is None:
        return []
    ids = torch.randint(0, 1000, (8, 1024) if device() == "cuda" else (2, 128), device=device())
    bare = torch.compile(model)

    def plain() -> None:
        model.zero_grad()
        with torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda"):
            bare(ids).last_hidden_state.float().square().mean().backward()

    def captured() -> None:
        with capture(bare, reduce=torch.norm, grad=True):
            plain()

    t = interleave({"bare": plain, "capture": captured}, max(rounds // 4, 5))
    what = f"GPT-2, {t['bare'] * 1e3:.1f} ms: the norm of every module's output and gradient"
    limit = "≤ 1.15" if device() == "cuda" else "–"
    return [(what, "step ÷ compiled bare", f"{t['capture'] / t['bare']:.2f}", limit)]


def small() -> nn.Module | None:
    """GPT-2-small, as it is trained."""
    try:
        from transformers import GPT2Config, GPT2Model
    except ImportError:
        return None
    return GPT2Model(GPT2Config(use_cache=False)).cuda().train()


if __name__ == "__main__":
    common.main([stack, transformer])
