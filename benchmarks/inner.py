"""What it costs to look inside a forward, side by side with the bare model.

    python benchmarks/inner.py            a table; every row is a ratio taken in this one run
    python benchmarks/inner.py --quick    fewer rounds, for a look

"tiny operations" is a forward of a hundred additions of four numbers: nothing but the cost of each call.
"""

from collections.abc import Callable

import common
import torch
from common import Rows, device, interleave
from torch import nn

from tenterhook import capture


def additions() -> nn.Module:
    """A model of a class of its own: a session changes what the functions of a class run."""

    class Tiny(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(99):
                x = x + 1
            y = x + 2
            return y

    return Tiny()


def method_at_the_end() -> nn.Module:
    """Likewise, with a variable that a method gives its value."""

    class Tiny(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(99):
                x = x + 1
            y = x.relu()
            return y

    return Tiny()


def tiny(rounds: int) -> Rows:
    x = torch.randn(4, device=device())
    rows: Rows = []
    with torch.no_grad():
        for words, make in (("", additions), (", `y = x.relu()`", method_at_the_end)):
            bare, watched, entered = make(), make(), make()

            def enter_to_exit(entered: nn.Module = entered) -> object:
                with capture(entered, "./y") as seen:
                    entered(x)
                return seen

            runs = {"bare": lambda bare=bare: bare(x), "enter to exit": enter_to_exit}
            with capture(watched, "./y", keep="last"):
                t = interleave({**runs, "session open": lambda watched=watched: watched(x)}, rounds)
            for name, limit in (("session open", "≤ 1.1"), ("enter to exit", "≤ 1.5")):
                what = f"one inner variable, tiny operations{words}: {name}"
                rows.append((what, "forward ÷ bare", f"{t[name] / t['bare']:.2f}", limit))
    return rows


def gpt2_small() -> tuple[nn.Module, torch.Tensor] | None:
    try:
        from transformers import GPT2Config, GPT2Model
    except ImportError:
        return None
    model = GPT2Model(GPT2Config(bos_token_id=0, eos_token_id=0, attn_implementation="eager")).eval().to(device())
    return model, torch.randint(0, 50000, (1, 256), device=device())


def real(rounds: int) -> Rows:
    found = gpt2_small()
    if found is None:
        return [("the inside of GPT-2-small", "÷ bare", "transformers is not installed", "–")]
    model, ids = found
    torch.set_num_threads(torch.get_num_interop_threads())
    few, more = max(rounds // 200, 5), max(rounds // 40, 10)

    def forward(*addresses: str) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad(), capture(model, *addresses) as seen:
                model(ids)
            return seen

        return run

    def step() -> None:
        model(ids).last_hidden_state.sum().backward()
        model.zero_grad()

    def everything() -> object:
        with capture(model, "**/**", grad=True, copy=copy) as seen:
            step()
        return len(seen)

    def bare() -> None:
        with torch.no_grad():
            model(ids)

    where = f"GPT-2-small, 1 × 256 tokens, {torch.get_num_threads()} threads"
    on_gpu = device() == "cuda"  # where this forward is a chain of short kernels that waits for Python
    some = {
        "one inner variable": "h.5.attn/eager_attention_forward/attn_weights#0",
        "`h.*/residual#0`": "h.*/residual#0",
    }
    limits = {"one inner variable": "≤ 1.2" if on_gpu else "≤ 1.02", "`h.*/residual#0`": "≤ 1.5" if on_gpu else "–"}
    t = interleave({"bare": bare, **{what: forward(address) for what, address in some.items()}}, more)
    rows: Rows = [(f"{what}, {where}", "forward ÷ bare", f"{t[what] / t['bare']:.2f}", limits[what]) for what in some]
    for copy, limit in ((True, "–" if on_gpu else "≤ 1.5"), (False, "≤ 3.5" if on_gpu else "–")):
        values = everything()
        t = interleave({"bare": step, "all": everything}, few)
        words = "" if copy else ", copy=False"
        what = f"all {values} inner values and gradients{words}, {where}"
        rows.append((what, "step ÷ bare step", f"{t['all'] / t['bare']:.2f}", limit))
    return rows


if __name__ == "__main__":
    common.main((tiny, real))
