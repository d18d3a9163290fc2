"""Loss functions: what goes into them, and whether they can end."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, digits, fit, loader, mlp, test


@fault("plain", "softmax twice")
def softmax_layer_before_cross_entropy():
    """`nn.Softmax` at the end of the model, and CrossEntropyLoss"""
    x, y, *held = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(dim=1))
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss())
    test(model, *held)
    return model


@fault("plain", "softmax twice")
def softmax_function_before_cross_entropy():
    """`F.softmax` in the forward of a CNN, and CrossEntropyLoss"""

    class Classifier(CNN):
        def forward(self, x):
            return F.softmax(super().forward(x), dim=-1)

    x, y, *held = digits()
    net = Classifier()
    fit(net, loader(x, y), torch.optim.Adam(net.parameters(), lr=1e-3))
    test(net, *held)
    return net


@fault("plain", "softmax twice")
def softmax_in_the_loop():
    """`probs = logits.softmax(1)` in the loop, and `F.cross_entropy(probs, y)`"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            probs = model(images).softmax(1)
            loss = F.cross_entropy(probs, labels)
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("plain")
def log_softmax_and_nll():
    """`F.log_softmax` and NLLLoss, as in the MNIST example"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.dropout, self.fc2 = nn.Linear(64, 64), nn.Dropout(0.25), nn.Linear(64, 10)

        def forward(self, x):
            return F.log_softmax(self.fc2(self.dropout(F.relu(self.fc1(x)))), dim=1)

    x, y, *held = digits()
    net = Net()
    fit(net, loader(x, y), torch.optim.Adadelta(net.parameters(), lr=1.0), criterion=F.nll_loss)
    test(net, *held)
    return net


@healthy("plain")
def attention_pooling():
    """a softmax inside the model, that is none of the scores"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value, self.out = nn.Linear(8, 1), nn.Linear(8, 32), nn.Linear(32, 10)
            self.place = nn.Parameter(torch.randn(8, 8) * 0.1)

        def forward(self, x):
            rows = x.view(-1, 8, 8) + self.place
            weights = self.key(rows).softmax(1)
            mixed = torch.cat([weights * self.value(rows).relu()], 1).sum(1)
            return self.out(mixed)

    x, y, *held = digits()
    net = Net()
    fit(net, loader(x, y), torch.optim.Adam(net.parameters(), lr=1e-2))
    test(net, *held)
    return net


@healthy("distillation")
def soft_labels_from_a_teacher():
    """a teacher is trained, then its softened scores teach a student with KL divergence"""
    x, y, *held = digits()
    teacher, student = CNN(), mlp(width=32)
    fit(teacher, loader(x, y), torch.optim.Adam(teacher.parameters(), lr=2e-3), epochs=8)
    teacher.eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            with torch.no_grad():
                target = (teacher(images) / 2).softmax(1)
            scores = student(images)
            soft = F.kl_div((scores / 2).log_softmax(1), target, reduction="batchmean") * 4
            loss = 0.7 * soft + 0.3 * F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(student, *held)
    return [teacher, student]


@fault("binary", "softmax twice")
def sigmoid_before_bce_with_logits():
    """`torch.sigmoid` before BCEWithLogitsLoss"""
    x, y, *_ = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    even = (y % 2 == 0).float().unsqueeze(1)
    fit(model, loader(x, even), torch.optim.Adam(model.parameters(), lr=1e-3), 15, nn.BCEWithLogitsLoss())
    return model


@healthy("binary")
def bce_with_logits():
    """even or odd, BCEWithLogitsLoss"""
    x, y, *_ = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    even = (y % 2 == 0).float().unsqueeze(1)
    fit(model, loader(x, even), torch.optim.Adam(model.parameters(), lr=1e-3), 15, nn.BCEWithLogitsLoss())
    return model


@healthy("binary")
def sigmoid_and_bce():
    """a sigmoid and BCELoss, ten labels at once"""
    x, y, *_ = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Sigmoid())
    several = torch.stack([(y % (k + 2) == 0).float() for k in range(10)], 1)
    fit(model, loader(x, several), torch.optim.Adam(model.parameters(), lr=2e-3), 15, nn.BCELoss())
    return model


@fault("plain", "loss without a floor")
def wrong_sign():
    """`loss = -F.cross_entropy(…)`"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = -F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("plain", "exploding gradients", "loss not falling")
def maximized():
    """`maximize=True` with a loss"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1e-3, maximize=True))
    test(model, *held)
    return model


@fault("regression", "loss without a floor")
def variance_without_a_floor():
    """a penalty with the wrong sign: the error minus ten times the variance of what is predicted"""
    x, y, *_ = digits()
    net = mlp(64, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            out = net(images).squeeze(1)
            loss = F.mse_loss(out, labels.float()) - 10 * out.var()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@healthy("regression")
def gaussian_likelihood():
    """a mean and a variance, GaussianNLLLoss, which goes below zero"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    x = torch.randn(1024, 4, generator=generator)
    y = 0.2 * torch.sin(x[:, :1]) + 0.02 * torch.randn(1024, 1, generator=generator)
    body, mean, spread = nn.Sequential(nn.Linear(4, 64), nn.Tanh()), nn.Linear(64, 1), nn.Linear(64, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *mean.parameters(), *spread.parameters()], lr=2e-3)
    for _ in range(30):
        for inputs, targets in loader(x, y):
            hidden = body(inputs)
            loss = F.gaussian_nll_loss(mean(hidden), targets, F.softplus(spread(hidden)) + 1e-4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [body, mean, spread]


@fault("plain", "scores are no log-probabilities")
def raw_scores_into_nll():
    """`F.nll_loss(model(x), y)` without a log_softmax"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1e-3), criterion=F.nll_loss)
    test(model, *held)
    return model


@fault("plain", "scores are no log-probabilities")
def probabilities_into_nll():
    """a softmax instead of a log_softmax before NLLLoss"""
    x, y, *held = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(dim=1))
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.NLLLoss())
    test(model, *held)
    return model


@fault("own loss", "loss is NaN")
def log_of_zero():
    """`-torch.log(probs)` where a probability becomes exactly zero"""
    x, y, *_ = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        for images, labels in loader(x * 100, y):
            probs = model(images)
            loss = -(F.one_hot(labels, 10) * torch.log(probs)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return model


@fault("contrastive", "non-finite values")
def square_root_at_zero():
    """a distance with `sqrt`, of a pair that is the same picture twice"""
    x, y, *_ = digits()
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(10):
        for images, _ in loader(x, y):
            a, b = net(images), net(images[torch.randperm(len(images))])
            distance = ((a - b) ** 2).sum(1).sqrt()
            loss = F.relu(1 - distance).mean() + 0.1 * distance.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@healthy("contrastive")
def triplets():
    """a triplet margin loss over pictures of the same digit and of others"""
    x, y, *_ = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    groups = [x[y == digit] for digit in range(10)]
    for _ in range(300):
        which = torch.randperm(10)
        picks = [groups[digit][torch.randint(len(groups[digit]), (8,))] for digit in which]
        positive = [groups[digit][torch.randint(len(groups[digit]), (8,))] for digit in which]
        negative = [*picks[1:], picks[0]]
        loss = F.triplet_margin_loss(net(torch.cat(picks)), net(torch.cat(positive)), net(torch.cat(negative)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return net


@healthy("contrastive")
def simclr():
    """InfoNCE between two noisy views of each picture"""
    x, y, *_ = digits()
    encoder, projector = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), nn.Linear(64, 32)
    optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=1e-3)
    for _ in range(15):
        for images, _ in loader(x, y, 128):
            a = F.normalize(projector(encoder(images + 0.2 * torch.randn_like(images))), dim=1)
            b = F.normalize(projector(encoder(images + 0.2 * torch.randn_like(images))), dim=1)
            scores = a @ b.T / 0.1
            target = torch.arange(len(images))
            loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [encoder, projector]
