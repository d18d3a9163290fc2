"""Diffusers' tutorial: an unconditional diffusion model, here of digits; with accelerate and an EMA."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel, set_seed
from digest import digest
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(0)
    pictures = torch.tensor(load_digits().data, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(pictures[:1280]), 32, shuffle=True)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=40)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    ema = EMAModel(model.parameters())
    steps = 0
    for (clean,) in loader:
        noise = torch.randn(clean.shape)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (clean.shape[0],))
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        noise_pred = model(noisy, timesteps, return_dict=False)[0]
        loss = nn.functional.mse_loss(noise_pred, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        steps += 1
    print("loss", loss.item().hex(), "averaged", sum(p.double().sum() for p in ema.shadow_params).item().hex())
    print("steps", steps)
    print("weights", digest(model))


if __name__ == "__main__":
    main()
