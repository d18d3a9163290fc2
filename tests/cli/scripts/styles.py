"""Trainings in many styles, each a function; prints the loss of each step, to the last bit."""

import copy
import gc
import io
import sys
import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
pixels = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
gc.unfreeze()  # what the process that this may be forked from has frozen: who has a module could not be found out


def batches(many, size=32):
    for _ in range(many):
        rows = torch.randint(len(pixels), (size,))
        yield pixels[rows], labels[rows]


def say(loss):
    print("loss", loss.item().hex())


def end(*models):
    for model in models:
        print("weights", *(p.double().sum().item().hex() for p in model.parameters()))


def mlp(inplace=False):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(inplace), nn.Dropout(0.2), nn.Linear(32, 10))


def cnn():
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.1)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.25), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(batches(40)):
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        say(loss)
        if step % 10 == 9:
            net.eval()
            with torch.no_grad():
                print("right", (net(pixels[:100]).argmax(1) == labels[:100]).sum().item())
    end(net)


def accumulation():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = 0
    for step, (x, y) in enumerate(batches(100, 8)):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        total += loss.detach()
        if step % 4 == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            say(total)
            total = 0
    end(model)


def gan():
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for x, _ in batches(30):
        fake = generator(torch.randn(32, 16))
        opt_c.zero_grad()
        loss_c = F.softplus(-critic(x.flatten(1))).mean() + F.softplus(critic(fake.detach())).mean()
        loss_c.backward()
        opt_c.step()
        opt_g.zero_grad()
        loss_g = F.softplus(-critic(fake)).mean()
        loss_g.backward()
        opt_g.step()
        say(loss_c + loss_g)
    end(generator, critic)


def scaler(dtype=torch.float16, unscale=False):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10)
    for x, y in batches(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        logits.retain_grad()
        before = scaling.get_scale()
        scaling.scale(loss).backward()
        if unscale:
            scaling.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaling.step(optimizer)
        scaling.update()
        say(loss)
        skipped = scaling.get_scale() < before
        sums = [p.grad.double().pow(2).sum().item().hex() for p in model.parameters()]
        print(
            "skipped" if skipped else "grads", before, (logits.grad.double() / before).pow(2).sum().item().hex(), *sums
        )
    end(model)


def folds():
    """Each with a scaler of its own; the last one has none, while the others are still there."""
    kept = []
    for fold in range(3):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = torch.amp.GradScaler("cpu", init_scale=2.0 ** (12 + fold), enabled=fold < 2)
        kept.append((model, scaling))
        for x, y in batches(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
            say(loss)
    end(*(model for model, _ in kept))


def exported():
    """With TorchScript, in both ways, while a step is sampled and while none is; what comes first is a script, too."""
    warnings.simplefilter("ignore", DeprecationWarning)
    features = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 64)))
    model = mlp(inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k, (x, y) in enumerate(batches(30)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features(x).detach()), y)
        loss.backward()
        optimizer.step()
        say(loss)
        if k in (5, 25):
            model.eval()
            for made in (torch.jit.script(model), torch.jit.trace(model, x)):
                print(made.code, made(x).sum().item().hex())
            model.train()
    end(model)


def bfloat16():
    scaler(torch.bfloat16, True)


def lbfgs():
    model = mlp()[:3]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for x, y in batches(8):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        say(optimizer.step(closure))
    end(model)


def checkpointed():
    model = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)])
    head = nn.Linear(64, 10)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for x, y in batches(30):
        h = x.flatten(1).requires_grad_()
        for i, block in enumerate(model):
            h = checkpoint(block, h, use_reentrant=i == 1)
        loss = F.cross_entropy(head(h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
    end(model, head)


def averaged():
    model = mlp(inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    other = copy.deepcopy(model)
    for step, (x, y) in enumerate(batches(30)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        if step == 5:
            other = copy.deepcopy(model)
        say(loss)
        with torch.no_grad():
            say(F.cross_entropy(ema(x), y))
            say(F.cross_entropy(other(x), y))
    end(model, ema, other)


def saved():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(30)):
        if step in (10, 22):
            file = io.BytesIO()
            torch.save({"model": model, "state": optimizer.state_dict()}, file)
            file.seek(0)
            model = torch.load(file, weights_only=False)["model"]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
    end(model)


def listed():
    layers = [nn.Linear(64, 32), nn.Linear(32, 10)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for x, y in batches(30):
        h = x.flatten(1)
        for layer in layers:
            h = layer(h).relu()
        loss = F.cross_entropy(h, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
    end(*layers)


def sliced():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(batches(30)):
        optimizer.zero_grad()
        first, rest = model[:2], model[2:]
        loss = F.cross_entropy(rest(first(x)) if step % 2 else model[2:](model[:2](x)), y)
        loss.backward()
        optimizer.step()
        say(loss)
    end(model)


class Anew(nn.Module):
    """Makes modules in its forward."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(10, 10)

    def forward(self, x):
        x = self.body[:2](x)
        return nn.LogSoftmax(1)(self.head(nn.Sequential(nn.Tanh(), *self.body[2:])(x)))


def made_anew():
    model = Anew()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches(30):
        optimizer.zero_grad()
        loss = nn.NLLLoss()(model(x), y)
        loss.backward()
        optimizer.step()
        say(loss)
    end(model)


def by_hand():
    model = mlp()
    for x, y in batches(30):
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        say(loss)
    end(model)


def inference():
    model = mlp().eval()
    with torch.no_grad():
        for x, y in batches(20):
            say(F.cross_entropy(model(x), y))
    with torch.inference_mode():
        for x, y in batches(5):
            say(F.cross_entropy(model(x), y))


def compiled(backend="eager"):
    from torch._dynamo.utils import counters

    plain = mlp()
    model = torch.compile(plain, backend=backend)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches(40):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
    print("compiled", dict(counters["stats"]), dict(counters["recompiles"]), dict(counters["graph_break"]))
    end(plain)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.act = nn.GELU()
        self.second = nn.Linear(32, 10)

    def forward(self, x):
        return self.second(self.act(self.first(x.flatten(1))))


def compiled_in_place():
    from torch._dynamo.utils import counters

    model = Net()
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(40):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
    print("compiled", dict(counters["stats"]), dict(counters["recompiles"]), dict(counters["graph_break"]))
    end(model)


def compiled_part():
    model = mlp()
    model[1] = torch.compile(model[1], backend="aot_eager")
    step = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(40)):
        loss = step(x, y) if i % 2 else F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
    end(model)


if __name__ == "__main__":
    warnings.simplefilter("always")
    globals()[sys.argv[1]]()
