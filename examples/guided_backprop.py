"""Guided backpropagation: only what speaks for the digit flows back through the ReLUs.

python examples/guided_backprop.py        prints a table and writes out/guided_backprop.png

grad(relu) is the gradient of what a ReLU returned. Where it is negative it becomes zero; the ReLU's own backward then
does its part as ever, so that what passes had a positive input and a positive gradient.
"""

from pathlib import Path

import torch
from common import TRAINING, colour, draw, one_of_each, signed, trained
from torch import Tensor, nn

from tenterhook import capture, edit
from tenterhook.changes import clamp
from tenterhook.tables import Table


def saliency(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """The gradient of each digit's logit with respect to its image."""
    with capture(model, "grad(.:in)", frozen=True) as seen:
        model(images).gather(1, digits.unsqueeze(1)).sum().backward()
    return seen["grad(.:in)"]


def guided(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    with edit(model, {"grad(**<ReLU>)": clamp(min=0)}):
        return saliency(model, images, digits)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model = trained()
    images, digits = one_of_each(start=TRAINING)
    ways = {"gradient": saliency(model, images, digits), "guided": guided(model, images, digits)}
    ink = images > 0.3
    figures, rows = {}, []
    for name, gradient in ways.items():
        positive = gradient.clamp(min=0)
        figures[f"{name} on ink"] = ((positive * ink).sum() / positive.sum()).item()
        figures[f"{name} negative"] = (-gradient.clamp(max=0).sum() / gradient.abs().sum()).item()
        rows.append((name, f"{figures[f'{name} negative']:.0%}", f"{figures[f'{name} on ink']:.0%}"))
    header = ("way back", "negative part", "positive part on ink")
    print(f"the gradient of ten logits with respect to their images:\n\n{Table(header, rows, right=header[1:])}")
    path = Path("out/guided_backprop.png")
    pictures = [[colour(image[0]) for image in images]]
    pictures += [[signed(one[0]) for one in gradient] for gradient in ways.values()]
    draw(path, pictures, top=[str(int(digit)) for digit in digits], left=("image", *ways))
    print(f"\nyellow speaks for the digit, blue against it: {path}")
    return figures


if __name__ == "__main__":
    main()
