"""A Lightning module that trains elastically, reports by a pipe, and dies where it is told to."""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import forged.torch as ft
from forged.data.sampling.sampler import ElasticSampler
from tests.frameworks.trainer_script import GLOBAL_BATCH, MICRO_BATCH, SAMPLES, Script
from tests.worker.trainers import config


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, wanted = batch
        return (self.net(inputs) - wanted).square().mean()

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def dataset() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Teller(pl.Callback):
    def __init__(self, script: Script, reports: Connection) -> None:
        self._script, self._reports, self._holds = script, reports, list(script.holds)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._holds and trainer.global_step >= self._holds[0]:
            self._holds.pop(0)
            self._reports.send({"held": trainer.global_step})
            self._reports.recv()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._reports.send({"step": trainer.global_step - 1, "epoch": trainer.current_epoch})


def quiet(folder: str = "", **options: Any) -> pl.Trainer:
    return pl.Trainer(
        enable_checkpointing=bool(folder),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        **options,
    )


def main(script: Script, reports: Connection) -> None:
    torch.set_num_threads(1)
    try:
        module = Net()
        saves = (
            [ModelCheckpoint(script.folder, "{step}", every_n_train_steps=4, save_top_k=-1)] if script.folder else []
        )
        trainer = quiet(
            script.folder,
            max_steps=script.total,
            callbacks=[Teller(script, reports), *saves],
            strategy=ft.ForgedStrategy(
                script.endpoint,
                job=script.job,
                worker_id=script.name,
                config=config(min_workers=script.size),
                global_batch=GLOBAL_BATCH,
            ),
        )

        def die(gradient: torch.Tensor) -> None:
            if trainer.global_step == script.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        next(iter(module.parameters())).register_hook(die)
        trainer.fit(
            module,
            DataLoader(dataset(), batch_size=MICRO_BATCH, shuffle=True),
            ckpt_path=f"{script.folder}/step=8.ckpt" if script.resumes else None,
        )
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        values = {name: value.tolist() for name, value in module.state_dict().items()}
        reports.send({"end": trainer.global_step, "values": values, "rate": rate})
    except BaseException as error:
        reports.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
        raise SystemExit(1) from error


def undisturbed(total: int) -> dict[str, Any]:
    """What a plain trainer computes with the samples in the order of the job's sampler."""
    sampler, module = ElasticSampler(SAMPLES, GLOBAL_BATCH), Net()
    batches = list(sampler.batches(0, 1))
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        batches += sampler.batches(0, 1)
    trainer = quiet(max_steps=total)
    trainer.fit(module, DataLoader(dataset(), batch_sampler=[batch.tolist() for batch in batches]))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {"values": {name: value.tolist() for name, value in module.state_dict().items()}, "rate": rate}
