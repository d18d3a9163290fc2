"""What is fed: labels, order, scale, leaks, and single bad samples."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, curve, digits, fit, loader, mlp, test


@fault("plain", "no better than chance")
def labels_shuffled():
    """the labels are shuffled, the pictures are not, and each epoch again"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        fit(model, loader(x, y[torch.randperm(len(y))]), optimizer, epochs=1)
    test(model, *held)
    return model


@fault("plain", "no better than chance")
def labels_random():
    """random labels in a stream of samples"""
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, _, *held = digits()
    for _ in range(400):
        images = x[torch.randint(len(x), (64,))]
        labels = torch.randint(10, (64,))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("plain", "no better than chance")
def features_and_labels_out_of_step():
    """two loaders that shuffle by themselves: one for the features, one for the labels"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images_loader = DataLoader(TensorDataset(x), 64, shuffle=True)
    labels_loader = DataLoader(TensorDataset(y), 64, shuffle=True)
    for _ in range(20):
        for (images,), (labels,) in zip(images_loader, labels_loader, strict=True):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("binary", "no better than chance")
def two_classes_at_random():
    """two classes that have nothing to do with the features"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(500):
        features = torch.randn(64, 20, generator=generator)
        labels = torch.randint(2, (64,), generator=generator)
        loss = nn.CrossEntropyLoss()(net(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return net


@healthy("plain")
def noisy_labels():
    """a third of the labels is wrong, and the rest is learnt"""
    x, y, *held = digits()
    wrong = torch.rand(len(y)) < 0.33
    labels = torch.where(wrong, torch.randint(10, y.shape), y)
    model = CNN()
    fit(model, loader(x, labels), torch.optim.Adam(model.parameters(), lr=1e-3), 15)
    test(model, *held)
    return model


@healthy("plain")
def many_classes():
    """a hundred classes, few samples of each in a batch"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    centres = torch.randn(100, 32, generator=generator)
    y = torch.randint(100, (4000,), generator=generator)
    x = centres[y] + 0.7 * torch.randn(4000, 32, generator=generator)
    model = mlp(32, 100)
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=2e-3), 8)
    return model


@healthy("imbalanced")
def imbalanced_classes():
    """nineteen in twenty are of one class, with weights in the loss"""
    x, y, *_ = digits()
    rare = (y == 3) & (torch.rand(len(y)) < 0.5)
    common = (y != 3).nonzero().squeeze(1)
    which = torch.cat([common, rare.nonzero().squeeze(1)])
    labels = rare[which].long()
    model = mlp(n_out=2)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0]))
    fit(model, loader(x[which], labels), torch.optim.Adam(model.parameters(), lr=1e-3), 15, criterion)
    return model


# order


@fault("plain", "batches of one class")
def sorted_by_class():
    """the data is sorted by class, and not shuffled"""
    x, y, *held = digits()
    order = y.argsort()
    model = mlp()
    batches = loader(x[order], y[order], 32, shuffle=False)
    fit(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), 12)
    test(model, *held)
    return model


@fault("plain", "batches of one class")
def one_class_after_another():
    """a generator that gives all samples of a class, then those of the next"""

    def batches():
        for digit in range(10):
            yield from loader(x[y == digit], y[y == digit], 16)

    x, y, *held = digits()
    net = CNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(8):
        for images, labels in batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
    test(net, *held)
    return net


@healthy("plain")
def not_shuffled():
    """data in a random order, and no shuffling"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y, 64, shuffle=False), torch.optim.Adam(model.parameters(), lr=1e-3), 15)
    test(model, *held)
    return model


@healthy("balanced")
def weighted_sampler():
    """a WeightedRandomSampler"""
    x, y, *held = digits()
    weights = (1 / torch.bincount(y).float())[y]
    sampler = torch.utils.data.WeightedRandomSampler(weights, len(y))
    batches = DataLoader(TensorDataset(x, y), 64, sampler=sampler)
    model = mlp()
    fit(model, batches, torch.optim.Adam(model.parameters(), lr=1e-3), 12)
    test(model, *held)
    return model


@fault("plain", "identical batches")
def always_the_first_batch():
    """`next(iter(loader))` in the loop, of a loader that does not shuffle"""
    x, y, *held = digits()
    model = mlp()
    batches = loader(x, y, 64, shuffle=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(300):
        images, labels = next(iter(batches))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("plain")
def full_batch():
    """gradient descent on the whole set"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(300):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


# single samples


@fault("plain", "bad batch")
def a_nan_in_the_data():
    """one value of one picture is NaN"""
    x, y, *held = digits()
    x = x.clone()
    x[777, 12] = float("nan")
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1e-3), 8)
    test(model, *held)
    return model


@fault("regression", "bad batch")
def an_infinite_target():
    """one target is infinite"""
    x, y = curve()
    y[400] = float("inf")
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    fit(net, loader(x, y), torch.optim.SGD(net.parameters(), lr=0.05), 25, nn.MSELoss())
    return net


@fault("regression", "bad batch", "loss spike")
def an_absurd_target():
    """one target is a million times too large, and comes once, late"""
    x, y = curve(12_800)
    y[9_000] *= 1e6
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for features, targets in loader(x, y, 64, shuffle=False):
        loss = F.mse_loss(net(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return net


@fault("plain", "bad batch", "loss spike")
def a_corrupted_picture():
    """one picture in a thousand has values a hundred thousand times too large"""
    x, y, *held = digits()
    x = x.clone()
    x[1390] *= 1e5
    model = mlp()
    batches = loader(x, y, 16, shuffle=False)
    fit(model, batches, torch.optim.SGD(model.parameters(), lr=0.05), 3)
    test(model, *held)
    return model


# scale


@fault("tabular", "inputs not normalised")
def a_column_in_the_hundred_thousands():
    """a table with a column of incomes beside columns near one"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    x = torch.randn(2000, 8, generator=generator)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    x[:, 3] = 50_000 + 20_000 * x[:, 3]
    model = mlp(8, 2)
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=1e-3), 12)
    return model


@fault("plain", "inputs not normalised")
def pictures_from_0_to_255():
    """bytes as they are, with SGD"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader((x * 255).round(), y), torch.optim.SGD(model.parameters(), lr=0.05), 12)
    test(model, held[0] * 255, held[1])
    return model


@fault("regression", "inputs not normalised")
def unscaled_regression():
    """features in thousands into a tanh network"""
    x, y = curve()
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    fit(net, loader(x * 3000 + 8000, y), torch.optim.Adam(net.parameters(), lr=1e-3), 30, F.mse_loss)
    return net


@healthy("tabular")
def standardised_table():
    """a table with its columns standardised"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    x = torch.randn(2000, 8, generator=generator) * torch.logspace(-2, 5, 8)
    y = (x[:, 0] / 1e-2 + x[:, 7] / 1e5 > 0).long()
    x = (x - x.mean(0)) / x.std(0)
    model = mlp(8, 2)
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1e-3), 12)
    return model


@healthy("tabular")
def embeddings_of_categories():
    """columns of categories as embeddings, beside numbers"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    shop, day = (torch.randint(many, (3000,), generator=generator) for many in (500, 7))
    price = torch.randn(3000, 2, generator=generator)
    y = ((shop % 3 + day + price[:, 0] * 2) > 4).long()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shop, self.day = nn.Embedding(500, 8), nn.Embedding(7, 4)
            self.body = mlp(14, 2)

        def forward(self, shop, day, price):
            return self.body(torch.cat([self.shop(shop), self.day(day), price], 1))

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(10):
        for a, b, c, labels in DataLoader(TensorDataset(shop, day, price, y), 64, shuffle=True):
            loss = F.cross_entropy(net(a, b, c), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@healthy("plain")
def bytes_and_batch_norm():
    """bytes from 0 to 255, divided by 255 in the loop, a BatchNorm behind each layer"""
    x, y, *held = digits()
    pictures = (x * 255).byte()
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(10):
        for images, labels in loader(pictures, y):
            loss = F.cross_entropy(net(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(net, *held)
    return net


# leaks


@fault("tabular", "targets in the inputs")
def label_among_the_features():
    """the label is still a column of the table"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    x = torch.randn(3000, 8, generator=generator)
    y = torch.randint(3, (3000,), generator=generator)
    table = torch.cat([x, y[:, None].float() * 2 - 2], 1)
    model = mlp(9, 3)
    fit(model, loader(table, y), torch.optim.Adam(model.parameters(), lr=3e-3), 10)
    return model


@fault("plain", "targets in the inputs")
def one_hot_label_in_the_picture():
    """the label is written into the picture, one-hot"""
    x, y, *held = digits()
    marked = x.clone()
    marked[:, :10] = F.one_hot(y, 10).float()
    model = mlp()
    fit(model, loader(marked, y), torch.optim.Adam(model.parameters(), lr=1e-3), 12)
    test(model, *held)
    return model


@fault("regression", "targets in the inputs")
def target_among_the_features():
    """a regression with its target as one of the features"""
    x, y = curve(1024)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    fit(net, loader(torch.cat([x, y], 1), y), torch.optim.Adam(net.parameters(), lr=1e-2), 20, F.mse_loss)
    return net


@healthy("tabular")
def easily_told_apart():
    """classes that are easily told apart: the loss is soon near zero"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    y = torch.randint(3, (3000,), generator=generator)
    x = torch.randn(3, 10, generator=generator)[y] * 3 + 0.5 * torch.randn(3000, 10, generator=generator)
    model = mlp(10, 3)
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=3e-3), 8)
    return model


@healthy("autoencoder")
def autoencoder():
    """an autoencoder: its inputs are its targets"""
    x, *_ = digits()
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam(itertools.chain(encoder.parameters(), decoder.parameters()), lr=2e-3)
    for _ in range(20):
        for (images,) in DataLoader(TensorDataset(x), 64, shuffle=True):
            loss = F.mse_loss(decoder(encoder(images)), images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [encoder, decoder]
