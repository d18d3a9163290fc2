"""Adversarial digits: FGSM and PGD, which follow the gradient of the input uphill.

python examples/adversarial.py        prints a table and writes out/adversarial.png
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from common import TRAINING, accuracy, colour, draw, load, one_of_each, trained
from torch import Tensor, nn

from tenterhook import capture
from tenterhook.tables import Table

EPSILONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
STEPS = 20


def uphill(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The sign of the loss's gradient at each pixel."""
    with capture(model, "grad(.:in)", frozen=True) as seen:
        F.cross_entropy(model(images), labels, reduction="sum").backward()
    return seen["grad(.:in)"].sign()


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    return (images + epsilon * uphill(model, images, labels)).clamp(0, 1)


def pgd(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """Many small steps, each followed by the way back into the box around the image."""
    moved = images
    for _ in range(STEPS):
        moved = moved + epsilon / 5 * uphill(model, moved, labels)
        moved = torch.min(torch.max(moved, images - epsilon), images + epsilon).clamp(0, 1)
    return moved


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model = trained()
    images, labels = (part[TRAINING:] for part in load())
    figures, rows = {}, []
    for epsilon in EPSILONS:
        for name, attack in (("FGSM", fgsm), ("PGD", pgd)):
            figures[f"{name} {epsilon:.2f}"] = accuracy(model, attack(model, images, labels, epsilon), labels)
        rows.append((f"{epsilon:.2f}", f"{figures[f'FGSM {epsilon:.2f}']:.1%}", f"{figures[f'PGD {epsilon:.2f}']:.1%}"))
    header = ("epsilon", "FGSM", f"PGD, {STEPS} steps")
    print(
        f"digits read right, of {len(images)} that the model was not trained on:\n\n{Table(header, rows, right=header)}"
    )
    path = Path("out/adversarial.png")
    ten, digits = one_of_each(start=TRAINING)
    shown = [pgd(model, ten, digits, epsilon) for epsilon in EPSILONS]
    guesses = torch.stack([model(batch).argmax(1) for batch in shown])
    notes = [["right" if g == d else f"read as {g}" for g, d in zip(row, digits, strict=True)] for row in guesses]
    pictures = [[colour(image[0]) for image in batch] for batch in shown]
    left = [f"PGD, {epsilon:.2f}" if epsilon else "image" for epsilon in EPSILONS]
    draw(path, pictures, top=[str(digit) for digit in digits.tolist()], left=left, notes=notes)
    print(f"\nten digits, moved further and further: {path}")
    return figures


if __name__ == "__main__":
    main()
