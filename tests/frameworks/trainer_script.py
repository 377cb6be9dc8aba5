"""A Hugging Face Trainer that trains elastically, reports by a pipe, and dies where it is told to."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import forged.torch as ft
from tests.torch.train_script import open_files
from tests.worker.trainers import config

SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 40, 12, 3
__all__ = ["Script", "main", "undisturbed"]


@dataclass(frozen=True)
class Script:
    """What a worker does."""

    endpoint: str
    job: str
    name: str
    total: int = 10
    size: int = 2
    """How many workers the job needs at first."""
    dies_at: int = -1
    """The step in whose backward pass the worker kills itself."""
    folder: str = ""
    """Where the trainer writes."""
    is_causal: bool = False
    resumes: bool = False
    holds: tuple[int, ...] = (2,)
    """The steps before which the loop waits for the test."""
    has_ranks: bool = False
    """Whether the environment has a launcher's variables."""
    arguments: dict[str, Any] = field(default_factory=dict)


def model_of(script: Script) -> Any:
    torch.manual_seed(3)
    if script.is_causal:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def samples_of(script: Script) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 32, (SAMPLES, 8), generator=generator)
    if script.is_causal:
        # Each sample has another number of tokens that count.
        labels = [torch.where(torch.arange(8) < 2 + number % 7, row, -100) for number, row in enumerate(tokens)]
        return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    return [{"input_ids": row, "labels": (row[0] > 15).long()} for row in tokens]


def arguments_of(script: Script, kind: Any) -> Any:
    return kind(
        output_dir=script.folder,
        max_steps=script.total,
        per_device_train_batch_size=MICRO_BATCH,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        logging_steps=2,
        disable_tqdm=True,
        seed=5,
        **({"save_strategy": "no"} | script.arguments),
    )


class Teller(transformers.TrainerCallback):
    """Reports what the loop tells its callbacks, and holds it."""

    def __init__(self, script: Script, reports: Connection) -> None:
        self._script = script
        self._reports = reports
        self._holds = list(script.holds)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._holds and state.global_step >= self._holds[0]:
            self._holds.pop(0)
            self._reports.send({"held": state.global_step})
            self._reports.recv()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._reports.send({"step": state.global_step - 1, "epoch": state.epoch, "first": state.is_world_process_zero})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            self._reports.send({"logged": state.global_step, "values": dict(logs)})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._reports.send({"epoch_end": state.epoch})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._reports.send({"saved": state.global_step, "writes": args.should_save})


def main(script: Script, reports: Connection) -> None:
    torch.set_num_threads(1)
    try:
        train(script, reports)
    except BaseException as error:
        reports.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
        raise SystemExit(1) from error


def train(script: Script, reports: Connection) -> None:
    if script.has_ranks:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }
    samples = samples_of(script)
    trainer = ft.Trainer(
        model=model_of(script),
        args=arguments_of(script, ft.TrainingArguments),
        train_dataset=samples,
        eval_dataset=samples[:8],
        callbacks=[Teller(script, reports)],
        global_batch=GLOBAL_BATCH,
        join={
            "endpoints": [script.endpoint],
            "job": script.job,
            "worker_id": script.name,
            "config": config(min_workers=script.size),
        },
    )
    if script.dies_at >= 0:
        die_in_backward(trainer, script.dies_at)
    output = trainer.train(resume_from_checkpoint=script.resumes)
    reports.send(
        {
            "end": output.global_step,
            "values": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
            "rate": trainer.lr_scheduler.get_last_lr()[0],
            "loss": output.training_loss,
            "history": trainer.state.log_history,
            "files": open_files(),
        }
    )


def die_in_backward(trainer: Any, at: int) -> None:
    """The other ranks wait in the reduction of the gradients then."""

    def hook(gradient: torch.Tensor) -> None:
        if trainer.state.global_step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    next(iter(trainer.model.parameters())).register_hook(hook)


class InOrder(transformers.Trainer):
    """A plain trainer with the samples in the order of the job's sampler."""

    def get_train_dataloader(self) -> Any:
        from torch.utils.data import DataLoader

        from forged.data.sampling.sampler import ElasticSampler

        sampler = ElasticSampler(SAMPLES, GLOBAL_BATCH, seed=self.args.seed)
        batches = list(sampler.batches(0, 1))
        for epoch in range(1, 10):
            sampler.set_epoch(epoch)
            batches += sampler.batches(0, 1)
        return DataLoader(
            self.train_dataset,
            batch_sampler=[batch.tolist() for batch in batches],
            collate_fn=self.data_collator,
        )


def undisturbed(script: Script) -> dict[str, Any]:
    """What a plain trainer computes."""
    trainer = InOrder(
        model=model_of(script),
        args=arguments_of(script, transformers.TrainingArguments),
        train_dataset=samples_of(script),
        eval_dataset=samples_of(script)[:8],
    )
    output = trainer.train()
    return {
        "values": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
        "rate": trainer.lr_scheduler.get_last_lr()[0],
        "loss": output.training_loss,
        "history": trainer.state.log_history,
    }
