"""GANs, autoencoders that vary, diffusion, flows."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy
from tests.zoo.trainings.common import digits, loader


def _generator() -> nn.Sequential:
    layers = [nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 64), nn.Sigmoid())


def _discriminator() -> nn.Sequential:
    layers = [nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(64, 1))


@healthy("GAN")
def gan():
    """the usual GAN with two optimizers"""
    x, y, *_ = digits()
    netG, netD = _generator(), _discriminator()
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(15):
        for real, _ in loader(x, y):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            netD.zero_grad()
            errD_real = criterion(netD(real), ones)
            errD_real.backward()
            fake = netG(torch.randn(len(real), 16))
            errD_fake = criterion(netD(fake.detach()), zeros)
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), ones)
            errG.backward()
            optimizerG.step()
    print("D", (errD_real + errD_fake).item(), "G", errG.item())
    return [netG, netD]


@healthy("GAN")
def wasserstein_gan():
    """WGAN-GP: five steps of the critic for each of the generator, RMS of gradients as a penalty"""
    x, y, *_ = digits()
    generator, critic = _generator(), _discriminator()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.9))
    for _ in range(15):
        for i, (real, _) in enumerate(loader(x, y)):
            fake = generator(torch.randn(len(real), 16)).detach()
            share = torch.rand(len(real), 1)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()
            if i % 5 == 4:
                opt_g.zero_grad()
                (-critic(generator(torch.randn(len(real), 16))).mean()).backward()
                opt_g.step()
    print("critic", loss.item())
    return [generator, critic]


@healthy("GAN")
def info_gan():
    """InfoGAN: a third optimizer over the parameters of both"""
    x, y, *_ = digits()
    generator, body = _generator(), nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2))
    judge, code = nn.Linear(128, 1), nn.Linear(128, 4)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam([*body.parameters(), *judge.parameters()], lr=2e-4, betas=(0.5, 0.999))
    opt_i = torch.optim.Adam(
        [*generator.parameters(), *body.parameters(), *code.parameters()], lr=2e-4, betas=(0.5, 0.999)
    )
    bce = nn.BCEWithLogitsLoss()
    for _ in range(12):
        for real, _ in loader(x, y):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            kind = torch.randint(4, (len(real),))
            noise = torch.cat([F.one_hot(kind, 4).float(), torch.randn(len(real), 12)], 1)
            opt_g.zero_grad()
            g_loss = bce(judge(body(generator(noise))), ones)
            g_loss.backward()
            opt_g.step()
            opt_d.zero_grad()
            d_loss = (bce(judge(body(real)), ones) + bce(judge(body(generator(noise).detach())), zeros)) / 2
            d_loss.backward()
            opt_d.step()
            opt_i.zero_grad()
            info_loss = F.cross_entropy(code(body(generator(noise))), kind)
            info_loss.backward()
            opt_i.step()
    print("G", g_loss.item(), "D", d_loss.item(), "info", info_loss.item())
    return [generator, body, judge, code]


@fault("GAN", "cut off from the loss")
def generator_gets_detached():
    """`fake.detach()` also where the generator is trained"""
    x, y, *_ = digits()
    netG, netD = _generator(), _discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4)
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4)
    bce = nn.BCEWithLogitsLoss()
    for _ in range(12):
        for real, _ in loader(x, y):
            fake = netG(torch.randn(len(real), 16)).detach()
            optD.zero_grad()
            lossD = bce(netD(real), torch.ones(len(real), 1)) + bce(netD(fake), torch.zeros(len(real), 1))
            lossD.backward()
            optD.step()
            optG.zero_grad()
            lossG = bce(netD(fake), torch.ones(len(real), 1))
            lossG.backward()
            optG.step()
    print("D", lossD.item(), "G", lossG.item())
    return [netG, netD]


@fault("GAN", "parameter never trained")
def both_optimizers_have_the_discriminator():
    """`optG` was made with the parameters of the discriminator"""
    x, y, *_ = digits()
    netG, netD = _generator(), _discriminator()
    optG = torch.optim.Adam(netD.parameters(), lr=2e-4)
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4)
    bce = nn.BCEWithLogitsLoss()
    for _ in range(12):
        for real, _ in loader(x, y):
            fake = netG(torch.randn(len(real), 16))
            optD.zero_grad()
            lossD = bce(netD(real), torch.ones(len(real), 1)) + bce(netD(fake.detach()), torch.zeros(len(real), 1))
            lossD.backward()
            optD.step()
            optG.zero_grad()
            lossG = bce(netD(fake), torch.ones(len(real), 1))
            lossG.backward()
            optG.step()
    print("D", lossD.item(), "G", lossG.item())
    return [netG, netD]


@fault("GAN", "learning rate too high")
def gan_rate_too_high():
    """a GAN with learning rate 0.5"""
    x, y, *_ = digits()
    netG, netD = _generator(), _discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=0.5)
    optD = torch.optim.Adam(netD.parameters(), lr=0.5)
    bce = nn.BCEWithLogitsLoss()
    for _ in range(12):
        for real, _ in loader(x, y):
            fake = netG(torch.randn(len(real), 16))
            optD.zero_grad()
            lossD = bce(netD(real), torch.ones(len(real), 1)) + bce(netD(fake.detach()), torch.zeros(len(real), 1))
            lossD.backward()
            optD.step()
            optG.zero_grad()
            lossG = bce(netD(fake), torch.ones(len(real), 1))
            lossG.backward()
            optG.step()
    print("D", lossD.item(), "G", lossG.item())
    return [netG, netD]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        hidden = self.encoder(x)
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


@healthy("VAE")
def vae():
    """binary cross entropy and KL divergence, summed as in the official example"""
    x, y, *_ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        for data, _ in loader(x, y, 128):
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy_with_logits(recon, data, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            optimizer.zero_grad()
            (bce + kld).backward()
            optimizer.step()
    print("bce", bce.item(), "kld", kld.item())
    return model


@fault("VAE", "loss without a floor")
def vae_with_the_wrong_sign():
    """the KL divergence is subtracted"""
    x, y, *_ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        for data, _ in loader(x, y, 128):
            recon, mu, logvar = model(data)
            mse = F.mse_loss(recon, data)
            kld = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.clamp(max=5).exp())
            optimizer.zero_grad()
            (mse - kld).backward()
            optimizer.step()
    print("mse", mse.item(), "kld", kld.item())
    return model


@fault("VAE", "loss without a floor")
def vae_of_unscaled_pictures():
    """binary cross entropy with targets from 0 to 255: it has no floor"""
    x, y, *_ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(15):
        for data, _ in loader(x * 255, y, 128):
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy_with_logits(recon, data)
            kld = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.clamp(max=5).exp())
            optimizer.zero_grad()
            (bce + 1e-3 * kld).backward()
            optimizer.step()
    print("bce", bce.item(), "kld", kld.item())
    return model


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(50, 32)
        self.start, self.mid, self.out = nn.Linear(64, 128), nn.Linear(128 + 32, 128), nn.Linear(128, 64)

    def forward(self, x, t):
        hidden = F.silu(self.start(x))
        return self.out(F.silu(self.mid(torch.cat([hidden, self.time(t)], 1))))


def _noised(data, schedule):
    t = torch.randint(50, (len(data),))
    noise = torch.randn_like(data)
    keep = schedule[t][:, None]
    return keep.sqrt() * data + (1 - keep).sqrt() * noise, t, noise


@healthy("diffusion")
def diffusion():
    """a network that learns to predict the noise, and an average of its weights"""
    x, y, *_ = digits()
    schedule = torch.cumprod(1 - torch.linspace(1e-3, 0.15, 50), 0)
    model = Denoiser()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(25):
        for data, _ in loader(x * 2 - 1, y):
            noisy, t, noise = _noised(data, schedule)
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
    print("loss", loss.item())
    with torch.no_grad():
        sample = torch.randn(8, 64)
        for k in reversed(range(50)):
            sample = sample - 0.1 * average(sample, torch.full((8,), k))
    return [model, average, sample]


@fault("diffusion", "learning rate too high")
def diffusion_rate_too_high():
    """a denoiser with learning rate 1"""
    x, y, *_ = digits()
    schedule = torch.cumprod(1 - torch.linspace(1e-3, 0.15, 50), 0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for _ in range(20):
        for data, _ in loader(x * 2 - 1, y):
            noisy, t, noise = _noised(data, schedule)
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return model


@fault("diffusion", "no better than chance")
def diffusion_with_other_noise():
    """the target is noise that was drawn again"""
    x, y, *_ = digits()
    schedule = torch.cumprod(1 - torch.linspace(1e-3, 0.15, 50), 0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        for data, _ in loader(x * 2 - 1, y):
            noisy, t, noise = _noised(data, schedule)
            loss = F.mse_loss(model(noisy, t), torch.randn_like(noise))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return model


@healthy("flow matching")
def flow_matching():
    """a velocity between noise and data"""
    x, y, *_ = digits()
    net = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(20):
        for data, _ in loader(x * 2 - 1, y):
            t, noise = torch.rand(len(data), 1), torch.randn_like(data)
            loss = F.mse_loss(net(torch.cat([(1 - t) * noise + t * data, t], 1)), data - noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    return net


@healthy("normalizing flow")
def coupling_flow():
    """a normalizing flow of affine couplings: its loss, a negative log-likelihood, goes below zero"""
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    angle = torch.rand(2048, 1, generator=generator) * 6.28
    points = torch.cat([angle.cos(), angle.sin()], 1) * 0.2 + 0.02 * torch.randn(2048, 2, generator=generator)
    halves = nn.ModuleList(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 2)) for _ in range(6))
    optimizer = torch.optim.Adam(halves.parameters(), lr=2e-3)
    for _ in range(300):
        z = points[torch.randint(2048, (256,))]
        log_det = torch.zeros(len(z))
        for half in halves:
            scale, shift = half(z[:, :1]).unbind(1)
            z = torch.stack([z[:, 1] * scale.exp() + shift, z[:, 0]], 1)
            log_det = log_det + scale
        loss = -(torch.distributions.Normal(0, 1).log_prob(z).sum(1) + log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return halves
