"""Losses of many kinds: where they begin."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, digits, fit, loader, mlp, test


def _wild(model: nn.Module) -> nn.Module:
    """The last layer with weights fit for nothing."""
    with torch.no_grad():
        list(model.parameters())[-2].normal_(0, 3)
    return model


def _criterion_training(criterion, model=None, epochs=12):
    x, y, *held = digits()
    model = model or _wild(mlp())
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1e-3), epochs, criterion)
    test(model, *held)
    return model


def _own_mean(scores, labels):
    return -scores.log_softmax(1)[torch.arange(len(labels)), labels].sum() / len(labels)


def _mean_of_all(scores, labels):
    return F.cross_entropy(scores, labels, reduction="none").mean()


def _summed(scores, labels):
    return F.cross_entropy(scores, labels, reduction="sum") / len(labels)


def _one_hot(scores, labels):
    return F.cross_entropy(scores, F.one_hot(labels, 10).float())


def _smoothed(scores, labels):
    return F.cross_entropy(scores, labels, label_smoothing=0.1)


@fault("plain", "wrong initial loss")
def begins_high():
    """weights of the last layer with std 3"""
    return _criterion_training(nn.CrossEntropyLoss())


@fault("label smoothing", "wrong initial loss")
def begins_high_smoothed():
    """the same with label smoothing"""
    return _criterion_training(_smoothed)


@fault("reduction", "wrong initial loss")
def begins_high_unreduced():
    """the same with `reduction="none"` and a mean of it"""
    return _criterion_training(_mean_of_all)


@fault("reduction", "wrong initial loss")
def begins_high_summed():
    """the same with `reduction="sum"`, divided by the size of the batch"""
    return _criterion_training(_summed)


@fault("one-hot targets", "wrong initial loss")
def begins_high_one_hot():
    """the same with targets that are one-hot"""
    return _criterion_training(_one_hot)


@fault("own loss", "wrong initial loss")
def begins_high_own_loss():
    """the same with a cross entropy that is written out"""
    return _criterion_training(_own_mean)


@fault("multi-task", "wrong initial loss")
def begins_high_with_penalty():
    """the same with an auxiliary term"""
    x, y, *held = digits()
    model = _wild(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels) + 1e-3 * model[0].weight.abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    test(model, *held)
    return model


@fault("plain", "wrong initial loss")
def begins_high_after_validation():
    """the same, after 60 batches of validation before the optimizer is made"""
    x, y, *held = digits()
    model = _wild(mlp())
    with torch.no_grad():
        print("before", sum(F.cross_entropy(model(a), b).item() for a, b in loader(x, y, 24)))
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1e-3), 12)
    test(model, *held)
    return model


@healthy("label smoothing")
def label_smoothing():
    """cross entropy with label smoothing 0.1"""
    return _criterion_training(_smoothed, mlp())


@healthy("reduction")
def unreduced():
    """`reduction="none"` and a mean of it"""
    return _criterion_training(_mean_of_all, mlp())


@healthy("reduction")
def summed():
    """`reduction="sum"`, not divided, with a smaller learning rate"""
    x, y, *held = digits()
    model = mlp()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), 12, criterion)
    test(model, *held)
    return model


@healthy("one-hot targets")
def mixup():
    """mixup: targets that are mixtures of two one-hot vectors"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            share, other = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(images))
            target = F.one_hot(labels, 10).float()
            mixed = share * images + (1 - share) * images[other]
            loss = F.cross_entropy(model(mixed), share * target + (1 - share) * target[other])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("own loss")
def focal_loss():
    """a focal loss that is written out, with weights for the classes"""

    def focal(scores, labels):
        logp = scores.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
        return (-((1 - logp.exp()) ** 2) * logp).mean()

    return _criterion_training(focal, CNN())


@healthy("multi-task")
def two_tasks():
    """a shared body, and two heads: which digit, and how much ink"""
    x, y, *_ = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

        def forward(self, x):
            hidden = self.body(x)
            return self.digit(hidden), self.ink(hidden)

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            scores, ink = net(images)
            loss = F.cross_entropy(scores, labels) + 0.5 * F.mse_loss(ink, images.mean(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@healthy("multi-task")
def segmentation():
    """a score for each pixel: how dark it is, from a blurred picture"""
    x, *_ = digits()
    shades = (x.view(-1, 8, 8) * 3.99).long()
    blurred = F.avg_pool2d(x.view(-1, 1, 8, 8), 3, 1, 1)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))
    fit(net, loader(blurred, shades), torch.optim.Adam(net.parameters(), lr=3e-3), 15)
    return net
