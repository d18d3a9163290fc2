"""Healthy trainings that look like a fault at first sight."""

import copy

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from tests.zoo.registry import healthy
from tests.zoo.trainings.common import CNN, curve, digits, fit, loader, mlp, test


def _letters() -> tuple[torch.Tensor, int]:
    """A text of letters in which each depends on the one before."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(8)
    table = torch.softmax(3 * torch.randn(40, 40, generator=generator), 1)
    found = [0]
    for _ in range(6000):
        found.append(int(torch.multinomial(table[found[-1]], 1, generator=generator)))
    return torch.tensor(found), 40


@healthy("recurrent")
def word_language_model():
    """PyTorch's word_language_model example: SGD with learning rate 20, clipped at 0.25 all the time"""
    data, many = _letters()
    rows = data[: 6000 // 20 * 20].view(20, -1).t()

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(many, 64)
            self.rnn, self.decoder = nn.LSTM(64, 64, 2, dropout=0.2), nn.Linear(64, many)
            for layer in (self.encoder, self.decoder):
                nn.init.uniform_(layer.weight, -0.1, 0.1)

        def forward(self, ids, hidden):
            out, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
            return F.log_softmax(self.decoder(self.drop(out)).view(-1, many), 1), hidden

    model, criterion, rate = RNNModel(), nn.NLLLoss(), 20.0
    for epoch in range(12):
        hidden = (torch.zeros(2, 20, 64), torch.zeros(2, 20, 64))
        for start in range(0, len(rows) - 16, 15):
            model.zero_grad()
            hidden = tuple(one.detach() for one in hidden)
            output, hidden = model(rows[start : start + 15], hidden)
            loss = criterion(output, rows[start + 1 : start + 16].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-rate)
        rate = rate / 4 if epoch == 8 else rate
    print("loss", loss.item())
    return model


@healthy("binary")
def click_through_rate():
    """clicks of three in a hundred, hardly to be foreseen: the loss ends just below the entropy of the labels"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    x = torch.randn(20_000, 10, generator=generator)
    y = (torch.rand(20_000, 1, generator=generator) < torch.sigmoid(x[:, :1] - 4)).float()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    fit(model, loader(x, y, 128), torch.optim.Adam(model.parameters(), lr=1e-3), 3, nn.BCEWithLogitsLoss())
    return model


@healthy("imbalanced")
def rare_class_in_small_batches():
    """one sample in twenty is of the second class: many a batch of 16 has none"""
    x, y, *_ = digits()
    rare = ((y == 3) & (torch.arange(len(y)) % 2 == 0)).long()
    model = mlp(n_out=2)
    fit(model, loader(x, rare, 16), torch.optim.Adam(model.parameters(), lr=1e-3), 6)
    return model


@healthy("plain")
def log_of_a_softmax():
    """a softmax in the model, its logarithm and `nll_loss` outside"""
    x, y, *held = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(dim=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    fit(model, loader(x, y), optimizer, 12, lambda probs, labels: F.nll_loss((probs + 1e-8).log(), labels))
    test(model, *held)
    return model


@healthy("REINFORCE")
def bandit_with_probabilities():
    """a policy that ends in a softmax, on a contextual bandit"""
    x, y, *_ = digits()
    policy = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(dim=-1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    mean = 0.0
    for _ in range(20):
        for images, labels in loader(x, y):
            choice = Categorical(policy(images))
            action = choice.sample()
            reward = (action == labels).float()
            mean = 0.95 * mean + 0.05 * reward.mean().item()
            loss = -(choice.log_prob(action) * (reward - mean)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("reward", mean)
    return policy


@healthy("self-supervised")
def simsiam():
    """SimSiam: a negative cosine similarity, which goes down to -1, with a stop-gradient; and a probe beside it"""
    x, y, *_ = digits()
    encoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32))
    predictor = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))
    probe = nn.Linear(32, 10)
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
    probe_optimizer = torch.optim.Adam(probe.parameters(), lr=1e-2)
    for _ in range(15):
        for images, labels in loader(x, y):
            a = encoder(images + 0.2 * torch.randn_like(images))
            b = encoder(images + 0.2 * torch.randn_like(images))
            one, other = (F.cosine_similarity(predictor(p), q.detach()).mean() for p, q in ((a, b), (b, a)))
            loss = -(one + other) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe_loss = F.cross_entropy(probe(a.detach()), labels)
            probe_optimizer.zero_grad()
            probe_loss.backward()
            probe_optimizer.step()
    print("loss", loss.item(), "probe", probe_loss.item())
    return [encoder, predictor, probe]


@healthy("sequence to sequence")
def ctc():
    """CTC over rows of digits: log-probabilities for each step in time"""
    x, y, *_ = digits()
    rnn, head = nn.GRU(8, 48, batch_first=True, bidirectional=True), nn.Linear(96, 11)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=5e-3)
    ones = torch.ones(64, dtype=torch.long)
    for _ in range(10):
        for images, labels in loader(x[:1344], y[:1344]):
            scores = head(rnn(images.view(-1, 8, 8))[0]).log_softmax(2).transpose(0, 1)
            loss = F.ctc_loss(scores, labels[:, None] + 1, 8 * ones, ones)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [rnn, head]


@healthy("plain")
def logistic_regression_from_zero():
    """weights that begin at zero, and a large learning rate, which suits them"""
    x, y, *held = digits()
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    fit(model, loader(x, y), torch.optim.SGD(model.parameters(), lr=0.5), 15)
    test(model, *held)
    return model


@healthy("embeddings")
def skip_gram():
    """word2vec with negative samples, sparse gradients, and embeddings that begin tiny"""
    data, many = _letters()
    words, around = nn.Embedding(many, 32, sparse=True), nn.Embedding(many, 32, sparse=True)
    nn.init.uniform_(words.weight, -0.5 / 32, 0.5 / 32)
    nn.init.zeros_(around.weight)
    optimizer = torch.optim.SparseAdam([*words.parameters(), *around.parameters()], lr=5e-3)
    for _ in range(400):
        where = torch.randint(1, len(data) - 1, (128,))
        centre = words(data[where])
        right = (centre * around(data[where + 1])).sum(1)
        wrong = torch.einsum("bd,bkd->bk", centre, around(torch.randint(many, (128, 5))))
        loss = -(F.logsigmoid(right).mean() + F.logsigmoid(-wrong).sum(1).mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return [words, around]


@healthy("adversarial training")
def fgsm():
    """adversarial training: a backward pass to the pictures first, before zero_grad"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(12):
        for images, labels in loader(x, y):
            images = images.clone().requires_grad_()
            F.cross_entropy(model(images), labels).backward()
            attacked = (images + 0.05 * images.grad.sign()).detach()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(attacked), labels)
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("sharpness")
def sharpness_aware():
    """SAM by hand: weights go up the gradient, a second backward pass, back again, and one step"""
    x, y, *held = digits()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(12):
        for images, labels in loader(x, y):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                grads = [p.grad.clone() for p in model.parameters()]
                scale = 0.05 / torch.stack([g.norm() for g in grads]).norm()
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.add_(g, alpha=scale.item())
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.sub_(g, alpha=scale.item())
            optimizer.step()
    print("loss", loss.item())
    test(model, *held)
    return model


@healthy("frozen backbone")
def features_under_no_grad():
    """a trained backbone gives features under no_grad, and only a new head is trained"""
    x, y, *_ = digits()
    backbone = CNN(32)
    warm = nn.Linear(32, 5)
    few = y < 5
    both = nn.Sequential(backbone, warm)
    fit(both, loader(x[few], y[few]), torch.optim.Adam(both.parameters(), lr=3e-3), 6)
    backbone.eval()
    head = nn.Linear(32, 10)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(12):
        for images, labels in loader(x, y):
            with torch.no_grad():
                features = backbone(images)
            loss = F.cross_entropy(head(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [backbone, head]


@healthy("autoencoder")
def vector_quantised():
    """a VQ-VAE: codes are picked by distance, their gradient passes straight through"""
    x, *_ = digits()
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    decoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    codes = nn.Embedding(32, 8)
    nn.init.uniform_(codes.weight, -1 / 32, 1 / 32)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *codes.parameters()], lr=2e-3)
    for _ in range(20):
        for images, _ in loader(x, x):
            z = encoder(images).view(-1, 4, 8)
            picked = codes(torch.cdist(z.reshape(-1, 8), codes.weight).argmin(1)).view_as(z)
            pull = F.mse_loss(picked, z.detach()) + 0.25 * F.mse_loss(z, picked.detach())
            loss = F.mse_loss(decoder((z + (picked - z).detach()).flatten(1)), images) + pull
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return [encoder, decoder, codes]


@healthy("autoencoder")
def masked_autoencoder():
    """three quarters of the pixels are hidden, and filled in"""
    x, *_ = digits()
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(15):
        for images, _ in loader(x, x):
            seen = (torch.rand_like(images) < 0.25).float()
            loss = (((net(torch.cat([images * seen, seen], 1)) - images) ** 2) * (1 - seen)).sum() / (1 - seen).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@healthy("pictures")
def optimises_a_picture():
    """a trained and frozen classifier, and a picture that is changed until it is a three"""
    x, y, *_ = digits()
    model = CNN()
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=3e-3), 5)
    model.eval().requires_grad_(False)
    picture = torch.rand(1, 64, requires_grad=True)
    optimizer = torch.optim.Adam([picture], lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(picture), torch.tensor([3])) + 0.01 * picture.abs().sum()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return [model, picture]


@healthy("plain")
def only_evaluates():
    """a model is loaded and evaluated, and nothing is trained"""
    _, _, *held = digits()
    saved = copy.deepcopy(CNN().state_dict())
    model = CNN()
    model.load_state_dict(saved)
    for _ in range(5):
        test(model, *held)
    return model


@healthy("plain")
def batches_of_four():
    """BatchNorm2d with batches of four, as for large pictures"""
    x, y, *held = digits()
    model = CNN()
    fit(model, loader(x, y, 4), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), 2)
    test(model, *held)
    return model


@healthy("tabular")
def batch_norm_first():
    """a raw table with columns of all sizes, and a BatchNorm before everything else"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    x = torch.randn(3000, 6, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    x = x * torch.logspace(-2, 5, 6) + torch.logspace(0, 6, 6)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    fit(model, loader(x, y), torch.optim.Adam(model.parameters(), lr=3e-3), 10)
    return model


@healthy("plain")
def normalises_in_the_model():
    """bytes go into the model, and its first lines divide them"""

    class Net(CNN):
        def forward(self, x):
            return super().forward((x.float() / 255 - 0.3) / 0.37)

    x, y, *_ = digits()
    net = Net()
    fit(net, loader((x * 255).round(), y), torch.optim.Adam(net.parameters(), lr=2e-3), 12)
    return net


@healthy("diffusion")
def diffusion_with_large_times():
    """a denoiser that is told the time as a number up to 1,000, of which it makes waves"""
    x, y, *_ = digits()
    keeps = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.start = nn.Linear(32, 128), nn.Linear(64, 128)
            self.mid, self.out = nn.Linear(128, 128), nn.Linear(128, 64)

        def forward(self, x, t):
            angle = t[:, None] * torch.logspace(0, -4, 16)
            waves = torch.cat([angle.sin(), angle.cos()], 1)
            return self.out(F.silu(self.mid(F.silu(self.start(x) + self.time(waves)))))

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(20):
        for images, _ in loader(x * 2 - 1, y):
            t, noise = torch.randint(1000, (len(images),)), torch.randn_like(images)
            keep = keeps[t][:, None]
            loss = F.mse_loss(model(keep.sqrt() * images + (1 - keep).sqrt() * noise, t.float()), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return model


@healthy("several optimizers")
def adam_then_lbfgs():
    """a PINN: u' = -u, with Adam first, then with LBFGS over the same weights"""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    t = torch.linspace(0, 2, 64)[:, None].requires_grad_()
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)

    def loss_of():
        u = net(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return ((slope + u) ** 2).mean() + ((net(zero) - one) ** 2).mean()

    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(250):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=30)

    def closure():
        lbfgs.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    lbfgs.step(closure)
    print("loss", loss_of().item())
    return net


@healthy("schedules")
def backbone_rate_zero_at_first():
    """a group with learning rate 0 for the first epochs, which is then let go"""
    x, y, *held = digits()
    model = mlp()
    groups = [{"params": model[:2].parameters(), "lr": 0.0}, {"params": model[2:].parameters(), "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups)
    fit(model, loader(x, y), optimizer, 5)
    optimizer.param_groups[0]["lr"] = 1e-3
    fit(model, loader(x, y), optimizer, 10)
    test(model, *held)
    return model


@healthy("regression")
def large_targets():
    """targets of 20 and more, as they are: the loss begins in the hundreds"""
    x, y = curve(1024)
    net = mlp(4, 1)
    fit(net, loader(x, 20 + 8 * y), torch.optim.Adam(net.parameters(), lr=3e-3), 30, F.mse_loss)
    return net


@healthy("plain")
def high_but_fine():
    """SGD at 0.1 with momentum and BatchNorm, the usual start for a ResNet"""
    x, y, *held = digits()
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    fit(model, loader(x, y), optimizer, 12)
    test(model, *held)
    return model


@healthy("GAN")
def generator_steps_twice():
    """two steps of the generator for each of the discriminator, both from new noise"""
    x, y, *_ = digits()
    netG = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    netD = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for _ in range(15):
        for real, _ in loader(x, y):
            fake = netG(torch.randn(len(real), 16)).detach()
            lossD = F.softplus(-netD(real)).mean() + F.softplus(netD(fake)).mean()
            optD.zero_grad()
            lossD.backward()
            optD.step()
            for _ in range(2):
                lossG = F.softplus(-netD(netG(torch.randn(len(real), 16)))).mean()
                optG.zero_grad()
                lossG.backward()
                optG.step()
    print("D", lossD.item(), "G", lossG.item())
    return [netG, netD]
