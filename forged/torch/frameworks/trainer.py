"""Hugging Face's Trainer, elastic: its loop trains alone, and its steps are those of a forged job.

Invariants:
- Parameters, optimizer and schedule change after the vote of all ranks only; what the loop does after that - logging,
  evaluation, saving - belongs to the same step, which ends when the next one begins.
- The loop's counters travel with the state, and an epoch ends by the number of the step, so a worker that joins in
  mid-training goes on where the others are.
- Rank 0 of the world logs and writes, also when it is another worker than before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import TrainOutput

from forged.elastic.model import ClusterTopology
from forged.errors import RequestRefused
from forged.torch.ddp import ElasticDDP
from forged.torch.frameworks.micro_batches import MicroBatch, Split, micro_batches
from forged.torch.loader import Loader
from forged.torch.run import Run, join
from forged.torch.run_step import RunStep
from forged.torch.state import State

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
"""The variables from which accelerate concludes that it has to make a process group."""
_OF_PROCESS = ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "stateful_callbacks")
"""What of the trainer's state is not the same at all workers."""


class TrainingArguments(transformers.TrainingArguments):
    """Arguments of a worker that a launcher has started: they make no process group of the launcher's variables."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        with _without_ranks():
            device: torch.device = super()._setup_devices
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
            torch.cuda.set_device(device)
            self.distributed_state.device, self._n_gpu = device, 1
        return device


class Trainer(transformers.Trainer):
    """`ft.Trainer(model=…, args=…, train_dataset=…, global_batch=64, join={"job": "bert"})`.

    `global_batch` is the number of samples of a step of all workers. A worker computes its part of them in
    micro-batches of at most `args.per_device_train_batch_size`. `join` has the arguments of `ft.join`; its `endpoints`
    are a list, and its `state` has further parts of the state. `train()` may be called once for a job.
    """

    def __init__(self, *args: Any, global_batch: int, join: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        _require_supported(self.args)
        self._global_batch = global_batch
        self._join = dict(join)
        self.control: Any
        self._open = contextlib.ExitStack()
        """The run, while `train()` runs."""
        self._run: Run | None = None
        self._net: ElasticDDP | None = None
        self._loader: Loader | None = None
        self._step: RunStep | None = None
        """The step that has begun."""
        self._is_trained = False
        """Whether the vote for the step has been passed, so that the loop applies it."""
        self._flops = 0.0
        """Of the step, at all ranks."""
        # Before the callbacks that ask for rank and step.
        self.callback_handler.callbacks.insert(0, _LoopCallback(self))

    # The loop.

    def train(self, *args: Any, **options: Any) -> TrainOutput:
        """Train, together with the other workers of the job; returns also when this worker is drained."""
        with self._open:
            try:
                return super().train(*args, **options)
            except _LeftError:
                self.is_in_train = False
                # Whoever trains on writes.
                self._show_rank(-1, -1)
                self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
                loss = self._total_loss_scalar / max(1, self._globalstep_last_logged)
                return TrainOutput(self.state.global_step, loss, {})

    def get_train_dataloader(self) -> Any:
        """One empty batch for each step of an epoch: the samples are those of the job's sampler."""
        loader = super().get_train_dataloader()
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        samples = len(self._dataset)
        is_cut = self.args.dataloader_drop_last
        steps = samples // self._global_batch if is_cut else -(-samples // self._global_batch)
        return DataLoader(range(steps), batch_size=1, collate_fn=_no_batch)

    def num_examples(self, dataloader: Any) -> int:
        """The samples of an epoch."""
        return len(self._dataset) if dataloader.collate_fn is _no_batch else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The samples of a step of all workers."""
        return self._global_batch

    def enter(self) -> None:
        """Join the job, now that the loop has model, optimizer and schedule, and begin the first step."""
        options = dict(self._join)
        parts: dict[str, Any] = {"model": self.model, "opt": self.optimizer.optimizer, "sched": self.lr_scheduler}
        if getattr(self.accelerator, "scaler", None) is not None:
            parts["scaler"] = self.accelerator.scaler
        state = State(**parts, trainer=_Progress(self), **options.pop("state", {}))
        run = self._run = join(*options.pop("endpoints", ()), **options, state=state)
        self._open.enter_context(run)
        handler = self.accelerator.ddp_handler
        self._net = run.ddp(self.model_wrapped, **(handler.to_kwargs() if handler is not None else {}))
        args = self.args
        self._loader = run.loader(
            self._dataset,
            self._global_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy != "sequential",
            drop_last=args.dataloader_drop_last,
            collate_fn=Split(self._collate, self._train_batch_size),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        )
        run.on_world(self._enter_world)
        if self.state.global_step:
            # The trainer has loaded a checkpoint of its own.
            for _ in range(self.state.global_step):
                self._loader.sampler.advance()
            run.worker.update_training_state(
                self._loader.sampler.epoch, self.state.global_step, self._get_learning_rate()
            )
        self._begin()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of this worker's part of a step, again until all ranks vote for it."""
        assert self._run is not None
        if self._is_trained:
            self._finish_step()
        while True:
            step = self._begin()
            with step:
                loss = self._gradients(self._run)
                step.commit()
            if step.is_committed:
                self._is_trained = True
                return loss
            self._finish_step()

    def _begin(self) -> RunStep:
        if self._step is None:
            assert self._run is not None
            self._step = self._run.begin_step(self.state.max_steps)
            if self._step is None:
                raise _LeftError
            self.state.global_step = int(self._step)
        return self._step

    def _finish_step(self) -> None:
        assert self._run is not None
        if self._step is not None:
            self._step, self._is_trained = None, False
            self._run.finish_step()

    def _gradients(self, run: Run) -> torch.Tensor:
        """Sum up the gradients of all micro-batches at all ranks; returns the loss of the step."""
        assert self._net is not None
        assert self._loader is not None
        batches = self._weighed(run, micro_batches(run, self._loader, self._train_batch_size))
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        # Each loss is the mean of its micro-batch, which the trainer divides by this number.
        self.loss_is_scaled_for_ga = False
        for batch, weight, items in batches[:-1]:
            self.current_gradient_accumulation_steps = 1 / weight if weight else float("inf")
            with self._net.no_sync():
                totals += self._accumulate(batch, weight, items)
        batch, weight, items = batches[-1]
        self.current_gradient_accumulation_steps = 1 / weight if weight else float("inf")
        totals += self._accumulate(batch, weight, items)
        dist.all_reduce(totals, group=run.group)
        self._flops = float(totals[1])
        return totals[0].to(torch.float32)

    def _accumulate(self, batch: Any, weight: float, items: Any) -> torch.Tensor:
        assert self._net is not None
        flops = super().floating_point_ops(batch) if weight else 0.0
        loss = super().training_step(self._net.distributed, batch, items)
        return torch.stack([loss.double(), torch.tensor(flops, dtype=torch.float64, device=loss.device)])

    def _weighed(self, run: Run, batches: list[MicroBatch]) -> list[_Weighed]:
        """The micro-batches by their parts of the items of the step, such as tokens, if the trainer counts items."""
        device = self.args.device
        counts = [self.get_batch_samples(iter([one.batch]), 1, device)[1] for one in batches]
        if any(count is None for count in counts):
            return [_Weighed(one.batch, one.weight, None) for one in batches]
        items = [float(count) if one.weight else 0.0 for one, count in zip(batches, counts, strict=True)]
        total = torch.tensor(sum(items), dtype=torch.float64, device=device)
        with run.worker.meeting("items"):
            dist.all_reduce(total, group=run.group)
        return [
            _Weighed(one.batch, own / max(1.0, float(total)), count.clamp(min=1))
            for one, own, count in zip(batches, items, counts, strict=True)
        ]

    def floating_point_ops(self, inputs: Any) -> float:
        """Those of the step at all ranks, when the loop asks for those of its own batch."""
        return super().floating_point_ops(inputs) if inputs else self._flops

    def _finalize_training(self, *args: Any, **options: Any) -> TrainOutput:
        """The loop has ended at all workers: the job is complete."""
        self._finish_step()
        assert self._run is not None
        self._run.begin_step(self.state.global_step)
        output: TrainOutput = super()._finalize_training(*args, **options)
        return output

    # Ranks.

    def _enter_world(self, topology: ClusterTopology) -> None:
        assert self._run is not None
        rank = self._run.rank
        host = topology.workers[rank].hostname
        self._show_rank(rank, sum(worker.hostname == host for worker in topology.workers[:rank]))

    def _show_rank(self, rank: int, local_rank: int) -> None:
        """Have the trainer, its callbacks and accelerate know this worker's rank; they believe to be one of one."""
        was_first = self.state.is_world_process_zero
        for state in (self.args.distributed_state, self.accelerator.state):
            state.process_index, state.local_process_index = rank, local_rank
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        if self.state.is_world_process_zero and not was_first:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                    callback.on_train_begin(self.args, self.state, self.control)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint of the trainer's own, at rank 0."""
        assert self._run is not None
        with self._run.worker.measure_saving():
            if self.args.should_save:
                super()._save_checkpoint(model, trial)
            elif self.state.best_global_step:
                folder = f"checkpoint-{self.state.best_global_step}"
                self.state.best_model_checkpoint = os.path.join(self._get_output_dir(trial), folder)  # noqa: PTH118


class _Weighed(NamedTuple):
    """A micro-batch by its part of the step's items."""

    batch: Any
    weight: float
    items: Any
    """The items of the micro-batch; None if the trainer does not count them."""


class _LeftError(Exception):
    """This worker trains no more: it was drained, or the job is complete."""


class _LoopCallback(transformers.TrainerCallback):
    """Joins the job when the loop begins, and ends epochs by the number of the step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Join the job."""
        state.is_world_process_zero = True
        self._trainer.enter()

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Correct what the loop concludes from the number of its own batches."""
        steps = len(train_dataloader)
        state.epoch = state.global_step / steps
        control.should_epoch_stop |= state.global_step % steps == 0


class _Progress:
    """The counters of a trainer's loop, as a part of the state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        kept = {
            "state": {name: value for name, value in state.items() if name not in _OF_PROCESS},
            "loss": float(trainer._tr_loss),
            "losses": trainer._total_loss_scalar,
            "logged": trainer._globalstep_last_logged,
            "initial": trainer._initial_global_step,
            "flos": trainer.current_flos,
            "callbacks": {name: callback.state()["attributes"] for name, callback in self._callbacks()},
        }
        return {"progress": json.dumps(kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, kept = self._trainer, json.loads(state["progress"])
        for name, value in kept["state"].items():
            setattr(trainer.state, name, value)
        trainer._tr_loss.fill_(kept["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = kept["losses"], kept["logged"]
        trainer._initial_global_step, trainer.current_flos = kept["initial"], kept["flos"]
        for name, callback in self._callbacks():
            for attribute, value in kept["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Those with a state, by names that are the same at all workers."""
        for number, callback in enumerate(self._trainer.callback_handler.callbacks):
            if isinstance(callback, ExportableState):
                yield f"{number}:{type(callback).__name__}", callback


def _no_batch(_: Any) -> dict[str, Any]:
    return {}


@contextlib.contextmanager
def _without_ranks() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _require_supported(args: Any) -> None:
    """Refuse arguments for which the loop would do something else than the job."""
    if args.parallel_mode == transformers.training_args.ParallelMode.DISTRIBUTED:
        raise RequestRefused(
            "group_exists",
            "TrainingArguments has made a process group of the launcher's variables, such as $RANK",
            "use ft.TrainingArguments, which leaves the process group to the job",
        )
    fixed = "leave it out: the job's workers share the batch by `global_batch`, and keep whole models"
    for name, is_wrong, allowed, fix in (
        ("deepspeed", bool(args.deepspeed), "None", fixed),
        ("fsdp", bool(args.fsdp), "empty", fixed),
        ("parallelism_config", args.parallelism_config is not None, "None", fixed),
        ("n_gpu", args.n_gpu > 1, "at most 1", "give each worker one GPU: use ft.TrainingArguments with $LOCAL_RANK"),
        (
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps != 1,
            "1",
            "give `global_batch`: a worker accumulates over micro-batches of `per_device_train_batch_size`",
        ),
        ("auto_find_batch_size", args.auto_find_batch_size, "False", "make `per_device_train_batch_size` smaller"),
        ("eval_on_start", args.eval_on_start, "False", "call `evaluate()` before `train()`"),
        (
            "include_num_input_tokens_seen",
            args.include_num_input_tokens_seen != "no",
            "'no'",
            "leave it out: the loop sees no inputs",
        ),
        (
            "train_sampling_strategy",
            args.train_sampling_strategy not in ("random", "sequential"),
            "'random' or 'sequential'",
            "leave it out",
        ),
        (
            "optim",
            any(part in str(args.optim) for part in ("lomo", "layerwise")),
            "an optimizer that changes parameters in its step only",
            "choose another one, such as adamw_torch",
        ),
    ):
        if is_wrong:
            raise RequestRefused("trainer_setting_unfit", f"{name} must be {allowed}, got {getattr(args, name)!r}", fix)
