"""Train a small CNN on scikit-learn's handwritten digits, and look inside it without touching its code.

make demo            prints what capture sees, and writes out/feature_maps.png
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import TRAINING, accuracy, build, colour, draw, load, one_of_each, train
from torch import Tensor, nn

from tenterhook import capture, sites
from tenterhook.tables import Table


def look(model: nn.Module, images: Tensor, labels: Tensor) -> Table:
    """One forward and backward under capture: every value and its gradient."""
    with capture(model, "*", grad=True) as seen:
        F.cross_entropy(model(images), labels).backward()
    rows = []
    for name, module in model.named_children():
        value, grad = seen[name], seen[f"grad({name})"]
        shape = "×".join(map(str, value.shape[1:]))
        figures = (
            f"{value.mean():+.3f}",
            f"{value.std():.3f}",
            f"{(value == 0).float().mean():.0%}",
            f"{grad.norm():.1e}",
        )
        rows.append((name, type(module).__name__, shape, *figures))
    header = ("address", "class", "shape", "mean", "std", "zeros", "|gradient|")
    return Table(header, rows, right=header[3:])


def draw_maps(model: nn.Module, images: Tensor, path: Path) -> None:
    """A row per digit: the image, then what the two convolutions make of it, after their ReLUs."""
    seen = capture.once(model, images, "1", "3")
    maps = torch.cat([images, seen["1"], seen["3"]], dim=1)
    maps = maps / maps.amax(dim=(0, 2, 3), keepdim=True).clamp_min(1e-6)  # a channel has one scale over all digits
    titles = [""] * maps.shape[1]
    titles[0], titles[1], titles[9] = "image", "after conv 0: 8 maps", "after conv 2: 16 maps"
    draw(path, [[colour(one) for one in row] for row in maps], top=titles, bands=(1, 9), tile=48)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    images, labels = load()
    model = build()
    print(f"the model, as tenterhook addresses it:\n\n{sites(model)}\n")
    start = time.perf_counter()
    train(model, images[:TRAINING], labels[:TRAINING])
    others, answers = images[TRAINING:], labels[TRAINING:]
    right = accuracy(model, others, answers)
    seconds = time.perf_counter() - start
    print(f"trained on {TRAINING:,} digits in {seconds:.1f} s; {right:.1%} of {len(others)} others right\n")
    print("one batch, every value and its gradient (the ReLUs work in place, and still each value is its own):\n")
    print(look(model, others[:64], answers[:64]))
    path = Path("out/feature_maps.png")
    draw_maps(model, one_of_each()[0], path)
    print(f"\nfeature maps of the ten digits: {path}")
    return {"accuracy": right}


if __name__ == "__main__":
    main()
