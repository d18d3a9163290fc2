"""The rules about weights, gradients and batches: each on a training with its fault, and on a twin without."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.record.test_loss_rules import name, record
from tests.record.trainings import batches, mlp

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

RULES = {"learning rate too high", "gradients not zeroed", "two steps a batch", "updated twice"}
RULES |= {"dropout near 1", "clipped always", "batch too small for BatchNorm", "inputs not normalised"}
RULES |= {"cut off from the loss", "nothing is trained"}


def digits_with(way=None, model=None, optimizer=torch.optim.Adam, lr=1e-3, steps=30, size=32, change=None):
    """Digits; `way(k, optimizer, loss, model)` is a step."""
    model = model or mlp(64, 32, 10)
    optimizer = optimizer(model.parameters(), lr=lr)

    def train():
        for k, (x, y) in enumerate(batches(steps, size)):
            x = change(x) if change else x
            (way or usual)(k, optimizer, F.cross_entropy(model(x), y), model)

    return model, train


def usual(k, optimizer, loss, model):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def never_zeroed(k, optimizer, loss, model):
    loss.backward()
    optimizer.step()


def accumulated(k, optimizer, loss, model, zeroes=True):
    (loss / 3).backward()
    if k % 3 == 2:
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()


def zeroed_in_data(k, optimizer, loss, model):
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.grad.data.zero_()


def decayed(k, optimizer, loss, model):
    """A momentum by hand: what was there is added to, on purpose."""
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.grad.mul_(0.9)


def by_hand(k, optimizer, loss, model, zeroes=True):
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            if zeroes:
                p.grad.zero_()


def stepped_twice(k, optimizer, loss, model):
    usual(k, optimizer, loss, model)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()


def gradients_by_hand(k, optimizer, loss, model):
    """No backward pass is seen, and a gradient that is written into stays the same tensor."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.copy_(torch.randn_like(p))
    optimizer.step()


def encoder_and_head(shares=False, turns=False):
    """An optimizer each, which step by one loss, or each by its own."""
    body, head = mlp(64, 32), nn.Linear(32, 10)
    both = [*body.parameters(), *head.parameters()]
    optimizers = [torch.optim.Adam(body.parameters()), torch.optim.Adam(both if shares else head.parameters())]

    def train():
        for x, y in batches(30):
            for some in [[one] for one in optimizers] if turns else [optimizers]:
                body.zero_grad()
                head.zero_grad()
                F.cross_entropy(head(body(x)), y).backward()
                for one in some:
                    one.step()

    return nn.ModuleList([body, head]), train


def gan():
    """The gradients of a generator's loss are added to those of the discriminator, which nobody has set back yet."""
    models = maker, judge = mlp(8, 32, 64), mlp(64, 32, 1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in models]

    def train():
        for x, _ in batches(30):
            made = maker(torch.randn(len(x), 8))
            for optimizer, loss in ((optimizers[1], judge(made.detach()).mean() - judge(x).mean()), (optimizers[0], 0)):
                optimizer.zero_grad()
                (loss if optimizer is optimizers[1] else -judge(made).mean()).backward()
                optimizer.step()

    return nn.ModuleList(models), train


def zeros():
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    return model


def clipped(k, optimizer, loss, model, clip=nn.utils.clip_grad_norm_, limit=1.0):
    optimizer.zero_grad()
    loss.backward()
    clip((p for p in model.parameters()), limit)
    optimizer.step()


class Dropping(nn.Module):
    """Dropout as a function."""

    def __init__(self, p):
        super().__init__()
        self.p, self.a, self.b = p, nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x):
        return self.b(F.dropout(self.a(x).relu(), self.p, self.training))


def dropping(p):
    return lambda: digits_with(model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(p), nn.Linear(128, 10)))


def with_norm(size, kind=nn.BatchNorm1d, steps=20):
    model = nn.Sequential(nn.Linear(64, 32), kind(32), nn.ReLU(), nn.Linear(32, 10))
    return digits_with(model=model, size=size, steps=steps)


def bytes_of(x):
    return x * 255


def one_column(x):
    return x * torch.where(torch.arange(64) == 20, 1000.0, 1.0)


class Two(nn.Module):
    """An encoder and a classifier; `between` is what is done to what the one gives to the other."""

    def __init__(self, between=lambda features: features):
        super().__init__()
        self.encoder, self.classifier, self.spare = nn.Linear(64, 16), mlp(16, 128, 10), nn.Linear(16, 2)
        self.between = between

    def forward(self, x):
        features = self.between(self.encoder(x))
        self.spare(features)
        return self.classifier(features)


def cut(between):
    return lambda: digits_with(model=Two(between))


def through_numpy(features):
    return torch.from_numpy(features.detach().numpy() * 2)


def encoder_under_no_grad(fault=True):
    encoder, head = mlp(64, 16), nn.Linear(16, 10)
    both = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(both if fault else head.parameters())

    def train():
        for k, (x, y) in enumerate(batches(30)):
            with torch.no_grad():
                features = encoder(x)
            usual(k, optimizer, F.cross_entropy(head(features), y), head)

    return nn.ModuleList([encoder, head]), train


def reached_later():
    """The encoder is trained from step 20 on."""
    model = Two()

    def way(k, optimizer, loss, model):
        model.between = (lambda features: features) if k > 20 else torch.detach
        usual(k, optimizer, loss, model)

    model.between = torch.detach
    return digits_with(way, model=model, steps=40)


def on_frozen_layers():
    """What a layer that is not trained gets is not for the user to normalise."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    with torch.no_grad():
        model[0].weight.mul_(1000)
    return model


def silenced(k, optimizer, loss, model):
    model.requires_grad_(False)
    usual(k, optimizer, loss.detach().requires_grad_(), model)


def never_stepped(k, optimizer, loss, model):
    loss.backward()


# Rule, training with the fault, first and last step at which it may be found.
FAULTS = [
    ("learning rate too high", partial(digits_with, lr=1.0), 1, 20),
    ("learning rate too high", partial(digits_with, lr=0.5, optimizer=torch.optim.AdamW), 1, 20),
    ("gradients not zeroed", partial(digits_with, never_zeroed), 5, 9),
    ("gradients not zeroed", partial(digits_with, partial(accumulated, zeroes=False), steps=60), 5, 9),
    ("gradients not zeroed", partial(digits_with, partial(by_hand, zeroes=False)), 5, 9),
    ("two steps a batch", partial(digits_with, stepped_twice), 4, 8),
    ("updated twice", partial(encoder_and_head, shares=True), 2, 4),
    ("clipped always", partial(digits_with, partial(clipped, limit=1e-3)), 15, 20),
    ("clipped always", partial(digits_with, partial(clipped, clip=nn.utils.clip_grad_value_, limit=1e-6)), 15, 20),
    ("dropout near 1", dropping(0.9), 0, 0),
    ("dropout near 1", lambda: digits_with(model=Dropping(0.95)), 0, 0),
    ("batch too small for BatchNorm", partial(with_norm, 2), 5, 8),
    ("inputs not normalised", partial(digits_with, change=bytes_of), 2, 4),
    ("inputs not normalised", partial(digits_with, change=one_column), 2, 4),
    ("cut off from the loss", cut(torch.detach), 11, 11),
    ("cut off from the loss", cut(through_numpy), 11, 11),
    ("cut off from the loss", encoder_under_no_grad, 11, 11),
]
# For each, one that is near it.
HEALTHY = {
    "plain": digits_with,
    "SGD": partial(digits_with, optimizer=partial(torch.optim.SGD, momentum=0.9), lr=0.1, steps=60),
    "a high rate": partial(digits_with, lr=1e-2, steps=60),
    "accumulated": partial(digits_with, accumulated, steps=60),
    "zeroed in data": partial(digits_with, zeroed_in_data),
    "decayed": partial(digits_with, decayed),
    "by hand": partial(digits_with, by_hand),
    "gradients by hand": partial(digits_with, gradients_by_hand, lr=1e-4),
    "an optimizer each": encoder_and_head,
    "in turns": partial(encoder_and_head, turns=True),
    "shared in turns": partial(encoder_and_head, shares=True, turns=True),
    "gan": gan,
    "clipped now and then": partial(digits_with, clipped),
    "clipped by value": partial(digits_with, partial(clipped, clip=nn.utils.clip_grad_value_, limit=0.1)),
    "dropout": dropping(0.5),
    "dropout as a function": lambda: digits_with(model=Dropping(0.5)),
    "batches of four": partial(with_norm, 4),
    "another norm": partial(with_norm, 1, nn.LayerNorm),
    "bytes into a norm": partial(digits_with, change=bytes_of, model=nn.Sequential(nn.BatchNorm1d(64), mlp(64, 10))),
    "a spare head": cut(torch.relu),
    "features": partial(encoder_under_no_grad, False),
    "large features of a frozen layer": lambda: digits_with(model=on_frozen_layers()),
    "a norm behind": lambda: digits_with(
        change=bytes_of, model=nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), mlp(32, 10))
    ),
}


@pytest.mark.parametrize(("rule", "training", "first", "last"), FAULTS, ids=name)
def test_a_fault_is_found(rule, training, first, last):
    found = [one for one in record(training).findings if one.rule == rule]
    assert found
    one = found[0]
    assert one.severity == "warn" and first <= one.step <= last and one.text and one.why and one.then


@pytest.mark.parametrize("training", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_training_is_accused_of_nothing(training):
    assert not [one for one in record(training).findings if one.rule in RULES]


def test_what_is_reached_later_is_closed():
    (found,) = (one for one in record(reached_later).findings if one.rule == "cut off from the loss")
    assert (found.severity, found.step) == ("note", 11) and 21 <= found.until < 30  # as soon as a step is sampled


@pytest.mark.parametrize(("way", "step"), [(silenced, 11), (never_stepped, 0)])
def test_nothing_is_trained(way, step):
    (found,) = (one for one in record(partial(digits_with, way)).findings if one.rule == "nothing is trained")
    assert (found.severity, found.step) == ("error", step)


def test_weights_that_begin_at_zero_may_grow():
    assert not [one for one in record(lambda: digits_with(model=zeros(), lr=0.1)).findings if one.rule in RULES]


def test_a_parameter_that_one_optimizer_has_twice():
    def training():
        model = mlp(64, 32, 10)
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = torch.optim.SGD([*model.parameters(), model[0].weight], lr=0.01)

        def train():
            for k, (x, y) in enumerate(batches(10)):
                usual(k, optimizer, F.cross_entropy(model(x), y), model)

        return model, train

    (found,) = (one for one in record(training).findings if one.rule == "updated twice")
    assert str(found.place) == "model: 0.weight"
