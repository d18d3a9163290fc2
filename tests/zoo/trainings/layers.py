"""Initial weights, activations, and depth."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import curve, digits, fit, learn_digits, loader, mlp, test


@fault("plain", "dead ReLU")
def dead_from_the_start():
    """biases of -9 before a ReLU"""
    model = mlp()
    nn.init.constant_(model[0].bias, -9)
    return learn_digits(model)


@fault("plain", "dead ReLU")
def dead_after_a_large_step():
    """a step that is much too large kills the units of a layer"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    for i in range(15):
        fit(model, loader(x, y), optimizer, epochs=1)
        if i == 0:
            optimizer.param_groups[0]["lr"] = 0.05
    test(model, *held)
    return model


@fault("plain", "all-zero gradients")
def all_weights_zero():
    """all weights begin at zero: nothing comes through"""
    model = mlp()
    for p in model.parameters():
        nn.init.zeros_(p)
    return learn_digits(model)


@healthy("plain")
def zero_initialised_head():
    """only the last layer begins at zero"""
    model = mlp()
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    return learn_digits(model, 15)


@fault("plain", "saturated sigmoid or tanh")
def saturated_by_large_weights():
    """tanh layers with weights of std 3"""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=3.0)
    return learn_digits(model, 12, lr=1e-4)


@fault("plain", "inputs not normalised")
def saturated_by_large_inputs():
    """sigmoids, and bytes from 0 to 255"""
    x, y, *held = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10))
    nn.init.normal_(net[0].weight, std=0.3)
    fit(net, loader(x * 255, y), torch.optim.SGD(net.parameters(), lr=0.01), 12)
    test(net, held[0] * 255, held[1])
    return net


@healthy("plain")
def tanh_layers():
    """three tanh layers as PyTorch initialises them"""
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh()]
    return learn_digits(nn.Sequential(*layers, nn.Linear(32, 10)), 12)


@fault("deep", "vanishing gradients")
def deep_sigmoids():
    """ten sigmoid layers"""
    layers = [nn.Linear(64, 32), nn.Sigmoid()]
    for _ in range(9):
        layers += [nn.Linear(32, 32), nn.Sigmoid()]
    return learn_digits(nn.Sequential(*layers, nn.Linear(32, 10)), 15)


@fault("deep", "activation variance drifts with depth")
def small_initial_weights():
    """eight layers with weights of std 0.01"""
    layers = [nn.Linear(64, 64), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in net[::2]:
        nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(layer.bias)
    return learn_digits(net, 12)


@fault("deep", "activation variance drifts with depth")
def large_initial_weights():
    """eight layers with weights of std 1"""
    layers = [nn.Linear(64, 64), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in net[::2]:
        nn.init.normal_(layer.weight, std=1.0)
    return learn_digits(net, 12)


@fault("recurrent", "exploding gradients", "non-finite values")
def recurrent_explosion():
    """a linear recurrence of 60 steps with too large weights, and no clipping"""
    x = torch.randn(512, 60, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(6))
    y = x[:, :, 0].sum(1, keepdim=True)
    rnn, head = nn.RNN(4, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 1)
    nn.init.normal_(rnn.weight_hh_l0, std=0.45)
    optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(8):
        for batch, target in loader(x, y, 64):
            loss = F.mse_loss(head(rnn(batch)[0][:, -1]), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [rnn, head]


@healthy("deep")
def residual_network():
    """eight residual blocks with LayerNorm"""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    return learn_digits(nn.Sequential(nn.Linear(64, 32), *(Block() for _ in range(8)), nn.Linear(32, 10)), 8)


@healthy("deep")
def deep_kaiming():
    """ten ReLU layers, kaiming_normal_"""
    layers = [nn.Linear(64, 64), nn.ReLU()]
    for _ in range(9):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in net[:-1:2]:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return learn_digits(net, 10, lr=5e-4)


@healthy("deep")
def small_resnet():
    """a ResNet with BatchNorm, a label for each picture"""

    class Block(nn.Module):
        def __init__(self, n_in, n_out, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
            self.short = nn.Conv2d(n_in, n_out, 1, stride, bias=False)

        def forward(self, x):
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(out + self.short(x))

    stem = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, 1, 1)]
    blocks = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return learn_digits(net, 6, lr=3e-3)


@fault("own layer", "non-finite values")
def division_by_zero():
    """a layer divides by the norm of its input, which is zero for an empty picture"""
    x, y, *_ = digits()
    x = x.clone()
    x[123] = 0

    class Unit(nn.Module):
        def forward(self, x):
            return x / x.norm(dim=1, keepdim=True)

    net = nn.Sequential(Unit(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    fit(net, loader(x, y), torch.optim.Adam(net.parameters(), lr=1e-3), 5)
    return net


@healthy("regression")
def convolutions_in_time():
    """dilated convolutions predict the next value of a series"""
    x, _ = curve(16)
    series = torch.cat([torch.sin(torch.arange(300) * (0.1 + 0.01 * k)).view(1, 1, -1) for k in range(len(x))])
    layers = [nn.Conv1d(1, 16, 3, dilation=1), nn.ReLU(), nn.Conv1d(16, 16, 3, dilation=2), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Conv1d(16, 1, 3, dilation=4))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(200):
        start = int(torch.randint(0, 240, ()))
        piece = series[torch.randperm(16)[:8], :, start : start + 51]
        loss = F.mse_loss(net(piece[:, :, :-1]), piece[:, :, 15:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return net
