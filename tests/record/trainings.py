"""Small trainings, as people write them. Each function gives a model and what trains it: `model, train = f()`.

First the healthy ones, then for each rule one that has its fault and one, near it, that has not.
"""

import copy
import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Training = tuple[nn.Module, Callable[[], None]]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def batches(steps: int, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Digits in another order each epoch."""
    x, y = digits()
    per_epoch = len(x) // size
    order = torch.empty(0)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(x))
        start = step % per_epoch * size
        chosen = order[start : start + size]
        yield x[chosen], y[chosen]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, size: int = 32) -> None:
    """The usual loop."""
    for x, y in batches(steps, size):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Healthy.


def healthy_cnn(steps: int = 230) -> Training:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, lambda: fit(model, optimizer, steps)


class Block(nn.Module):
    """Of a ResNet, as torchvision has it: one ReLU for both."""

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or inside != out:
            self.downsample = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = Block(width, width)
        self.layer2 = Block(width, 2 * width, 2)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.stem(x.view(-1, 1, 8, 8))))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def healthy_resnet(steps: int = 230) -> Training:
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def train() -> None:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        test, labels = digits()
        for step, (x, y) in enumerate(batches(steps, 16)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 50 == 49:
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(test[:100]), labels[:100])
                model.train()

    return model, train


TEXT = """Shall I compare thee to a summer's day? Thou art more lovely and more temperate: rough winds do shake the
darling buds of May, and summer's lease hath all too short a date; sometime too hot the eye of heaven shines, and often
is his gold complexion dimm'd; and every fair from fair sometime declines, by chance or nature's changing course
untrimm'd; but thy eternal summer shall not fade, nor lose possession of that fair thou ow'st; nor shall death brag
thou wander'st in his shade, when in eternal lines to time thou grow'st: so long as men can breathe or eyes can see, so
long lives this, and this gives life to thee."""


@functools.cache
def tokens() -> tuple[Tensor, int]:
    letters = sorted(set(TEXT))
    return torch.tensor([letters.index(one) for one in TEXT]), len(letters)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.scores = Scores()
        self.softmax = nn.Softmax(-1)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = self.softmax(self.scores(q, k)) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Scores(nn.Module):
    """A module of its own, so that what it gives, which has the -Inf of the mask, is seen."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, context: int = 16, std: float = 0.02) -> None:
        super().__init__()
        letters = tokens()[1]
        self.tok = nn.Embedding(letters, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Layer(width, 4) for _ in range(layers)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
        self.head.weight = self.tok.weight  # tied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def text_batches(steps: int, size: int = 8, context: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    ids, _ = tokens()
    for _ in range(steps):
        starts = torch.randint(len(ids) - context - 1, (size, 1)) + torch.arange(context + 1)
        yield ids[starts][:, :-1], ids[starts][:, 1:]


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, warm: int, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """From 0 at the first step."""

    def factor(step: int) -> float:
        return step / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def healthy_gpt(steps: int = 230, layers: int = 2) -> Training:
    model = GPT(layers=layers)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3)

    def train() -> None:
        schedule = warm_up_and_cosine(optimizer, 30, steps)
        for ids, following in text_batches(steps):
            loss = F.cross_entropy(model(ids).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    return model, train


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Non-finite values.


class Standardise(nn.Module):
    """Without an eps: a blank image is 0 / 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def nan_in_forward() -> Training:
    model = nn.Sequential(OrderedDict(first=nn.Linear(64, 32), norm=Standardise(), last=nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i, (x, y) in enumerate(batches(20)):
            if i == 12:  # a sample on which the first layer gives one value everywhere
                with torch.no_grad():
                    model.first.weight.zero_()
                    model.first.bias.zero_()
            step(optimizer, F.cross_entropy(model(x), y))

    return model, train


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 10, -1).pow(2).sum(2).sqrt()  # the derivative of the root is infinite at 0


def nan_in_backward() -> Training:
    """Some samples are zero in a whole group."""
    layers = OrderedDict(first=nn.Linear(64, 40), relu=nn.ReLU(), length=Length(), last=nn.Linear(10, 10))
    model = nn.Sequential(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda: fit(model, optimizer, 6)


def nan_in_loss_gradient() -> Training:
    """A distance of exactly 0 between what the model gives and the target."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for i in range(10):
            given = model(torch.randn(8, 4))
            target = given.detach().clone() if i == 6 else torch.randn(8, 2)
            step(optimizer, (given - target).pow(2).sum(1).sqrt().mean())

    return model, train


def nan_in_data() -> Training:
    model = mlp(64, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i, (x, y) in enumerate(batches(12)):
            if i == 7:
                x[3, 5] = torch.nan
            step(optimizer, F.cross_entropy(model(x), y))

    return model, train


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def log_of_zero() -> Training:
    """Probabilities underflow to 0 in one batch; their log is -Inf, and what comes after it NaN."""
    layers = OrderedDict(fc=nn.Linear(64, 10), softmax=nn.Softmax(1), log=Log())
    model = nn.Sequential(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i, (x, y) in enumerate(batches(12)):
            step(optimizer, F.nll_loss(model(x * 3000 if i == 8 else x), y))

    return model, train


def masked_attention(steps: int = 40) -> Training:
    return healthy_gpt(steps, layers=1)


def amp(steps: int = 30, scale: float = 2.0**28, broken: bool = False, fused: bool = False) -> Training:
    """autocast in float16 with a GradScaler that starts far too high: the first steps are left out."""
    model = mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def train() -> None:
        for x, y in batches(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits * (torch.inf if broken else 1), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, train


def nan_late() -> Training:
    model = mlp(64, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i, (x, y) in enumerate(batches(28)):
            step(optimizer, F.cross_entropy(model(x), y) * (torch.nan if i >= 25 else 1))

    return model, train


# The loss.


def entropy_by_hand() -> Training:
    """p log p is 0 log 0 as soon as the model is sure."""
    model = mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train() -> None:
        for i, (x, y) in enumerate(batches(20)):
            p = model(x * 5000 if i == 15 else x).softmax(1)
            entropy = -(p * p.log()).sum(1).mean()
            step(optimizer, F.nll_loss((p + 1e-9).log(), y) - 0.01 * entropy)

    return model, train


def bad_batch(at: int = 90, steps: int = 110) -> Training:
    """One file of the data set is stored in another range."""
    model = mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for i, (x, y) in enumerate(batches(steps)):
            if i == at:
                x = x * 1000
            step(optimizer, F.cross_entropy(model(x), y))

    return model, train


def small_loss(steps: int = 300) -> Training:
    """All is learnt, and small batches: the loss is near zero, but for the few digits that are hard."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return model, lambda: fit(model, optimizer, steps, size=16)


def shuffled_labels(steps: int = 220) -> Training:
    model = mlp(64, 16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train() -> None:
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(model(x), y[torch.randperm(len(y))]))

    return model, train


def uphill(steps: int = 220) -> Training:
    """`maximize` was meant for another loss."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, maximize=True)

    def train() -> None:
        for _ in range(steps):
            x = torch.randn(32, 4)
            step(optimizer, F.mse_loss(model(x), x.sum(1, keepdim=True)))

    return model, train


def resumed(steps: int = 220) -> Training:
    """A model that knows the digits already, trained on."""
    model = mlp(64, 64, 10)
    fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), 120)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return model, lambda: fit(model, optimizer, steps)


def long_warm_up(steps: int = 220) -> Training:
    """A thousand steps of warm-up, of which these are the first."""
    model = mlp(64, 16, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        schedule = warm_up_and_cosine(optimizer, 20_000, 100_000)
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(model(x), y))
            schedule.step()

    return model, train


def noisy_regression(steps: int = 220) -> Training:
    """Hardly anything to learn: the noise is a hundred times the signal."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(steps):
            x = torch.randn(64, 4)
            step(optimizer, F.mse_loss(model(x), 0.1 * x.sum(1, keepdim=True) + 10 * torch.randn(64, 1)))

    return model, train


def confident_start() -> Training:
    """The head shares its weights with an embedding of std 1."""
    model = GPT(std=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for ids, following in text_batches(3):
            step(optimizer, F.cross_entropy(model(ids).flatten(0, 1), following.flatten()))

    return model, train


def raw_pixels() -> Training:
    model = mlp(64, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train() -> None:
        for x, y in batches(3):
            step(optimizer, F.cross_entropy(model(x * 255), y))

    return model, train


def weighted_classes() -> Training:
    """Class weights leave the first loss at ln C."""
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def train() -> None:
        for x, y in batches(3):
            step(optimizer, F.cross_entropy(model(x), y, weight=torch.arange(1.0, 11.0)))

    return model, train


# Units.


def dead_relu() -> Training:
    """One step with a far too large learning rate drives the biases of the second layer down."""
    model = mlp(64, 32, 32, 32, 10)
    with torch.no_grad():
        model[2].bias -= 20
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return model, lambda: fit(model, optimizer, 24)


def sparse_relu(steps: int = 60) -> Training:
    """A wide layer of which few units fire at a time, with batches of eight."""
    model = mlp(64, 256, 10)
    with torch.no_grad():
        model[0].bias -= 0.2
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, lambda: fit(model, optimizer, steps, size=8)


def saturated_tanh() -> Training:
    model = mlp(64, 32, 32, 10, act=nn.Tanh)
    with torch.no_grad():
        model[2].weight *= 40
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, lambda: fit(model, optimizer, 20)


def sure_classifier(steps: int = 60) -> Training:
    """A binary classifier that ends in a sigmoid, and is sure; inside a tanh that is not."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for x, y in batches(steps):
            step(optimizer, F.binary_cross_entropy(model(x)[:, 0], (y == 0).float()))

    return model, train


class Pair(nn.Module):
    """Two models in one, for `watch`."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


def gan(steps: int = 60) -> Training:
    generator = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    model = Pair(generator, discriminator)
    first = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def train() -> None:
        for x, _ in batches(steps):
            fake = generator(torch.randn(len(x), 16))
            right, wrong = discriminator(2 * x - 1), discriminator(fake.detach())
            step(first, F.softplus(-right).mean() + F.softplus(wrong).mean())
            step(second, F.softplus(-discriminator(fake)).mean())

    return model, train


# BatchNorm.


def train_forgotten(at: int = 12, steps: int = 20) -> Training:
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        x, y = digits()
        for i, (images, labels) in enumerate(batches(steps)):
            step(optimizer, F.cross_entropy(model(images), labels))
            if i == at:
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(x[:64]), y[:64])

    return model, train


def frozen_norms(steps: int = 20, weights_too: bool = True) -> Training:
    """Fine-tuning: the BatchNorms keep their averages and their weights, and validation forgets its no_grad."""
    model = ResNet()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.requires_grad_(not weights_too)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def train() -> None:
        x, y = digits()
        for i, (images, labels) in enumerate(batches(steps)):
            model.train()
            for norm in norms:
                norm.eval()
            step(optimizer, F.cross_entropy(model(images), labels))
            if i % 8 == 7:
                model.eval()
                F.cross_entropy(model(x[:64]), y[:64])

    return model, train


def validated(steps: int = 20) -> Training:
    """Validation between steps, in eval mode and with gradients on."""
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        x, y = digits()
        for i, (images, labels) in enumerate(batches(steps)):
            model.train()
            step(optimizer, F.cross_entropy(model(images), labels))
            if i % 4 == 3:
                model.eval()
                F.cross_entropy(model(x[:64]), y[:64])

    return model, train


def own_teacher(steps: int = 20) -> Training:
    """A model is trained, and then teaches another one."""
    teacher, student = (nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)) for _ in range(2))

    def train() -> None:
        optimizer = torch.optim.SGD(teacher.parameters(), lr=0.01)
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(teacher(x), y))
        teacher.eval()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
        for x, _ in batches(steps):
            step(optimizer, F.cross_entropy(student(x), teacher(x).detach().softmax(1)))

    return nn.ModuleList([teacher, student]), train


def own_critic(steps: int = 20) -> Training:
    """A part of a model is trained, and then frozen; another part learns from the gradient that comes through it."""
    critic, student = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)), nn.Linear(64, 64)

    def train() -> None:
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(critic(x), y))
        critic.eval().requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(critic(student(x)), y))

    return nn.ModuleList([critic, student]), train


# Batches.


def first_batch_only(steps: int = 12) -> Training:
    model = mlp(64, 16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*digits()), batch_size=32)

    def train() -> None:
        for _ in range(steps):
            x, y = next(iter(loader))
            step(optimizer, F.cross_entropy(model(x), y))

    return model, train


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(layers=1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.gpt(ids) + mask


def same_mask(steps: int = 12) -> Training:
    """One of the two inputs is always the same."""
    model = WithMask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for ids, following in text_batches(steps):
            step(optimizer, F.cross_entropy(model(ids, torch.zeros(1)).flatten(0, 1), following.flatten()))

    return model, train


def one_hot(steps: int = 12) -> Training:
    """The statistics of one-hot vectors are all the same."""
    letters = tokens()[1]
    model = nn.Linear(letters, letters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for ids, following in text_batches(steps):
            x = F.one_hot(ids.flatten(), letters).float()
            step(optimizer, F.cross_entropy(model(x), following.flatten()))

    return model, train


# Gradients.


def gradient_spike(at: int = 40, steps: int = 50) -> Training:
    model = mlp(64, 32, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for i, (x, y) in enumerate(batches(steps)):
            step(optimizer, F.cross_entropy(model(x * (100 if i == at else 1)), y))

    return model, train


def deep_sigmoids(steps: int = 12) -> Training:
    model = mlp(64, 32, 32, 32, 32, 32, 32, 32, 10, act=nn.Sigmoid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda: fit(model, optimizer, steps)


def sigmoid_in_the_middle(steps: int = 12) -> Training:
    """A ReLU network with one sigmoid, far out in its flat part: nothing comes back through that."""
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[2].bias += 15
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda: fit(model, optimizer, steps)


class LoRA(nn.Module):
    """A frozen layer and what is added to it, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def lora(steps: int = 60) -> Training:
    """With a warm-up that starts at 0: A has no gradient at all in the first steps, and hardly one for a while."""
    base = mlp(64, 32, 32, 32, 10)
    model = nn.Sequential(*[LoRA(one) if isinstance(one, nn.Linear) else one for one in base])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def train() -> None:
        schedule = warm_up_and_cosine(optimizer, 20, 200)
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(model(x), y))
            schedule.step()

    return model, train


class Residual(nn.Module):
    """A branch that starts at zero, as ReZero has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.branch(x)


def rezero(steps: int = 40, held: int = 3) -> Training:
    """The learning rate is 0 for the first steps, so for these the branches get no gradient at all."""
    model = nn.Sequential(nn.Linear(64, 32), *[Residual(32) for _ in range(6)], nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def train() -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: float(i >= held))
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(model(x), y))
            schedule.step()

    return model, train


class Sine(nn.Module):
    """Of a SIREN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


def exploding_with_depth(steps: int = 10) -> Training:
    """A SIREN whose weights were not divided by its 30: each layer multiplies the gradient by about that."""
    model = mlp(64, 32, 32, 32, 32, 10, act=Sine)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    return model, lambda: fit(model, optimizer, steps)


def diverging(steps: int = 40, lr: float = 0.8) -> Training:
    """A learning rate that is a bit too high for a squared error: each step overshoots more."""
    model = nn.Sequential(OrderedDict(fc=nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)

    def train() -> None:
        for _ in range(steps):
            step(optimizer, F.mse_loss(model(x), y))

    return model, train


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(64, 32, 32, 32)
        self.head = nn.Linear(32, 10)
        self.spare = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.head(x), self.spare(x)


def idle_head(steps: int = 30, in_loss: bool = True) -> Training:
    """The usual trick for DDP: the spare head is in the loss, times 0; or it is not there at all."""
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train() -> None:
        for x, y in batches(steps):
            given, spare = model(x)
            step(optimizer, F.cross_entropy(given, y) + (0 * spare.sum() if in_loss else 0))

    return model, train


def wasserstein(steps: int = 40) -> Training:
    """The last bias of the critic cancels: it is added to what is subtracted."""
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def train() -> None:
        for x, _ in batches(steps):
            step(optimizer, critic(torch.rand_like(x)).mean() - critic(x).mean())

    return critic, train


class Round(nn.Module):
    """A quantiser without a straight-through estimator."""

    def forward(self, x: Tensor) -> Tensor:
        return x.round()


def rounded(steps: int = 16) -> Training:
    layers = OrderedDict(a=nn.Linear(64, 32), relu=nn.ReLU(), b=nn.Linear(32, 32), round=Round(), c=nn.Linear(32, 10))
    model = nn.Sequential(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, lambda: fit(model, optimizer, steps)


class Experts(nn.Module):
    """Each sample goes to one of the experts, and most words of the embedding never come."""

    def __init__(self, many: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 64)
        self.gate = nn.Linear(64, many)
        self.experts = nn.ModuleList([nn.Linear(64, 10) for _ in range(many)])

    def forward(self, x: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.words(word)
        scores = self.gate(x)
        p = (scores + 0.5 * torch.randn_like(scores)).softmax(1)
        chosen = F.one_hot(p.argmax(1), len(self.experts))
        given = torch.stack([expert(x) for expert in self.experts], 1)
        balance = len(self.experts) * (chosen.float().mean(0) * p.mean(0)).sum()  # as in a Switch Transformer
        return ((chosen * p).unsqueeze(2) * given).sum(1), balance


def experts(steps: int = 60) -> Training:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train() -> None:
        for x, y in batches(steps, 32):
            given, balance = model(x, torch.randint(3, (len(x),)))
            step(optimizer, F.cross_entropy(given, y) + 0.1 * balance)

    return model, train


# What is trained.


def head_forgotten(steps: int = 16) -> Training:
    model = nn.Sequential(OrderedDict(body=mlp(64, 32, 32), act=nn.ReLU(), head=nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.body.parameters(), lr=1e-3)
    return model, lambda: fit(model, optimizer, steps)


class Turns(nn.Module):
    """Two heads in turn, and a third one that comes late."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(64, 32), nn.ModuleList([nn.Linear(32, 10) for _ in range(3)])
        self.late, self.calls = late, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.heads[2 if self.calls > self.late else self.calls % 2](self.body(x).relu())


def in_turn(steps: int = 40, late: int = 17) -> Training:
    model = Turns(late)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, lambda: fit(model, optimizer, steps)


class Student(nn.Module):
    """With a frozen teacher and an average of itself inside, and tied weights."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.body = mlp(64, 32, 32)
        self.head = nn.Linear(32, 10)
        self.teacher = mlp(64, 32, 10).requires_grad_(False)
        self.ema = copy.deepcopy(self.body).requires_grad_(not frozen)
        self.again = nn.Linear(32, 10)
        self.again.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        return self.head(x) + self.again(x)


def distilled(steps: int = 20, frozen: bool = True) -> Training:
    """Body and head in two optimizers, four micro-batches to a step, a warm-up from 0."""
    model = Student(frozen)
    heads = [p for name, p in model.named_parameters() if name.startswith(("head", "again"))]
    first = torch.optim.AdamW(model.body.parameters(), lr=1e-3)
    second = torch.optim.SGD(heads, lr=1e-2)

    def train() -> None:
        schedules = [warm_up_and_cosine(one, 5, steps) for one in (first, second)]
        for x, y in batches(steps, 64):
            for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
                with torch.no_grad():
                    soft = model.teacher(part).softmax(1)
                given = model(part)
                loss = F.cross_entropy(given, labels) + F.kl_div(given.log_softmax(1), soft, reduction="batchmean")
                (loss / 4).backward()
            for one in (first, second):
                one.step()
                one.zero_grad()
            for schedule in schedules:
                schedule.step()
            with torch.no_grad():
                for slow, fast in zip(model.ema.parameters(), model.body.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)

    return model, train


def unfrozen_later(at: int = 20, steps: int = 40, forgotten: bool = True) -> Training:
    """The first layer is frozen for a while, and then the optimizer does not get it."""
    model = mlp(64, 32, 10)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05)

    def train() -> None:
        for k, (x, y) in enumerate(batches(steps)):
            if k == at:
                model[0].requires_grad_(True)
            if k == at + 3 and not forgotten:
                optimizer.add_param_group({"params": model[0].parameters()})
            step(optimizer, F.cross_entropy(model(x), y))

    return model, train


def rate_zero(steps: int = 16) -> Training:
    model = mlp(64, 32, 10)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    return model, lambda: fit(model, optimizer, steps)


def too_fast(steps: int = 40) -> Training:
    model = mlp(64, 32, 10, act=nn.LeakyReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    return model, lambda: fit(model, optimizer, steps)


def too_slow(steps: int = 40) -> Training:
    model = mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-8)
    return model, lambda: fit(model, optimizer, steps)


def swallowed(steps: int = 40) -> Training:
    """bfloat16 weights: an update of a thousandth is rounded away."""
    model = mlp(64, 32, 10).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def train() -> None:
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(model(x.bfloat16()).float(), y))

    return model, train


def converged(steps: int = 60) -> Training:
    """Full batches, and a loss that falls to nothing: so do the updates."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)

    def train() -> None:
        for _ in range(steps):
            step(optimizer, F.mse_loss(model(x), y))

    return model, train


# Precision and depth.


def wild_start(gain: float = 5.0, steps: int = 3) -> Training:
    """Each layer multiplies the std by five."""
    model = mlp(64, 64, 64, 64, 64, 64, 64, 10)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain * math.sqrt(2 / 64))
            nn.init.zeros_(module.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return model, lambda: fit(model, optimizer, steps)


def raw_input_before_norm(steps: int = 3) -> Training:
    """Pixels up to 255 go into a network with BatchNorm, which ends in a LoRA that starts at zero."""
    layers: list[nn.Module] = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    model = nn.Sequential(*layers, LoRA(nn.Linear(32, 10)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train() -> None:
        for x, y in batches(steps):
            step(optimizer, F.cross_entropy(model(x * 255), y))

    return model, train


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def near_overflow(steps: int = 8) -> Training:
    layers = OrderedDict(
        a=nn.Linear(64, 32), norm=nn.LayerNorm(32), large=Large(), back=Scale(1e-5), b=nn.Linear(32, 10)
    )
    model = nn.Sequential(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def train() -> None:
        for x, y in batches(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            step(optimizer, loss)

    return model, train


class Large(nn.Module):
    """Attention logits that have grown over a long training."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / x.abs().amax() * 64000).half()


def underflow(steps: int = 8, scaled: bool = False) -> Training:
    """float16 and a mean over many values: the gradients are below what the format holds, unless a scale lifts them."""
    model = mlp(64, 256, 256, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=scaled)

    def train() -> None:
        for x, y in batches(steps, 256):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, train


class HalfMask(nn.Module):
    """As transformers fills it: with the lowest number that there is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().masked_fill(x > 0.5, torch.finfo(torch.float16).min)


def lowest_mask(steps: int = 8) -> Training:
    layers = OrderedDict(a=nn.Linear(64, 32), mask=HalfMask(), softmax=nn.Softmax(1), b=nn.Linear(32, 10))
    model = nn.Sequential(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def train() -> None:
        for x, y in batches(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, train
