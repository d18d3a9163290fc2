"""Train a CNN on scikit-learn's digits, with four faults in it of the kind that one finds in real code.

    tenterhook run examples/faulty.py      (make demo)

It knows nothing of tenterhook. The verdict names what is wrong: the last layer starts with weights that are far too
large, a bias was set so that most hidden units are dead, the optimizer was not given the first layer, and after
the first validation nobody calls train() again.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.conv, self.relu, self.pool = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        self.hidden, self.act = nn.Linear(512, 64), nn.ReLU()
        self.head = nn.Linear(64, 10)
        nn.init.normal_(self.head.weight, std=5.0)  # too large
        nn.init.constant_(self.hidden.bias[:48], -5.0)  # from an experiment, long forgotten

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.conv(self.stem(images))))
        return self.head(self.act(self.hidden(x.flatten(1))))


def accuracy(net: Net, images: torch.Tensor, labels: torch.Tensor) -> float:
    net.eval()  # and nobody calls train() again
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


def main(epochs: int = 10) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    net = Net()
    trained = [*net.conv.parameters(), *net.hidden.parameters(), *net.head.parameters()]  # and the stem?
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for epoch in range(epochs):
        for rows in torch.randperm(1500).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
        print(f"epoch {epoch}: {accuracy(net, images[1500:], labels[1500:]):.1%} right")


if __name__ == "__main__":
    main()
