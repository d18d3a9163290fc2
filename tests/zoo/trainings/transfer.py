"""Parts that are frozen, copied, tied or trained in turns; learning to learn."""

import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, digits, fit, loader, mlp, test


def _pretrained() -> CNN:
    """Trained on the first five digits."""
    x, y, *_ = digits()
    model = CNN(5)
    few = y < 5
    fit(model, loader(x[few], y[few]), torch.optim.Adam(model.parameters(), lr=3e-3), 6)
    return model


@healthy("frozen backbone")
def frozen_backbone():
    """a frozen backbone in eval mode, and a new head in the optimizer"""
    x, y, *held = digits()
    model = _pretrained()
    for p in model.parameters():
        p.requires_grad = False
    model.fc2 = nn.Linear(32, 10)
    optimizer = torch.optim.Adam(model.fc2.parameters(), lr=1e-2)
    for _ in range(10):
        model.eval()
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("fine-tuning")
def fine_tuning():
    """all is trained further, the backbone with a smaller learning rate"""
    x, y, *held = digits()
    model = _pretrained()
    model.fc2 = nn.Linear(32, 10)
    backbone = [p for name, p in model.named_parameters() if not name.startswith("fc2")]
    groups = [{"params": backbone, "lr": 3e-4}, {"params": model.fc2.parameters(), "lr": 3e-3}]
    fit(model, loader(x, y), torch.optim.AdamW(groups), 10)
    test(model, *held)
    return model


@healthy("frozen BatchNorm")
def frozen_batch_norm():
    """fine-tuning with BatchNorm in eval mode and its weights frozen"""
    x, y, *held = digits()
    model = _pretrained()
    model.fc2 = nn.Linear(32, 10)
    for norm in (model.bn1, model.bn2):
        norm.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(10):
        model.train()
        for norm in (model.bn1, model.bn2):
            norm.eval()
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    test(model, *held)
    return model


@healthy("fine-tuning")
def gradual_unfreezing():
    """the head first, then the last layers, then all of it"""
    x, y, *held = digits()
    model = _pretrained()
    model.fc2 = nn.Linear(32, 10)
    for epoch in range(12):
        free = ("fc2",) if epoch < 4 else ("fc2", "fc1") if epoch < 8 else ("",)
        for name, p in model.named_parameters():
            p.requires_grad = name.startswith(free)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        fit(model, loader(x, y), optimizer, 1)
    test(model, *held)
    return model


@fault("fine-tuning", "parameter never trained")
def new_head_not_in_the_optimizer():
    """the head is exchanged after the optimizer was made"""
    x, y, *held = digits()
    model = _pretrained()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model.fc2 = nn.Linear(32, 10)
    fit(model, loader(x, y), optimizer, 10)
    test(model, *held)
    return model


@fault("fine-tuning", "gradient spike", "learning rate too high")
def fine_tuning_rate_too_high():
    """a pretrained model is fine-tuned with learning rate 1 and Adam, and forgets everything"""
    x, y, *held = digits()
    model = _pretrained()
    model.fc2 = nn.Linear(32, 10)
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1.0), 10)
    test(model, *held)
    return model


class _Low(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


@healthy("fine-tuning")
def low_rank_adapters():
    """LoRA: low-rank changes of frozen layers, that begin at zero"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, (y + 1) % 10), torch.optim.Adam(model.parameters(), lr=1e-3), 8)
    for i in (0, 2, 4):
        model[i] = _Low(model[i])
    adapters = [p for p in model.parameters() if p.requires_grad]
    fit(model, loader(x, y), torch.optim.AdamW(adapters, lr=1e-2), 12)
    test(model, *held)
    return model


@healthy("self-supervised")
def byol():
    """a target network that is an average of the trained one, without gradients"""
    x, *_ = digits()
    online = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    predictor = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-3)
    for _ in range(12):
        for (images,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 64, shuffle=True):
            one, other = images + 0.2 * torch.randn_like(images), images + 0.2 * torch.randn_like(images)
            with torch.no_grad():
                goal = target(other)
            loss = 2 - 2 * F.cosine_similarity(predictor(online(one)), goal).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
    print("loss", loss.item())
    return [online, predictor, target]


@healthy("layer-wise")
def layer_by_layer():
    """each layer is trained with a head of its own, while those before it stand still"""
    x, y, *_ = digits()
    layers = [nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)]
    heads = [nn.Linear(64, 10) for _ in layers]
    for depth in range(3):
        optimizer = torch.optim.Adam([*layers[depth].parameters(), *heads[depth].parameters()], lr=2e-3)
        for _ in range(5):
            for images, labels in loader(x, y):
                hidden = images
                with torch.no_grad():
                    for layer in layers[:depth]:
                        hidden = layer(hidden).relu()
                loss = F.cross_entropy(heads[depth](layers[depth](hidden).relu()), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print("layer", depth, "loss", loss.item())
    return [*layers, *heads]


@healthy("layer-wise")
def layers_of_one_model_in_turn():
    """one model, its blocks are trained one after the other, with one optimizer for each"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
            self.heads = nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 10)])

        def forward(self, x, depth):
            for block in self.blocks[:depth]:
                x = block(x).relu().detach()
            return self.heads[depth](self.blocks[depth](x).relu())

    x, y, *_ = digits()
    net = Net()
    for depth in range(2):
        optimizer = torch.optim.Adam([*net.blocks[depth].parameters(), *net.heads[depth].parameters()], lr=2e-3)
        for _ in range(6):
            for images, labels in loader(x, y):
                loss = F.cross_entropy(net(images, depth), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print("block", depth, "loss", loss.item())
    return net


@healthy("tied weights")
def tied_autoencoder():
    """the decoder has the transposed weights of the encoder"""
    x, *_ = digits()

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 64) * 0.1)
            self.hidden, self.out = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(64))

        def forward(self, x):
            return F.linear(F.linear(x, self.weight, self.hidden).relu(), self.weight.T, self.out)

    net = Tied()
    fit(net, loader(x, x), torch.optim.Adam(net.parameters(), lr=3e-3), 12, F.mse_loss)
    return net


@fault("tied weights", "updated twice")
def tied_and_stepped_twice():
    """encoder and decoder share a weight, and have an optimizer each"""
    x, *_ = digits()
    encoder, decoder = nn.Linear(64, 64), nn.Linear(64, 64)
    decoder.weight = encoder.weight
    opt_encoder = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    opt_decoder = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    for _ in range(12):
        for images, _ in loader(x, x):
            loss = F.mse_loss(decoder(encoder(images).relu()), images)
            opt_encoder.zero_grad()
            opt_decoder.zero_grad()
            loss.backward()
            opt_encoder.step()
            opt_decoder.step()
    print("loss", loss.item())
    return [encoder, decoder]


# learning to learn


def _sines(tasks: int = 8) -> list:
    found = []
    for _ in range(tasks):
        height, phase = torch.rand(()) * 2 + 0.5, torch.rand(()) * 3.1
        x = torch.rand(20, 1) * 10 - 5
        found.append((x, height * torch.sin(x + phase)))
    return found


@healthy("meta-learning")
def maml():
    """MAML with second derivatives: an inner step by autograd.grad, an outer one by Adam"""
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(150):
        meta_optimizer.zero_grad()
        meta_loss = 0.0
        for x, y in _sines(4):
            params = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, params, (x[:10],)), y[:10])
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {name: p - 0.01 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            meta_loss = meta_loss + F.mse_loss(functional_call(model, fast, (x[10:],)), y[10:]) / 4
        meta_loss.backward()
        meta_optimizer.step()
        if step % 50 == 49:
            print(step, meta_loss.item())
    return model


@healthy("meta-learning")
def reptile():
    """Reptile: a copy is trained on a task, and the model moves a little towards it"""
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    for _ in range(200):
        for x, y in _sines(1):
            learner = copy.deepcopy(model)
            optimizer = torch.optim.SGD(learner.parameters(), lr=0.02)
            for _ in range(8):
                loss = F.mse_loss(learner(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(model.parameters(), learner.parameters(), strict=True):
                    slow += 0.2 * (fast - slow)
    print("loss", loss.item())
    return model


@fault("meta-learning", "nothing is trained")
def maml_never_steps():
    """MAML whose outer step is forgotten"""
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        for x, y in _sines(4):
            params = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, params, (x[:10],)), y[:10])
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {name: p - 0.01 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            (F.mse_loss(functional_call(model, fast, (x[10:],)), y[10:]) / 4).backward()
    print("loss", inner.item())
    return model


@healthy("mixture of experts")
def mixture_of_experts():
    """a gate that picks one of four experts for each sample"""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.experts = nn.ModuleList(mlp(width=32) for _ in range(4))

        def forward(self, x):
            best, which = self.gate(x).softmax(1).max(1)
            out = x.new_zeros(len(x), 10)
            for k, expert in enumerate(self.experts):
                chosen = which == k
                if chosen.any():
                    out[chosen] = expert(x[chosen]) * best[chosen, None]
            return out

    x, y, *held = digits()
    model = Mixture()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=2e-3), 12)
    test(model, *held)
    return model
