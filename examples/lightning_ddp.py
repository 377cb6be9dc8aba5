"""Lightning's Trainer, elastic: start a daemon (`forged run`), then this script as often as you like.

python examples/lightning_ddp.py [ENDPOINT [FOLDER]]
"""

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import forged.torch as ft

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7433"
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "lightning_checkpoints"


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, wanted = batch
        loss: torch.Tensor = (self.net(inputs) - wanted).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
trainer = pl.Trainer(
    strategy=ft.ForgedStrategy(
        ENDPOINT, job="lightning", global_batch=64, checkpoints=ft.Checkpoints(FOLDER, every=20, keep=2)
    ),
    accelerator="cpu",
    devices=1,
    max_steps=60,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Net(), DataLoader(dataset, batch_size=16, shuffle=True))
print(f"trained {trainer.global_step} steps")
