"""Grad-CAM: where the last convolution found what speaks for the predicted digit, rather than for the runner-up.

python examples/grad_cam.py        prints a table and writes out/grad_cam.png

Its maps are added up, each weighted with the mean gradient of the margin there: one value and one gradient.
"""

from pathlib import Path

import torch
from common import TRAINING, colour, draw, one_of_each, trained
from PIL import Image
from torch import Tensor, nn

from tenterhook import capture
from tenterhook.tables import Table

LAST_CONV = "2"


def grad_cam(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """A heat map for each image, from 0 to 1, and the logits."""
    with capture(model, LAST_CONV, f"grad({LAST_CONV})") as seen:
        logits = model(images)
        best, second = logits.topk(2).values.unbind(1)
        (best - second).sum().backward()
    weights = seen[f"grad({LAST_CONV})"].mean(dim=(2, 3), keepdim=True)
    heat = (weights * seen[LAST_CONV]).sum(1).relu()
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(1e-9), logits.detach()


def overlay(image: Tensor, heat: Tensor, size: int = 72) -> Image.Image:
    """The digit in grey under the heat map, which is smooth and fades where it is low."""
    grey = Image.fromarray((image * 160).byte().numpy()).resize((size, size), Image.Resampling.NEAREST)
    strength = Image.fromarray((heat * 220).byte().numpy()).resize((size, size), Image.Resampling.BICUBIC)
    hot = colour(heat).resize((size, size), Image.Resampling.BICUBIC)
    return Image.composite(hot, grey.convert("RGB"), strength)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    images, digits = one_of_each(start=TRAINING)
    heat, logits = grad_cam(trained(), images)
    best, second = logits.topk(2).indices.T.tolist()
    ink = images[:, 0] > 0.3
    on_ink = (heat * ink).sum((1, 2)) / heat.sum((1, 2))
    rows = []
    for i, digit in enumerate(digits.tolist()):
        y, x = divmod(int(heat[i].argmax()), heat.shape[-1])
        place = f"row {y}, column {x}"
        rows.append(
            (f"{digit}", f"{best[i]}", f"{second[i]}", place, f"{on_ink[i]:.0%}", f"{ink[i].float().mean():.0%}")
        )
    header = ("digit", "predicted", "runner-up", "hottest pixel", "heat on ink", "ink on image")
    print(f"Grad-CAM at module {LAST_CONV}, the last convolution:\n\n{Table(header, rows, right=header[4:])}")
    path = Path("out/grad_cam.png")
    pictures = (
        [colour(image) for image in images[:, 0]],
        [colour(one) for one in heat],
        [overlay(image, one) for image, one in zip(images[:, 0], heat, strict=True)],
    )
    titles = [f"{a}, not {b}" for a, b in zip(best, second, strict=True)]
    draw(path, pictures, top=titles, left=("image", "Grad-CAM", "overlay"))
    print(f"\nthe ten heat maps: {path}")
    return {"on ink": on_ink.mean().item(), "ink": ink.float().mean().item(), "coolest": heat.amax((1, 2)).min().item()}


if __name__ == "__main__":
    main()
