"""Lightning's Trainer, elastic: its loop trains alone, and its steps are those of a forged job.

Invariants:
- A step begins when the loop asks for a batch, and ends when it asks for the next one. Parameters, optimizer and
  schedule change after the vote of all ranks only.
- The loop's counters travel with the state, and workers take them where the loop asks for a batch.
- Rank 0 of the world logs and writes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning_fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from forged.elastic.model import ClusterTopology
from forged.errors import RequestRefused
from forged.torch.ddp import ElasticDDP
from forged.torch.frameworks.micro_batches import MicroBatch, Split, micro_batches
from forged.torch.loader import Loader
from forged.torch.run import Run, join
from forged.torch.run_step import RunStep
from forged.torch.state import State


class ForgedStrategy(SingleDeviceStrategy):
    """`pl.Trainer(strategy=ft.ForgedStrategy(job="net", global_batch=64), devices=1)`.

    `global_batch` is the number of samples of a step of all workers. A worker computes its part of them in
    micro-batches of at most the `batch_size` of the train dataloader. The other arguments are those of `ft.join`;
    `state` has further parts of the state.
    """

    strategy_name = "forged"

    def __init__(
        self,
        *endpoints: str,
        global_batch: int,
        device: Any = "cpu",
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device)
        self._endpoints, self._options, self._parts = endpoints, options, dict(state or {})
        self._global_batch = global_batch
        self._open = contextlib.ExitStack()
        """The run, while the loop trains."""
        self._batches = _StepBatches(self)
        self._run: Run | None = None
        self._net: ElasticDDP | None = None
        self._loader: Loader | None = None
        self._step: RunStep | None = None
        self._micro: list[MicroBatch] = []
        """Those of the step."""
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        """Those of the module's training step, after the batch."""
        self._has_left = False
        """Whether the job has no more steps for this worker."""

    # The loop.

    def process_dataloader(self, dataloader: Any) -> Any:
        """For training, the batches of the job's sampler instead of those of the loader."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        self._require_supported(trainer, dataloader)
        self._batches.source = dataloader
        return self._batches

    def enter(self) -> None:
        """Join the job, now that the loop asks for its first batch."""
        module, source = self.lightning_module, self._batches.source
        parts: dict[str, Any] = {"model": module, "opt": self.optimizers[0]}
        parts |= {f"sched{number}": one.scheduler for number, one in enumerate(self.lr_scheduler_configs)}
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            parts["scaler"] = scaler
        state = State(**parts, loop=_Progress(module.trainer), **self._parts)
        run = self._run = self._open.enter_context(join(*self._endpoints, **self._options, state=state))
        self._net = run.ddp(module)
        self._loader = run.loader(
            source.dataset,
            self._global_batch,
            shuffle=isinstance(source.sampler, RandomSampler),
            drop_last=source.drop_last,
            collate_fn=Split(source.collate_fn, source.batch_size),
            num_workers=source.num_workers,
        )
        run.on_world(self._enter_world)
        if done := module.trainer.global_step:
            # The trainer has loaded a checkpoint of its own.
            for _ in range(done):
                self._loader.sampler.advance()
            rate = float(self.optimizers[0].param_groups[0]["lr"])
            run.worker.update_training_state(self._loader.sampler.epoch, done, rate)

    def next_batch(self) -> Any:
        """The first micro-batch of the next step; the others follow it in the backward pass."""
        if self._run is None:
            self.enter()
        self._finish_step()
        self._begin()
        return self._micro[0].batch

    def _begin(self) -> None:
        assert self._run is not None
        assert self._loader is not None
        self._step = self._run.begin_step(self._total)
        if self._step is None:
            self._has_left = True
            self.lightning_module.trainer.should_stop = True
            raise StopIteration
        self._micro = micro_batches(self._run, self._loader, self._batches.source.batch_size)

    def _finish_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            assert self._run is not None
            self._run.finish_step()

    @property
    def _total(self) -> int | None:
        """The steps of the training; None without a limit."""
        trainer = self.lightning_module.trainer
        limits = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            limits.append(trainer.max_epochs * int(trainer.num_training_batches))
        return min(limits, default=None)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        """Forward and backward, again until all ranks vote for the step; then change the parameters."""
        while True:
            step = self._step
            assert step is not None
            with step:
                result = closure()
                step.commit()
            if step.is_committed:
                return super().optimizer_step(optimizer, partial(_value, result), model, **options)
            self._finish_step()
            self._begin()

    def training_step(self, batch: Any, *args: Any, **options: Any) -> Any:
        """The module's training step with the first micro-batch, which is another one after a repetition."""
        self._arguments = (args, options)
        return self._forward(0)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **options: Any) -> torch.Tensor:
        """The backward pass of the first micro-batch, and both passes of the others."""
        found: torch.Tensor = super().backward(closure_loss * self._micro[0].weight, optimizer, *args, **options)
        for number, micro in enumerate(self._micro[1:], 1):
            output = self._forward(number)
            loss = output["loss"] if isinstance(output, Mapping) else output
            super().backward(loss * micro.weight, optimizer, *args, **options)
        return found

    def _forward(self, number: int) -> Any:
        assert self._net is not None
        args, options = self._arguments
        batch = self.batch_to_device(self._micro[number].batch)
        is_last = number == len(self._micro) - 1
        with self.precision_plugin.train_step_context(), contextlib.nullcontext() if is_last else self._net.no_sync():
            return self._forward_redirection(self._net, self.lightning_module, "training_step", batch, *args, **options)

    def on_train_end(self) -> None:
        """The loop has ended: the job is complete, unless this worker was drained."""
        self._finish_step()
        trainer = self.lightning_module.trainer
        if self._run is not None and not self._has_left:
            self._run.begin_step(trainer.global_step)
        self._open.close()

    def on_exception(self, exception: BaseException) -> None:
        """Leave as failed."""
        self._open.__exit__(type(exception), exception, exception.__traceback__)

    # Ranks.

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and writes."""
        return self.global_rank == 0

    def _enter_world(self, topology: ClusterTopology) -> None:
        assert self._run is not None
        self.global_rank = rank_zero_only.rank = fabric_rank_zero.rank = self._run.rank
        bar = self.lightning_module.trainer.progress_bar_callback
        if bar is not None:
            (bar.enable if self.is_global_zero else bar.disable)()

    def _require_supported(self, trainer: Any, loader: Any) -> None:
        """Refuse settings for which the loop would do something else than the job."""
        for name, is_wrong, allowed, fix in (
            (
                "accumulate_grad_batches",
                trainer.accumulate_grad_batches != 1,
                "1",
                "give `global_batch`: a worker accumulates over micro-batches of the loader's `batch_size`",
            ),
            (
                "automatic_optimization",
                not self.lightning_module.automatic_optimization,
                "True",
                "use `ft.join` in a loop of your own",
            ),
            (
                "reload_dataloaders_every_n_epochs",
                bool(trainer.reload_dataloaders_every_n_epochs),
                "0",
                "leave it out: the job's sampler shuffles each epoch",
            ),
            (
                "train_dataloader",
                not isinstance(loader, DataLoader)
                or type(loader.sampler) not in (RandomSampler, SequentialSampler)
                or loader.batch_size is None
                or self._batches.source is not None,
                "one DataLoader with `batch_size` and `shuffle`",
                "leave out samplers: the samples are those of the job's sampler",
            ),
        ):
            if is_wrong:
                found = getattr(trainer, name, None) if name != "train_dataloader" else type(loader).__name__
                raise RequestRefused("strategy_setting_unfit", f"{name} must be {allowed}, got {found!r}", fix)


def _value(value: Any) -> Any:
    return value


class _StepBatches:
    """The train dataloader: one batch for each step of an epoch."""

    def __init__(self, strategy: ForgedStrategy) -> None:
        self._strategy = strategy
        self.source: Any = None
        """The loader that the script has given."""

    def __len__(self) -> int:
        samples, size = len(self.source.dataset), self._strategy._global_batch
        return samples // size if self.source.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:
        # No generator: it would turn the end of the job into an error.
        return _Batches(self._strategy)


class _Batches:
    """The batches of an epoch, which ends by the loop's counters."""

    def __init__(self, strategy: ForgedStrategy) -> None:
        self._strategy = strategy

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._strategy.next_batch()


class _Progress:
    """The counters of a trainer's loops, as a part of the state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def _counters(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        return {
            "epoch": fit.epoch_progress,
            "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        kept = {name: counter.state_dict() for name, counter in self._counters().items()}
        return {"loop": json.dumps(kept | {"stepped": self._trainer.fit_loop.epoch_loop._batches_that_stepped})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = json.loads(state["loop"])
        for name, counter in self._counters().items():
            counter.load_state_dict(kept[name])
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = kept["stepped"]
