"""Mixed precision, trainings without an optimizer of torch, and averages of weights."""

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, curve, digits, forever, loader, mlp, test


@healthy("AMP")
def amp_with_scaler():
    """float16 autocast with a GradScaler and clipping"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(12):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
    print("loss", loss.item(), "scale", scaler.get_scale())
    test(model, *held)
    return model


@healthy("AMP")
def bfloat16_autocast():
    """bfloat16 autocast, no scaler"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("AMP", "non-finite values")
def float16_overflows():
    """features too large for float16: the GradScaler leaves out every step"""
    x, y, *_ = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(10):
        for images, labels in loader(x * 1e6, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    print("loss", loss.item(), "scale", scaler.get_scale())
    return model


@fault("AMP", "low-precision headroom")
def float16_without_scaler():
    """float16 and gradients too small for it: no GradScaler"""
    x, y, *_ = digits()
    model = mlp().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        for images, labels in loader(x.half(), y, 256):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / 1e5
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return model


@healthy("manual SGD")
def manual_sgd():
    """`p -= lr * p.grad` under no_grad, as in the tutorial"""
    x, y, *held = digits()
    model = mlp()
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("manual SGD")
def manual_sgd_with_data():
    """`p.data.add_(p.grad, alpha=-lr)`, the old way"""
    x, y, *held = digits()
    model = CNN()
    for _ in range(10):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            for p in model.parameters():
                p.data.add_(p.grad.data, alpha=-0.05)
                p.grad.zero_()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("manual SGD", "learning rate too high")
def manual_sgd_rate_too_high():
    """a manual step with learning rate 30"""
    x, y, *held = digits()
    model = mlp()
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 30 * p.grad
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("manual SGD", "exploding gradients")
def manual_sgd_uphill():
    """`p += lr * p.grad`"""
    x, y, *held = digits()
    model = mlp()
    for _ in range(12):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p += 0.05 * p.grad
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("autograd.grad")
def autograd_grad():
    """`torch.autograd.grad` and a step by hand"""
    x, y, *held = digits()
    model = mlp()
    weights = list(model.parameters())
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            with torch.no_grad():
                for p, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                    p.sub_(g, alpha=0.1)
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("torch.func")
def functional_training():
    """torch.func.grad over a dict of parameters"""
    x, y, *held = digits()
    model = mlp()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(params, images, labels):
        return F.cross_entropy(functional_call(model, params, (images,)), labels)

    for _ in range(15):
        for images, labels in loader(x, y):
            grads = grad(loss_of)(params, images, labels)
            params = {name: p - 0.1 * grads[name] for name, p in params.items()}
    print("loss", loss_of(params, *held).item())
    return params


@healthy("LBFGS")
def lbfgs():
    """LBFGS with a closure, on the whole table"""
    x, y = curve(200)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(15):
        loss = optimizer.step(closure)
    print("loss", loss.item())
    return net


@healthy("regression")
def plain_tensors():
    """a linear regression with tensors of its own and no module"""
    x, y = curve()
    w, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=0.05)
    for inputs, targets in [batch for _ in range(20) for batch in loader(x, y)]:
        loss = F.mse_loss(inputs @ w + b, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return [w, b]


@healthy("averaging")
def ema_and_validation():
    """an exponential moving average, validated after each epoch"""
    x, y, *held = digits()
    model = CNN()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(10):
        model.train()
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
        torch.optim.swa_utils.update_bn([images for images, _ in loader(x, y, 256)], average)
        test(average, *held)
    return [model, average]


@healthy("averaging")
def swa():
    """stochastic weight averaging over the last epochs, with SWALR"""
    x, y, *held = digits()
    model = mlp()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    for epoch in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if epoch >= 8:
            mean.update_parameters(model)
            scheduler.step()
    test(mean, *held)
    return [model, mean]


@healthy("plain")
def by_iterations():
    """an endless loader, counted in iterations, with validation in between"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    batches = forever(loader(x, y))
    for step in range(400):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            test(model, *held)
            model.train()
    return model
