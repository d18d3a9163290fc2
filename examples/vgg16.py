"""Fit VGG16 to a few pictures of stripes, to look at its feature maps while it learns.

    tenterhook run --snapshots 4 examples/vgg16.py
    tenterhook view                                     # the tab "Pictures"

It knows nothing of tenterhook. The network is torchvision's where that is installed, else the same layers written here.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTHS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


def features() -> nn.Sequential:
    """The convolutions of VGG16."""
    try:
        from torchvision.models import vgg16
    except ImportError:
        layers: list[nn.Module] = []
        channels = 3
        for width in WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                nn.init.kaiming_normal_(layers[-2].weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layers[-2].bias)
                channels = width
        return nn.Sequential(*layers)
    return vgg16(weights=None).features


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features, self.head = features(), nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


def stripes(angle: float, side: int = 224) -> torch.Tensor:
    """A picture of stripes in a direction, in three colours."""
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, side), torch.linspace(-1, 1, side), indexing="ij")
    turned = torch.tensor(angle).cos() * rows + torch.tensor(angle).sin() * columns
    return torch.stack([torch.sin(frequency * turned) for frequency in (10.0, 20.0, 40.0)])


def main(steps: int = 12) -> dict[str, float]:
    torch.manual_seed(0)
    net = Net(classes=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.stack([stripes(0.0), stripes(1.5)]), torch.tensor([0, 1])
    figures: dict[str, float] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        figures[f"loss {step}"] = loss.item()
        print(f"step {step}: loss {loss.item():.3f}")
    return figures


if __name__ == "__main__":
    main()
