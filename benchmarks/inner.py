"""What it costs to look inside a forward, side by side with the bare model and with a mode that does nothing.

    python benchmarks/inner.py            a table; every row is a ratio taken in this one run
    python benchmarks/inner.py --quick    fewer rounds, for a look

"tiny operations" is a forward of a hundred additions of four numbers: nothing but the cost of each call.
"""

from collections.abc import Callable
from typing import Any

import common
import torch
from common import Rows, device, interleave
from torch import nn
from torch.overrides import TorchFunctionMode

from tenterhook import capture


class Tiny(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(99):
            x = x + 1
        y = x + 2
        return y


class Called(nn.Module):
    """The same with a variable that a call gives its value, which need not be an operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(99):
            x = x + 1
        y = x.relu()
        return y


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def tiny(rounds: int) -> Rows:
    x = torch.randn(4, device=device())
    limits = {"session open": "≤ 1.1", "enter to exit": "≤ 1.5"}
    with torch.no_grad():
        return [
            (f"{what}: {name}", "forward ÷ bare", f"{ratio:.2f}", limits.get(name, "–"))
            for what, kind in (
                ("one inner variable, tiny operations", Tiny),
                ("one inner variable, tiny operations, `y = x.relu()`", Called),
            )
            for name, ratio in _tiny(kind, x, rounds).items()
        ]


def _tiny(kind: type[nn.Module], x: torch.Tensor, rounds: int) -> dict[str, float]:
    bare, watched, entered, passed = kind(), kind(), kind(), kind()
    nothing = Nothing()

    def with_nothing() -> None:
        with nothing:
            passed(x)

    def opened() -> None:
        assert inside is not None
        torch._C._push_on_torch_function_stack(inside)  # for this run only, so that the others do not pay for it
        watched(x)
        torch._C._pop_torch_function_stack()

    def enter_to_exit() -> object:
        with capture(entered, "./y") as seen:
            entered(x)
        return seen

    runs = {"bare": lambda: bare(x), "a mode that does nothing": with_nothing}
    session = capture(watched, "./y")
    with session:
        inside = session._session._inside
        assert inside is not None
        inside.switch_off()
        t = interleave({**runs, "session open": opened}, rounds)
    entered_too = interleave({**runs, "enter to exit": enter_to_exit}, rounds)
    ratios = {name: t[name] / t["bare"] for name in list(t)[1:]}
    return {**ratios, "enter to exit": entered_too["enter to exit"] / entered_too["bare"]}


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
    t = interleave({"bare": bare, "one": forward("h.5.attn/eager_attention_forward/attn_weights#0")}, more)
    rows: Rows = [(f"one inner variable, {where}", "forward ÷ bare", f"{t['one'] / t['bare']:.2f}", "≤ 1.1")]
    for copy in (True, False):
        values = everything()
        t = interleave({"bare": step, "all": everything}, few)
        words = "" if copy else ", copy=False"
        what = f"all {values} inner values and gradients{words}, {where}"
        rows.append((what, "step ÷ bare step", f"{t['all'] / t['bare']:.2f}", "≤ 1.5"))
    return rows


if __name__ == "__main__":
    common.main((tiny, real))
