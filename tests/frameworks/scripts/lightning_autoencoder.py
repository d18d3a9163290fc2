"""Lightning in 15 minutes: the autoencoder, of digits; with validation, accumulation and clipping."""

import logging
import warnings

import pytorch_lightning as L
import torch
from digest import digest
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def on_validation_epoch_end(self):
        print("validation", self.trainer.callback_metrics["val_loss"].item().hex())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(0)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64))
    autoencoder = LitAutoEncoder(encoder, decoder)
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    trainer = L.Trainer(
        max_epochs=3,
        limit_train_batches=28,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        autoencoder, DataLoader(TensorDataset(pixels), 32, shuffle=True), DataLoader(TensorDataset(pixels), 256)
    )
    print("steps", trainer.global_step)
    print("weights", digest(autoencoder))


if __name__ == "__main__":
    main()
