"""Learning rates, schedules and clipping."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, curve, digits, fit, loader, mlp, test


@healthy("plain")
def mlp_adam():
    """Adam with its default learning rate"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters()))
    test(model, *held)
    return model


@healthy("plain")
def mlp_sgd_momentum():
    """SGD with momentum"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    test(model, *held)
    return model


@healthy("plain")
def cnn_adamw_cosine():
    """AdamW, weight decay and a cosine schedule down to zero"""
    x, y, *held = digits()
    batches = loader(x, y)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12 * len(batches))
    for _ in range(12):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
    print("last loss", loss.item())
    test(model, *held)
    return model


@healthy("plain")
def mlp_adadelta():
    """Adadelta with its learning rate of 1"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adadelta(model.parameters()), epochs=20)
    test(model, *held)
    return model


@healthy("plain")
def mlp_rmsprop():
    """RMSprop at 1e-3"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.RMSprop(model.parameters(), lr=1e-3))
    test(model, *held)
    return model


@fault("plain", "learning rate too high")
def adam_rate_too_high():
    """learning rate 1 with Adam"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1.0))
    test(model, *held)
    return model


@fault("plain", "learning rate too high")
def adamw_rate_too_high():
    """learning rate 1 with AdamW, a CNN"""
    x, y, *held = digits()
    network = CNN()
    fit(network, loader(x, y), torch.optim.AdamW(network.parameters(), lr=1.0))
    test(network, *held)
    return network


@fault("plain", "learning rate too high")
def adadelta_rate_too_high():
    """learning rate 1000 with Adadelta"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adadelta(model.parameters(), lr=1000.0))
    test(model, *held)
    return model


@fault("plain", "learning rate too high")
def sgd_rate_too_high():
    """learning rate 50 with SGD"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=50.0))
    test(model, *held)
    return model


@fault("regression", "learning rate too high")
def regression_diverges():
    """a mean squared error that explodes to NaN within twenty steps"""
    x, y = curve()
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0)
    for _ in range(100):
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return net


@healthy("regression")
def regression_whole_set():
    """a mean squared error over mini-batches of a small table"""
    x, y = curve()
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(50):
        for inputs, targets in loader(x, y, 64):
            optimizer.zero_grad()
            loss = ((net(inputs) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@fault("regression", "early blow-up")
def regression_jumps_about():
    """learning rate 0.3 with Adam: the loss blows up at once and comes back slowly"""
    x, y = curve()
    net = mlp(4, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.3)
    fit(net, loader(x, y), optimizer, epochs=40, criterion=F.mse_loss)
    return net


@fault("schedules", "learning rate too high", "loss spike")
def rate_jumps():
    """a schedule with a wrong unit: after 200 steps the learning rate is a thousand times larger"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < 200 else 1000)
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("plain", "update-to-weight ratio")
def sgd_rate_too_low():
    """learning rate 1e-7"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=1e-7))
    test(model, *held)
    return model


@fault("bfloat16", "update-to-weight ratio")
def bfloat16_weights_stand_still():
    """weights in bfloat16, and updates too small to change them"""
    x, y, *held = digits()
    model = mlp().bfloat16()
    fit(model, loader(x.bfloat16(), y), torch.optim.SGD(model.parameters(), lr=3e-5), epochs=15)
    test(model, held[0].bfloat16(), held[1])
    return model


@fault("schedules", "learning rate gone")
def decayed_each_batch():
    """ExponentialLR(0.9), meant for epochs, steps with every batch"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(20):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
    print("loss", loss.item(), scheduler.get_last_lr())
    test(model, *held)
    return model


@healthy("schedules")
def decayed_each_epoch():
    """ExponentialLR(0.9) once an epoch"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
    print("loss", loss.item(), scheduler.get_last_lr())
    test(model, *held)
    return model


@fault("schedules", "learning rate gone")
def schedule_counted_in_epochs():
    """a linear decay to zero over 20 "epochs", stepped with every batch"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=20)
    for _ in range(20):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
    print("loss", loss.item(), scheduler.get_last_lr())
    test(model, *held)
    return model


@fault("schedules", "learning rate gone")
def plateau_too_eager():
    """ReduceLROnPlateau with patience 0, on the noisy loss of each batch"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, eps=0)
    for _ in range(20):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())
    print("loss", loss.item(), scheduler.get_last_lr())
    test(model, *held)
    return model


@healthy("schedules")
def one_cycle():
    """OneCycleLR, which ends at a 250,000th of its peak"""
    x, y, *held = digits()
    batches = loader(x, y)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=15 * len(batches))
    for _ in range(15):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("schedules")
def warm_restarts():
    """warm-up, then cosine with restarts"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=40)
    waves = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, waves], [40])
    for _ in range(20):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("clipping", "clipped always")
def clipped_far_too_much():
    """`clip_grad_norm_(…, 1e-3)`, a thousandth of the usual norm, with SGD"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("clipping", "clipped always")
def clipped_by_value():
    """`clip_grad_value_(…, 1e-5)`: only the signs are left"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(12):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-5)
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("clipping")
def clipped_now_and_then():
    """`clip_grad_norm_(…, 1.0)` with Adam"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model
