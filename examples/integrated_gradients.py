"""Integrated gradients: how much each pixel adds to the digit's logit, on the way from a blank image to this one.

python examples/integrated_gradients.py        prints a table and writes out/integrated_gradients.png

All points of all ten ways go through the model in one batch, and one backward gives the gradient of each.
"""

from pathlib import Path

import torch
from common import TRAINING, colour, draw, one_of_each, signed, trained
from torch import Tensor, nn

from tenterhook import capture
from tenterhook.tables import Table

STEPS = 1024


def integrated_gradients(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """The mean gradient on the straight way from zero to each image, times the image."""
    middles = (torch.arange(STEPS) + 0.5) / STEPS
    points = (middles.view(-1, 1, 1, 1, 1) * images).flatten(0, 1)
    with capture(model, "grad(.:in)", frozen=True) as seen:
        model(points).gather(1, digits.repeat(STEPS).unsqueeze(1)).sum().backward()
    return seen["grad(.:in)"].unflatten(0, (STEPS, len(images))).mean(0) * images


@torch.no_grad()
def logits(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    return model(images).gather(1, digits.unsqueeze(1)).squeeze(1)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model = trained()
    images, digits = one_of_each(start=TRAINING)
    parts = integrated_gradients(model, images, digits)
    blank, full = logits(model, torch.zeros_like(images), digits), logits(model, images, digits)
    total = parts.sum(dim=(1, 2, 3))
    errors = (total - (full - blank)).abs()
    columns = zip(digits.tolist(), blank, full, full - blank, total, errors, strict=True)
    rows = [(f"{digit}", *(f"{x:+.3f}" for x in figures), f"{error:.1e}") for digit, *figures, error in columns]
    header = ("digit", "logit of blank", "logit of image", "difference", "sum of parts", "error")
    print(f"completeness with {STEPS} steps:\n\n{Table(header, rows, right=header[1:])}")
    path = Path("out/integrated_gradients.png")
    pictures = ([colour(image[0]) for image in images], [signed(part[0]) for part in parts])
    draw(path, pictures, top=[str(digit) for digit in digits.tolist()], left=("image", "its parts"))
    print(f"\nyellow pixels speak for the digit, blue ones against it: {path}")
    return {"error": errors.max().item(), "difference": (full - blank).abs().min().item()}


if __name__ == "__main__":
    main()
