"""How weights are stepped: learning rates, zero_grad, schedules, clipping, accumulation, mixed precision, no optimizer."""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, curve, digits, fit, forever, loader, mlp, test

TOO_HIGH = ("learning rate too high", "early blow-up", "update-to-weight ratio")


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


@fault("plain", *TOO_HIGH)
def adam_rate_too_high():
    """learning rate 1 with Adam"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=1.0))
    test(model, *held)
    return model


@fault("plain", *TOO_HIGH)
def adamw_rate_too_high():
    """learning rate 1 with AdamW, a CNN"""
    x, y, *held = digits()
    network = CNN()
    fit(network, loader(x, y), torch.optim.AdamW(network.parameters(), lr=1.0))
    test(network, *held)
    return network


@fault("plain", *TOO_HIGH)
def adadelta_rate_too_high():
    """learning rate 1000 with Adadelta"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.Adadelta(model.parameters(), lr=1000.0))
    test(model, *held)
    return model


@fault("plain", *TOO_HIGH, "dead ReLU", "loss is NaN")
def sgd_rate_too_high():
    """learning rate 50 with SGD"""
    x, y, *held = digits()
    model = mlp()
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=50.0))
    test(model, *held)
    return model


@fault("regression", *TOO_HIGH, "loss is NaN", "non-finite values")
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


@fault("regression", *TOO_HIGH)
def regression_jumps_about():
    """learning rate 0.3 with Adam: the loss blows up at once and comes back slowly"""
    x, y = curve()
    net = mlp(4, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.3)
    fit(net, loader(x, y), optimizer, epochs=40, criterion=F.mse_loss)
    return net


@fault("schedules", "loss spike", "gradient spike", "learning rate too high", "update-to-weight ratio")
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


@fault("plain", "update-to-weight ratio", "loss not falling", "no better than chance")
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


# zero_grad


@fault("plain", "gradients not zeroed")
def forgot_zero_grad():
    """`optimizer.zero_grad()` is missing"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("plain", "gradients not zeroed")
def forgot_zero_grad_with_adam():
    """`optimizer.zero_grad()` is missing, Adam and a CNN"""
    x, y, *held = digits()
    cnn = CNN()
    optimizer = torch.optim.Adam(cnn.parameters(), lr=1e-3)
    for epoch in range(10):
        total = 0.0
        for images, labels in loader(x, y):
            loss = nn.CrossEntropyLoss()(cnn(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total)
    test(cnn, *held)
    return cnn


@fault("plain", "gradients not zeroed")
def zero_grad_once_an_epoch():
    """`zero_grad()` stands in the outer loop"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(15):
        optimizer.zero_grad()
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("manual SGD", "gradients not zeroed")
def manual_sgd_without_zeroing():
    """`p -= lr * p.grad` and nothing sets the gradients back"""
    x, y, *held = digits()
    model = mlp()
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("recurrent", "gradients not zeroed")
def rnn_without_zeroing():
    """`zero_grad()` is missing, a GRU that reads rows"""
    x, y, *held = digits()
    rows, head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)
    optimizer = torch.optim.Adam([*rows.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(8):
        for images, labels in loader(x, y):
            out, _ = rows(images.view(-1, 8, 8))
            loss = F.cross_entropy(head(out[:, -1]), labels)
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [rows, head]


@healthy("plain")
def zero_grad_to_zeros():
    """`zero_grad(set_to_none=False)` after each step"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(15):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("accumulation")
def gradient_accumulation():
    """four micro-batches a step, the loss divided by four"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        for i, (images, labels) in enumerate(loader(x, y, 16), 1):
            loss = F.cross_entropy(model(images), labels) / 4
            loss.backward()
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("accumulation")
def accumulation_undivided():
    """micro-batches with reduction="sum", divided by the number of samples when it steps"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(10):
        for images, labels in loader(x, y, 64):
            optimizer.zero_grad(set_to_none=True)
            for part, right in zip(images.split(16), labels.split(16), strict=True):
                (F.cross_entropy(model(part), right, reduction="sum") / len(images)).backward()
            optimizer.step()
    test(model, *held)
    return model


@fault("accumulation", "gradients not zeroed")
def accumulation_never_zeroed():
    """gradient accumulation, and `zero_grad()` forgotten behind the step"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(15):
        for i, (images, labels) in enumerate(loader(x, y, 16)):
            (F.cross_entropy(model(images), labels) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
    test(model, *held)
    return model


# steps


@fault("plain", "two steps a batch")
def two_steps_a_batch():
    """`optimizer.step()` twice with the same gradients"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("AMP", "two steps a batch")
def scaler_and_optimizer_step():
    """`scaler.step(optimizer)`, and `optimizer.step()` again"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(15):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("plain", "parameter never trained", "nothing is trained")
def forgot_to_step():
    """`optimizer.step()` is missing"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(12):
        for images, labels in loader(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
    print("loss", loss.item())
    test(model, *held)
    return model


@fault("plain", "parameter never trained", "nothing is trained")
def optimizer_of_another_model():
    """the optimizer was made before `model = mlp()`, and steps the old one"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = mlp()
    fit(model, loader(x, y), optimizer)
    test(model, *held)
    return model


@fault("plain", "parameter never trained", "nothing is trained")
def trains_a_copy():
    """the optimizer holds a model, and a deep copy of it is trained"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = copy.deepcopy(model)
    fit(best, loader(x, y), optimizer, epochs=10)
    test(best, *held)
    return [model, best]


@fault("plain", "parameter never trained", "nothing is trained", "learning rate gone", "update-to-weight ratio")
def learning_rate_zero():
    """a warm-up that never leaves zero"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1, epoch // 1000))
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


@fault("several optimizers", "parameter never trained", "nothing is trained")
def one_of_two_steps_forgotten():
    """encoder and head have an optimizer each, and only one of them steps"""
    x, y, *held = digits()
    encoder, head = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
    opt_encoder = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    opt_head = torch.optim.Adam(head.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            opt_encoder.zero_grad()
            opt_head.zero_grad()
            loss = F.cross_entropy(head(encoder(images)), labels)
            loss.backward()
            opt_head.step()
    print("loss", loss.item())
    return [encoder, head]


@healthy("several optimizers")
def two_optimizers():
    """SGD for the encoder, Adam for the head"""
    x, y, *held = digits()
    encoder, head = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
    opt_encoder = torch.optim.SGD(encoder.parameters(), lr=0.1)
    opt_head = torch.optim.Adam(head.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            opt_encoder.zero_grad()
            opt_head.zero_grad()
            loss = F.cross_entropy(head(encoder(images)), labels)
            loss.backward()
            opt_encoder.step()
            opt_head.step()
    print("loss", loss.item())
    return [encoder, head]


@fault("several optimizers", "parameter never trained", "nothing is trained")
def encoder_left_out():
    """the encoder is called apart from the head, and in no optimizer"""
    x, y, *held = digits()
    encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU())
    classifier = nn.Linear(32, 10)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            features = encoder(images)
            loss = F.cross_entropy(classifier(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [encoder, classifier]


@fault("several optimizers", "parameter never trained")
def modules_in_a_plain_list():
    """layers in a Python list, which `parameters()` does not see"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(64, 64), nn.Linear(64, 64)]
            self.out = nn.Linear(64, 10)

        def forward(self, x):
            for layer in self.hidden:
                x = layer(x).relu()
            return self.out(x)

    x, y, *held = digits()
    net = Net()
    fit(net, loader(x, y), torch.optim.Adam(net.parameters(), lr=1e-3))
    test(net, *held)
    return [net, *net.hidden]


@fault("several optimizers", "updated twice")
def shared_by_two_optimizers():
    """the embedding is in both optimizers, and stepped twice"""
    x, y, *held = digits()
    body, head = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
    opt_body = torch.optim.Adam(body.parameters(), lr=1e-3)
    opt_all = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(15):
        for images, labels in loader(x, y):
            opt_body.zero_grad()
            opt_all.zero_grad()
            loss = F.cross_entropy(head(body(images)), labels)
            loss.backward()
            opt_body.step()
            opt_all.step()
    print("loss", loss.item())
    return [body, head]


@healthy("several optimizers")
def several_groups():
    """no weight decay for biases, a smaller learning rate for the first layer"""
    x, y, *held = digits()
    model = mlp()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": weights[:1], "lr": 3e-4},
        {"params": weights[1:]},
        {"params": biases, "weight_decay": 0.0},
    ]
    fit(model, loader(x, y), torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.05))
    test(model, *held)
    return model


# schedules


@fault("schedules", "learning rate gone", "update-to-weight ratio")
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


@fault("schedules", "learning rate gone", "update-to-weight ratio")
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


@fault("schedules", "learning rate gone", "update-to-weight ratio")
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


# clipping


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


# mixed precision


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


@fault("AMP", "non-finite values", "loss is NaN", "low-precision headroom")
def float16_overflows():
    """features too large for float16: the GradScaler leaves out every step"""
    x, y, *held = digits()
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
    x, y, *held = digits()
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


# without an optimizer of torch


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


@fault("manual SGD", *TOO_HIGH, "loss not falling", "loss is NaN", "dead ReLU")
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


@fault("manual SGD", "loss without a floor", "loss not falling", "early blow-up", "loss is NaN")
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
