"""Gradients that are cut off, and those that only seem to be; dropout and BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, digits, fit, learn_digits, loader, mlp, test


class Two(nn.Module):
    """An encoder and a classifier; how the one gives to the other is what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x):
        return self.classifier(self.encoder(x))


@fault("plain", "cut off from the loss")
def detached_features():
    """`.detach()` between a small encoder and a large classifier"""

    class Net(Two):
        def forward(self, x):
            return self.classifier(self.encoder(x).detach())

    return learn_digits(Net())


@fault("plain", "cut off from the loss")
def features_through_numpy():
    """features that go through NumPy in the middle of the model"""

    class Net(Two):
        def forward(self, x):
            features = self.encoder(x).detach().numpy().clip(0, 6)
            return self.classifier(torch.from_numpy(features))

    return learn_digits(Net())


@fault("plain", "cut off from the loss")
def encoder_under_no_grad():
    """the encoder is called under no_grad while it is to be trained"""
    x, y, *_ = digits()
    encoder, head = CNN(32), nn.Linear(32, 10)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            with torch.no_grad():
                features = encoder(images)
            loss = F.cross_entropy(head(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [encoder, head]


@fault("recurrent", "cut off from the loss")
def embedding_in_data():
    """`.data` of an embedding goes into the recurrent layer"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(4)
    words = torch.randint(50, (2000, 6), generator=generator)
    labels = (words[:, 0] + words[:, 3]) % 5
    embed, rnn, head = nn.Embedding(50, 16), nn.GRU(16, 64, batch_first=True), nn.Linear(64, 5)
    optimizer = torch.optim.Adam([*embed.parameters(), *rnn.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(8):
        for batch, target in loader(words, labels):
            out, _ = rnn(embed(batch).data)
            loss = F.cross_entropy(head(out[:, -1]), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [embed, rnn, head]


@fault("plain", "nothing is trained")
def frozen_everything():
    """all weights are frozen, and `loss.requires_grad_()` silences the error"""
    x, y, *held = digits()
    model = mlp()
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels).requires_grad_()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("recurrent")
def truncated_backpropagation():
    """an LSTM whose state is detached from one window to the next"""
    wave = torch.sin(torch.arange(0, 4000) * 0.1).view(8, -1, 1)
    rnn, head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=5e-3)
    for _ in range(6):
        state = None
        for start in range(0, 480, 20):
            out, state = rnn(wave[:, start : start + 20], state)
            loss = F.mse_loss(head(out), wave[:, start + 1 : start + 21])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = tuple(one.detach() for one in state)
    print("loss", loss.item())
    return [rnn, head]


@healthy("recurrent")
def gru_reads_rows():
    """a GRU that reads a digit row by row, with clipping"""
    x, y, *held = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(8, 48, batch_first=True), nn.Linear(48, 10)

        def forward(self, x):
            return self.out(self.rnn(x.view(-1, 8, 8))[0][:, -1])

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    test(net, *held)
    return net


@healthy("checkpointing")
def gradient_checkpointing():
    """blocks that are computed again in the backward pass"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.start = nn.Linear(64, 48)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48))
                for _ in range(4)
            )
            self.out = nn.Linear(48, 10)

        def forward(self, x):
            x = self.start(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    return learn_digits(Net(), 8)


@healthy("plain")
def straight_through():
    """a step function whose gradient passes straight through, by `detach()`"""

    class Net(Two):
        def forward(self, x):
            soft = self.encoder(x)
            hard = (soft > 0.3).float()
            return self.classifier(soft + (hard - soft).detach())

    return learn_digits(Net())


@fault("plain", "dropout near 1")
def dropout_for_keep_probability():
    """`nn.Dropout(0.98)`, meant as what is to be kept"""
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.98), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.98)]
    return learn_digits(nn.Sequential(*layers, nn.Linear(64, 10)), 15)


@fault("plain", "dropout near 1")
def functional_dropout_near_one():
    """`F.dropout(x, 0.97)` in a CNN"""

    class Net(CNN):
        def forward(self, x):
            x = F.max_pool2d(F.relu(self.bn1(self.conv1(x.view(-1, 1, 8, 8)))), 2)
            x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2).flatten(1)
            x = F.dropout(x, 0.97, self.training)
            return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.97, self.training))

    return learn_digits(Net(), 12)


@healthy("plain")
def dropout_of_a_half():
    """`nn.Dropout(0.5)` behind each layer"""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5)]
    return learn_digits(nn.Sequential(*layers, nn.Linear(128, 10)), 15)


@fault("plain", "batch too small for BatchNorm")
def batch_norm_with_pairs():
    """BatchNorm1d and batches of two"""
    x, y, *held = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    fit(net, loader(x, y, 2), torch.optim.SGD(net.parameters(), lr=0.05), 2)
    test(net, *held)
    return net


@fault("plain", "batch too small for BatchNorm")
def batch_norm_with_single_pictures():
    """BatchNorm2d and batches of one"""
    x, y, *held = digits()
    net = CNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for i in torch.randperm(len(x))[:800]:
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test(net, *held)
    return net


@healthy("plain")
def group_norm_with_single_pictures():
    """GroupNorm and batches of one, which it is made for"""
    x, y, *held = digits()
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    fit(net, loader(x[:600], y[:600], 1), torch.optim.SGD(net.parameters(), lr=0.005), 2)
    test(net, *held)
    return net


@healthy("plain")
def last_batch_of_two():
    """BatchNorm, and a last batch of an epoch that has two samples only"""
    x, y, *held = digits()
    net = CNN()
    fit(net, loader(x[:1346], y[:1346], 64), torch.optim.Adam(net.parameters(), lr=2e-3), 12)
    test(net, *held)
    return net


@fault("plain", "BatchNorm mode")
def eval_after_the_first_validation():
    """`model.eval()` for validation, and never `model.train()` again"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(12):
        total = 0.0
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total)
        test(model, *held)
    return model


@healthy("plain")
def validation_each_epoch():
    """`model.eval()` for validation, and `model.train()` after it"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(12):
        model.train()
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        test(model, *held)
    return model
