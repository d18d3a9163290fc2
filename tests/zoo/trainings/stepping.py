"""zero_grad, accumulation, and which parameters are stepped, how often."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import CNN, digits, fit, loader, mlp, test


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
    x, y, *_ = digits()
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


@fault("plain", "nothing is trained")
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


@fault("plain", "parameter never trained")
def optimizer_of_another_model():
    """the optimizer was made before `model = mlp()`, and steps the old one"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = mlp()
    fit(model, loader(x, y), optimizer)
    test(model, *held)
    return model


@fault("plain", "parameter never trained")
def trains_a_copy():
    """the optimizer holds a model, and a deep copy of it is trained"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = copy.deepcopy(model)
    fit(best, loader(x, y), optimizer, epochs=10)
    test(best, *held)
    return [model, best]


@fault("plain", "parameter never trained")
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


@fault("several optimizers", "parameter never trained")
def one_of_two_steps_forgotten():
    """encoder and head have an optimizer each, and only one of them steps"""
    x, y, *_ = digits()
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
    x, y, *_ = digits()
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


@fault("several optimizers", "parameter never trained")
def encoder_left_out():
    """the encoder is called apart from the head, and in no optimizer"""
    x, y, *_ = digits()
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
    x, y, *_ = digits()
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
