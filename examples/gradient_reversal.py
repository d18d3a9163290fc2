"""Domain-adversarial training: features that tell less of the domain an image is from, and so serve the unlabelled one.

python examples/gradient_reversal.py        prints a table

The labels are known in one domain only. A second head learns to tell the domains apart, and its share of the features'
gradient, grad(domain:in), is reversed on its way back, so that the features learn to keep that from it.
"""

import torch
import torch.nn.functional as F
from common import TRAINING, accuracy, build, fit, load, train
from torch import Tensor, nn

from tenterhook import capture, edit
from tenterhook.changes import reverse
from tenterhook.tables import Table


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*build()[:-1], nn.Linear(256, 16), nn.LayerNorm(16))
        self.label = nn.Linear(16, 10)
        self.domain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.label(features), self.domain(features)


def greyed(images: Tensor) -> Tensor:
    """The second domain: the same ink on grey paper."""
    return (images + 0.6) / 1.6


def learn(images: Tensor, labels: Tensor, times: float) -> TwoHeads:
    """Train on labelled images and unlabelled grey ones; `times` is the strength of the reversal, at 0 none comes."""
    model = TwoHeads()
    reader = [*model.features.parameters(), *model.label.parameters()]
    groups = [{"params": reader, "lr": 2e-3}, {"params": model.domain.parameters(), "lr": 1e-2}]

    def loss(x: Tensor, other: Tensor, y: Tensor) -> Tensor:
        label, domain = model(torch.cat([x, other]))
        sides = torch.arange(2).repeat_interleave(len(x))
        return F.cross_entropy(label[: len(x)], y) + F.cross_entropy(domain, sides)

    with edit(model, {"grad(domain:in)": reverse(times)}):
        optimizer, other = torch.optim.Adam(groups, betas=(0.5, 0.99)), greyed(images[torch.randperm(len(images))])
        fit(model, loss, images, other, labels, epochs=20, optimizer=optimizer, decay=0.85)
    return model


def main() -> dict[str, float]:
    torch.manual_seed(0)
    images, labels = load()
    both, test = torch.cat([images, greyed(images)]), (torch.arange(len(images)) >= TRAINING).repeat(2)
    sides = torch.arange(2).repeat_interleave(len(images))
    figures, rows = {}, []
    for name, times in (("without", 0.0), ("with", 1.0)):
        model = learn(images[:TRAINING], labels[:TRAINING], times)
        features = capture.once(model, both, "features")
        probe = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
        train(probe, features[~test], sides[~test], epochs=6)
        figures[f"domain {name}"] = accuracy(probe, features[test], sides[test])
        figures[f"white {name}"] = accuracy(model.label, features[test & (sides == 0)], labels[TRAINING:])
        figures[f"grey {name}"] = accuracy(model.label, features[test & (sides == 1)], labels[TRAINING:])
        rows.append((name, *(f"{figures[f'{what} {name}']:.1%}" for what in ("domain", "white", "grey"))))
    header = ("reversal", "domain, by a probe", "digit, white paper (labelled)", "digit, grey paper")
    print(f"what is read right from the features, of images not trained on:\n\n{Table(header, rows, right=header[1:])}")
    return figures


if __name__ == "__main__":
    main()
