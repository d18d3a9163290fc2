"""Transfer: what a CNN has learnt from the digits 0 to 4 helps to tell 5 to 9 apart, from a few labels.

python examples/transfer.py        prints a table

The features are what its head is given: capture.once ends the forward right there.
"""

import torch
import torch.nn.functional as F
from common import accuracy, build_deeper, load, train
from torch import Tensor, nn

from tenterhook import capture
from tenterhook.tables import Table

FEW = (2, 5, 20)  # labels per digit
DRAWS = 3


def scattered(images: Tensor) -> Tensor:
    """Each digit somewhere on a page of 12 by 12, so that pixels alone say little."""
    pages = F.pad(images, (2, 2, 2, 2))
    return torch.stack([page.roll(torch.randint(-2, 3, (2,)).tolist(), dims=(1, 2)) for page in pages])


def head_accuracy(inputs: Tensor, labels: Tensor, few: int) -> float:
    """A linear head on some rows of each digit, judged on all others; the mean over several draws."""
    inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-3)
    scores = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        order = torch.randperm(len(labels))
        chosen = torch.cat([order[labels[order] == digit][:few] for digit in range(5)])
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill(0, chosen, False)
        head = nn.Linear(inputs.shape[1], 5)
        train(head, inputs[chosen], labels[chosen], epochs=60)
        scores.append(accuracy(head, inputs[rest], labels[rest]))
    return sum(scores) / DRAWS


def main() -> dict[str, float]:
    torch.manual_seed(0)
    images, labels = load()
    images, low = scattered(images), labels < 5
    random, trained = build_deeper(5), build_deeper(5)
    train(trained, images[low], labels[low])
    others, answers = images[~low], labels[~low] - 5
    inputs = {
        "raw pixels": others.flatten(1),
        "features of a random network": capture.once(random, others, "9:in"),
        "features learnt from 0 to 4": capture.once(trained, others, "9:in"),
    }
    figures = {f"{name}, {few}": head_accuracy(x, answers, few) for name, x in inputs.items() for few in FEW}
    rows = [(name, str(x.shape[1]), *(f"{figures[f'{name}, {few}']:.1%}" for few in FEW)) for name, x in inputs.items()]
    header = ("linear head on", "width", *(f"{few} labels each" for few in FEW))
    print("the digits 5 to 9, scattered, read right by a linear head:\n")
    print(Table(header, rows, right=header[1:]))
    return figures


if __name__ == "__main__":
    main()
