"""Elastic training of a torch script: `with ft.join(job="run", state=ft.State(...)) as run:`.

Invariants:
- Parameters, optimizers and schedulers change after the vote of all ranks only, so no step is lost or done twice.
- What belongs to a world - its process group, the wrapped modules, the loaders' batches - is made anew with each world,
  in the script's thread and by all ranks in the same order.
- Checkpoints are saved between two steps, and hold the state after a committed step.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

import forged
from forged.checkpoint import Checkpoints as OpenCheckpoints
from forged.data.sampling.sampler import ElasticSampler
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import RequestRefused
from forged.torch.agreement import Agreement
from forged.torch.checkpoints import Checkpoints
from forged.torch.ddp import ElasticDDP, import_dynamo
from forged.torch.deferred_log import DeferredLog
from forged.torch.group import GLOO, NCCL, TIMEOUT, ProcessGroups
from forged.torch.group_state import GroupState, share_first
from forged.torch.loader import Loader, Shards, indexed
from forged.torch.run_step import RunStep, StepHooks
from forged.torch.state import State
from forged.worker.blocking import Training

REPLICATE, SHARD = "replicate", "shard"
"""The axes of the mesh of replica groups: over the groups, and inside of one."""
OnWorld = Callable[[ClusterTopology], object]


class Run:
    """A torch script's part in the training of a job; made by `join`, a context manager."""

    def __init__(
        self,
        worker: Training,
        state: State,
        checkpoints: Checkpoints | None = None,
        backend: str = GLOO,
        timeout: dt.timedelta = TIMEOUT,
        *,
        group_state: GroupState | None = None,
    ) -> None:
        """`group_state`: of a sharded state, which each world makes anew (`use_sharded`), that of the replica group."""
        self.worker = worker
        """The worker, with its events, collectives and `drain`."""
        self.state = state
        self._groups = ProcessGroups(worker, backend, timeout)
        self._log = DeferredLog(worker.log)
        self._settings = checkpoints
        self._checkpoints: OpenCheckpoints | None = None
        self._saved: dict[str, Any] = {"state": state}
        """What a checkpoint holds."""
        self._first_position: dict[str, Any] | None = None
        """The state of the loader's sampler before the first step; None without a loader."""
        self._open = contextlib.ExitStack()
        self._on_world: list[OnWorld] = []
        self._modules: list[ElasticDDP] = []
        self._meeting = contextlib.ExitStack()
        """The meeting in which the ranks wait for each other; empty between two."""
        self._is_meeting = False
        self._part: tuple[int, int] | None = None
        """This rank's samples of the step, and those of all ranks."""
        self._step: RunStep | None = None
        self._hooks = StepHooks(self._before_vote, self._groups.count_abort, self._restore)
        self._group_state = group_state
        self._is_resumed = group_state is not None
        if group_state is not None:
            import_dynamo()
        self._mesh: Any = None
        self._steps_before = 0
        """The number of a step, less what the worker counts: a sharded state goes back to its checkpoint."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.worker)
            # What a step changes is restored from snapshots; the state itself is large.
            self.worker.uses_with_step = True
            self._groups.open()
            stack.callback(self._groups.close)
            stack.callback(self._let_go)
            self.worker.world_entered.subscribe(self._enter_world)
            self.worker.leaving.subscribe(self._save_alone)
            if self._settings is not None:
                self._checkpoints = stack.enter_context(self._settings.open(self.worker))
            self._open = stack.pop_all()
        self._watch_optimizers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._log.flush()
        finally:
            self._open.__exit__(kind, error, trace)

    def log(self, **values: Any) -> None:
        """Log numbers and tensors of one element for operators and sinks, as values of the present step.

        Tensors of a GPU are converted at most once a second, so the other steps do not wait for it. Each of them is
        told if it is not finite.
        """
        self._log.add(self.step, values, time.monotonic())

    # Steps.

    def steps(self, total: int | None = None) -> Iterator[RunStep]:
        """Yield one step after the other, over all rescales; an aborted step again. Do each inside `with step:`."""
        while (step := self.begin_step(total)) is not None:
            yield step
            self.finish_step()

    def begin_step(self, total: int | None = None) -> RunStep | None:
        """Wait until a step may begin; None when there are no more. For loops that cannot iterate over `steps`."""
        self.resume()
        while (step := self.worker.begin_step(None if self._checkpoints else total)) is not None:
            self._part = None
            with step:
                self._groups.tell_of_groups()
                number = self._steps_before + step
                is_last = total is not None and number >= total
                if self._checkpoints is not None:
                    self._checkpoints.save(number, self._saved, epoch=self.worker.epoch, force=is_last)
            if step.aborted:
                self.worker.finish_step()
            elif is_last:
                # Only its state was to be saved.
                self.worker.drop_step()
                assert self.worker.begin_step(int(step)) is None
                return None
            else:
                self.state.snapshot()
                self._step = RunStep.of(step, self._hooks, number)
                return self._step
        return None

    def finish_step(self) -> bool:
        """Tell the other ranks that the step is finished; returns whether it counts."""
        step, self._step = self._step, None
        if step is not None and not step.is_entered:
            raise RequestRefused(
                "step_not_entered",
                f"step {int(step)} was not done inside `with step:`, so it cannot be repeated when a worker is lost",
                "write `for step in run.steps(total):` and then `with step:` around what the step does",
            )
        self._end_meeting()
        return self.worker.finish_step()

    def resume(self) -> int:
        """Load the newest checkpoint that can be restored; returns the number of its step.

        The first step does so by itself. All parts of the state, and the loaders, must have been made before.
        """
        if not self._is_resumed:
            self._is_resumed = True
            if self._checkpoints is not None:
                self._checkpoints.resume(self._saved)
        return self.step

    def use_sharded(self, state: State) -> int:
        """Train a state whose parts the ranks of this world hold, and load its values into it.

        For functions of `on_world`, which make the model anew in each world; `ft.join` has no `state` then. With
        replica groups the values are those of the world before, or of another group; otherwise, and in the first world,
        those of the newest checkpoint. Returns the number of the step with which training goes on.
        """
        assert self._group_state is not None, "ft.join was given a state"
        is_grouped = self.worker.group_size > 1
        if self._checkpoints is None and not is_grouped:
            raise RequestRefused(
                "checkpoints_missing",
                "a sharded state is lost with its world, and the run has no checkpoints",
                "pass `checkpoints=ft.Checkpoints(...)` to `ft.join`, or train replica groups (`group_size`)",
            )
        self.state = self._saved["state"] = state
        self._watch_optimizers()
        if is_grouped and self._all_have_values():
            self._steps_before = self._group_state.put_into(state)
        else:
            self._begin_sharded(state, is_grouped)
        if is_grouped:
            self._group_state.attach(state, self._steps_before)
        return self.step

    def _all_have_values(self) -> bool:
        """Whether all ranks hold values for the model of this world; in a job's first worlds some or none do."""
        assert self._group_state is not None
        have = np.array([float(self._group_state.has_values)])
        return bool(self.worker.all_reduce(have, "min")[0])

    def _begin_sharded(self, state: State, is_grouped: bool) -> None:
        """Load the newest checkpoint; without one, each replica begins with the values of the first."""
        if self._first_position is not None:
            self._saved["loader"].load_state_dict(self._first_position)
        step = 0 if self._checkpoints is None else self._checkpoints.resume(self._saved)
        self._steps_before = step - self.worker.step
        if is_grouped and not step:
            share_first(state, self.mesh.get_group(REPLICATE))

    def _watch_optimizers(self) -> None:
        for optimizer in self.state.optimizers():
            self._open.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)

    def _before_vote(self) -> None:
        self._end_meeting()
        if self._groups.backend == NCCL:
            # Its collectives have only been enqueued so far.
            torch.cuda.current_stream().synchronize()

    def _restore(self) -> None:
        self._end_meeting()
        self.state.restore()

    def meet(self, name: str) -> None:
        """The ranks wait for each other from here to the vote: one that hangs before is named by the stall report."""
        if not self._is_meeting:
            self._meeting.enter_context(self.worker.meeting(name))
            self._is_meeting = True

    def _end_meeting(self) -> None:
        self._is_meeting = False
        self._meeting.close()

    def _save_alone(self, reason: str) -> None:
        """Save what only this worker has, when it leaves."""
        if self._checkpoints is not None and self.world_size == 1:
            self._checkpoints.save(self.step, self._saved, epoch=self.worker.epoch, force=True)

    def _before_optimizer(self, *_: Any) -> None:
        """An optimizer of the state is about to change it: not before all ranks have voted."""
        if self._step is not None and self._step.is_entered:
            self._step.commit()

    # Worlds.

    @property
    def rank(self) -> int:
        """The worker's position in its world; -1 outside a world."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        return self.worker.world_size

    @property
    def generation(self) -> int:
        """The generation of the world."""
        return self.worker.generation

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._steps_before + self.worker.step

    @property
    def group(self) -> Any:
        """Torch's process group of the present world."""
        return self._groups.group

    @property
    def mesh(self) -> Any:
        """The device mesh of the present world with replica groups: its axes are `replicate` and `shard`."""
        if self._mesh is None:
            raise RequestRefused(
                "mesh_missing",
                "the run has no device mesh: it is outside a world, or its workers are no replica groups",
                "pass `group_size` to `ft.join`, and use the mesh in `run.on_world` or in a step",
            )
        return self._mesh

    def on_world(self, act: OnWorld) -> OnWorld:
        """Call a function in each world, before its first step, with the process group made; a decorator.

        All ranks call theirs together, so it may use collectives, make device meshes, and wrap modules.
        """
        self._on_world.append(act)
        return act

    def ddp(self, module: torch.nn.Module, **options: Any) -> ElasticDDP:
        """The module with gradients that all ranks average: wrapped by DistributedDataParallel anew in each world.

        `options` are those of DistributedDataParallel.
        """
        wrapped = ElasticDDP(module, self, has_equal_state=self.state.holds(module), **options)
        self._modules.append(wrapped)
        if self._step is not None:
            wrapped.enter_world()
        return wrapped

    def loader(
        self,
        dataset: Any,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Batches of a dataset for this rank, each sample of an epoch once; call it before the first step.

        `global_batch` is the number of samples of a step of all ranks. `options` are those of torch's `DataLoader`,
        such as `num_workers` and `collate_fn`. Samples are shuffled, unless the dataset is one of `Shards`.
        """
        dataset = indexed(dataset)
        shuffle = not isinstance(dataset, Shards) if shuffle is None else shuffle
        sampler = ElasticSampler(len(dataset), global_batch, seed, shuffle=shuffle, drop_last=drop_last)
        self.worker.use_sampler(sampler)
        self._saved["loader"], self._first_position = sampler, sampler.state_dict()
        loader = Loader(self, dataset, sampler, **options)
        self._open.callback(loader.close)
        return loader

    def _enter_world(self, topology: ClusterTopology) -> None:
        self._end_meeting()
        with self._groups.entering("the world was not entered"):
            self._make_for_world(topology)

    def _make_for_world(self, topology: ClusterTopology) -> None:
        if self._group_state is not None:
            self._group_state.detach()
        if self.worker.group_size > 1:
            device = "cuda" if self._groups.backend == NCCL else "cpu"
            sizes = self.worker.replica_count, self.worker.group_size
            self._mesh = dist.init_device_mesh(device, sizes, mesh_dim_names=(REPLICATE, SHARD))
            # From here on, collectives on the axes are released when the world is over.
            self._groups.tell_of_groups()
        for module in self._modules:
            module.enter_world()
        for act in self._on_world:
            act(topology)

    def _let_go(self) -> None:
        self.worker.world_entered.unsubscribe(self._enter_world)
        self._mesh = None
        self._end_meeting()
        for module in self._modules:
            module.leave_world()

    # The parts of a batch.

    def share(self, total: int) -> range:
        """This rank's part of `total` samples of the step; gradients are weighed by the sizes of the parts."""
        part = self.worker.share(total)
        self.use_part(len(part), total)
        return part

    def use_part(self, samples: int, total: int) -> None:
        """This rank's loss of this step is the mean over so many of the step's `total` samples."""
        self._part = (samples, total)

    @property
    def weight(self) -> float | None:
        """This rank's part of the samples of the step; None if it is that of every rank."""
        if self._part is None or self._part[0] * self.world_size == self._part[1]:
            return None
        return self._part[0] / self._part[1]


def join(
    *endpoints: str,
    job: str | None = None,
    state: State | Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | None = None,
    backend: str = GLOO,
    config: ElasticTrainingConfig | None = None,
    worker_id: str | WorkerId | None = None,
    token: str | None = None,
    group_size: int | None = None,
    timeout: dt.timedelta = TIMEOUT,
    **options: Any,
) -> Run:
    """Take part in the training of a job; a context manager.

    Without endpoints, `token` or `job`, those of `$FORGED_ENDPOINT`, `$FORGED_TOKEN` and `$FORGED_JOB` are used.
    Without a `state` the run has a sharded one (`Run.use_sharded`). `group_size` workers are a replica group, of which
    each holds a part of the model; without it, those of `forged launch --group-size`. `backend` is `gloo` or `nccl`. No
    collective of torch may take longer than `timeout`. `options` are further ones of `forged.join`.
    """
    group_state = GroupState() if state is None else None
    state = state if isinstance(state, State) else State(rng=group_state is None, **(state or {}))
    worker = forged.join(
        *endpoints,
        job=job,
        state={"agreement": Agreement(state, backend), "state": group_state or state},
        config=config,
        worker_id=worker_id,
        token=token,
        group_size=group_size,
        **options,
    )
    return Run(worker, state, checkpoints, backend, timeout, group_state=group_state)
