"""Grad-CAM: where the last convolution found what speaks for the predicted digit.

python examples/grad_cam.py        prints a table and writes out/grad_cam.png

Its maps are averaged, each weighted with the mean gradient of the digit's logit there: one value and one gradient.
"""

from pathlib import Path

import torch
from common import colour, draw, one_of_each, trained
from PIL import Image
from torch import Tensor, nn

from tenterhook import capture
from tenterhook._table import Table

LAST_CONV = "3"


def grad_cam(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """A heat map for each image, from 0 to 1, and the logits."""
    with capture(model, LAST_CONV, f"grad({LAST_CONV})") as seen:
        logits = model(images)
        logits.amax(1).sum().backward()
    weights = seen[f"grad({LAST_CONV})"].mean(dim=(2, 3), keepdim=True)
    heat = (weights * seen[LAST_CONV]).sum(1).relu()
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(1e-9), logits.detach()


def overlay(image: Tensor, heat: Tensor, size: int = 72) -> Image.Image:
    """The digit in grey under the heat map, which is smooth and fades where it is low."""
    grey = Image.fromarray((image * 255).byte().numpy()).resize((size, size), Image.Resampling.NEAREST)
    strength = Image.fromarray((heat * 255).byte().numpy()).resize((size, size), Image.Resampling.BICUBIC)
    hot = colour(heat).resize((size, size), Image.Resampling.BICUBIC)
    return Image.composite(hot, grey.convert("RGB"), strength.point(lambda x: 60 + 0.6 * x))


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model = trained()
    images, digits = one_of_each(start=1500)
    heat, logits = grad_cam(model, images)
    predicted, ink = logits.argmax(1), images[:, 0] > 0.3
    on_ink = (heat * ink).sum((1, 2)) / heat.sum((1, 2))
    rows = []
    for i, digit in enumerate(digits):
        y, x = divmod(int(heat[i].argmax()), heat.shape[-1])
        rows.append((f"{digit}", f"{predicted[i]}", f"row {y}, column {x}", f"{on_ink[i]:.0%}", f"{ink[i].float().mean():.0%}"))
    header = ("digit", "predicted", "hottest pixel", "heat on ink", "ink on image")
    print(f"Grad-CAM at module {LAST_CONV}, the last convolution:\n\n{Table(header, rows, right=header[3:])}")
    path = Path("out/grad_cam.png")
    pictures = (
        [colour(image) for image in images[:, 0]],
        [colour(one) for one in heat],
        [overlay(image, one) for image, one in zip(images[:, 0], heat, strict=True)],
    )
    titles = [f"{digit} → {guess}" for digit, guess in zip(digits, predicted, strict=True)]
    draw(path, pictures, top=titles, left=("image", "Grad-CAM", "overlay"))
    print(f"\nthe ten heat maps: {path}")
    return {"heat on ink": on_ink.mean().item(), "ink on image": ink.float().mean().item()}


if __name__ == "__main__":
    main()
