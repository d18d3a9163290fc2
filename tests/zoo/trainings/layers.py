"""What is in the model: initial weights, activations, dropout, BatchNorm, cuts, and depth."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, curve, digits, fit, loader, mlp, test

CUT = ("cut off from the loss", "parameter never trained")


def _train(model, epochs=12, lr=1e-3, criterion=F.cross_entropy):
    x, y, *held = digits()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=lr), epochs, criterion)
    test(model, *held)
    return model


class Two(nn.Module):
    """An encoder and a classifier; how the one gives to the other is what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x):
        return self.classifier(self.encoder(x))


# cuts


@fault("plain", *CUT)
def detached_features():
    """`.detach()` between a small encoder and a large classifier"""

    class Net(Two):
        def forward(self, x):
            return self.classifier(self.encoder(x).detach())

    return _train(Net())


@fault("plain", *CUT)
def features_through_numpy():
    """features that go through NumPy in the middle of the model"""

    class Net(Two):
        def forward(self, x):
            features = self.encoder(x).detach().numpy().clip(0, 6)
            return self.classifier(torch.from_numpy(features))

    return _train(Net())


@fault("plain", *CUT)
def encoder_under_no_grad():
    """the encoder is called under no_grad while it is to be trained"""
    x, y, *held = digits()
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


@fault("recurrent", *CUT)
def embedding_in_data():
    """`.data` of an embedding goes into the recurrent layer"""
    generator = torch.Generator().manual_seed(4)
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


@fault("plain", "nothing is trained", "parameter never trained", "loss not falling", "cut off from the loss")
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

    return _train(Net(), 8)


@healthy("plain")
def straight_through():
    """a step function whose gradient passes straight through, by `detach()`"""

    class Net(Two):
        def forward(self, x):
            soft = self.encoder(x)
            hard = (soft > 0.3).float()
            return self.classifier(soft + (hard - soft).detach())

    return _train(Net())


# dropout and BatchNorm


@fault("plain", "dropout near 1")
def dropout_for_keep_probability():
    """`nn.Dropout(0.98)`, meant as what is to be kept"""
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.98), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.98)]
    return _train(nn.Sequential(*layers, nn.Linear(64, 10)), 15)


@fault("plain", "dropout near 1")
def functional_dropout_near_one():
    """`F.dropout(x, 0.97)` in a CNN"""

    class Net(CNN):
        def forward(self, x):
            x = F.max_pool2d(F.relu(self.bn1(self.conv1(x.view(-1, 1, 8, 8)))), 2)
            x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2).flatten(1)
            x = F.dropout(x, 0.97, self.training)
            return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.97, self.training))

    return _train(Net(), 12)


@healthy("plain")
def dropout_of_a_half():
    """`nn.Dropout(0.5)` behind each layer"""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5)]
    return _train(nn.Sequential(*layers, nn.Linear(128, 10)), 15)


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


# activations and initial weights


@fault("plain", "dead ReLU")
def dead_from_the_start():
    """biases of -9 before a ReLU"""
    model = mlp()
    nn.init.constant_(model[0].bias, -9)
    return _train(model)


@fault("plain", "dead ReLU", "all-zero gradients")
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
    return _train(model)


@healthy("plain")
def zero_initialised_head():
    """only the last layer begins at zero"""
    model = mlp()
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    return _train(model, 15)


@fault("plain", "saturated sigmoid or tanh")
def saturated_by_large_weights():
    """tanh layers with weights of std 3"""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=3.0)
    return _train(model, 12, lr=1e-4)


@fault("plain", "saturated sigmoid or tanh", "inputs not normalised")
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
    return _train(nn.Sequential(*layers, nn.Linear(32, 10)), 12)


@fault("deep", "vanishing gradients")
def deep_sigmoids():
    """ten sigmoid layers"""
    layers = [nn.Linear(64, 32), nn.Sigmoid()]
    for _ in range(9):
        layers += [nn.Linear(32, 32), nn.Sigmoid()]
    return _train(nn.Sequential(*layers, nn.Linear(32, 10)), 15)


@fault("deep", "activation variance drifts with depth", "vanishing gradients")
def small_initial_weights():
    """eight layers with weights of std 0.01"""
    layers = [nn.Linear(64, 64), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in net[::2]:
        nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(layer.bias)
    return _train(net, 12)


@fault("deep", "exploding gradients", "activation variance drifts with depth", "wrong initial loss")
def large_initial_weights():
    """eight layers with weights of std 1"""
    layers = [nn.Linear(64, 64), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(64, 10))
    for layer in net[::2]:
        nn.init.normal_(layer.weight, std=1.0)
    return _train(net, 12)


@fault("recurrent", "exploding gradients", "gradient spike", "loss spike", "early blow-up", "loss is NaN")
def recurrent_explosion():
    """a linear recurrence of 60 steps with too large weights, and no clipping"""
    x = torch.randn(512, 60, 4, generator=torch.Generator().manual_seed(6))
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

    return _train(nn.Sequential(nn.Linear(64, 32), *(Block() for _ in range(8)), nn.Linear(32, 10)), 8)


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
    return _train(net, 10, lr=5e-4)


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
    return _train(net, 6, lr=3e-3)


@fault("own layer", "non-finite values", "loss is NaN")
def division_by_zero():
    """a layer divides by the norm of its input, which is zero for an empty picture"""
    x, y, *held = digits()
    x = x.clone()
    x[123] = 0

    class Net(Two):
        def forward(self, x):
            return super().forward(x / x.norm(dim=1, keepdim=True))

    net = Net()
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
