"""Train a small CNN on scikit-learn's handwritten digits, and look inside it without touching its code.

make demo            prints what capture sees, and writes out/feature_maps.png
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from torch import nn

from tenterhook import capture, sites
from tenterhook._table import Table


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def load() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int = 12) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()


def look(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Table:
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


def draw(model: nn.Module, images: torch.Tensor, path: Path, tile: int = 48) -> None:
    """A row per digit: the image, then what the two convolutions make of it, after their ReLUs."""
    seen = capture.once(model, images, "1", "3")
    bands = (images, seen["1"], seen["3"])
    gap, margin, top = 4, 14, 34
    lefts = [margin]
    for band in bands:
        lefts.append(lefts[-1] + band.shape[1] * (tile + gap) + 2 * margin)
    page = Image.new("RGB", (lefts[-1] - margin, top + len(images) * (tile + gap) + margin), "#12131a")
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(14)
    for left, band, title in zip(
        lefts, bands, ("image", "after conv 0: 8 maps", "after conv 2: 16 maps"), strict=False
    ):
        pen.text((left, 10), title, fill="#9aa0b4", font=font)
        tops = band.amax(dim=(0, 2, 3)).clamp_min(1e-6)  # a channel has one scale over all digits
        for row in range(len(images)):
            for channel in range(band.shape[1]):
                picture = colour(band[row, channel] / tops[channel]).resize((tile, tile), Image.Resampling.NEAREST)
                page.paste(picture, (left + channel * (tile + gap), top + row * (tile + gap)))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)


def colour(values: torch.Tensor) -> Image.Image:
    """0 to 1 as dark violet to pale yellow."""
    stops = torch.tensor(
        [[24, 16, 50], [94, 36, 118], [186, 56, 110], [246, 130, 76], [252, 236, 170]], dtype=torch.float32
    )
    at = values.clamp(0, 1) * (len(stops) - 1)
    low = at.floor().long().clamp(max=len(stops) - 2)
    part = (at - low).unsqueeze(-1)
    return Image.fromarray((stops[low] * (1 - part) + stops[low + 1] * part).byte().numpy())


def main() -> None:
    torch.manual_seed(0)
    images, labels = load()
    model = build()
    print(f"the model, as tenterhook addresses it:\n\n{sites(model)}\n")
    start = time.perf_counter()
    train(model, images[:1500], labels[:1500])
    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    seconds = time.perf_counter() - start
    print(f"trained on 1,500 digits in {seconds:.1f} s; {right:.1%} of {len(images) - 1500} others right\n")
    print("one batch, every value and its gradient (the ReLUs work in place, and still each value is its own):\n")
    print(look(model, images[1500:1564], labels[1500:1564]))
    path = Path("out/feature_maps.png")
    first = [int((labels == digit).nonzero()[0]) for digit in range(10)]
    draw(model, images[first], path)
    print(f"\nfeature maps of the ten digits: {path}")


if __name__ == "__main__":
    main()
