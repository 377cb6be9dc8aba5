"""Elastic training in a script: `with forged.join(...) as worker: for step in worker.steps(): ...`.

The worker runs on an event loop in a thread of its own, so that it answers while the script computes.

Invariants:
- The script waits for the worker at step boundaries, after an exception in a step and in collectives, and nowhere
  else. A signal handler may
  interrupt it there, and may call the worker.
- Whatever ends the script, the worker leaves; the end never waits for other workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from types import TracebackType
from typing import Any, Self, SupportsFloat, TypeVar

from forged.blocking.facade import BlockingFacade, blocking
from forged.blocking.loop_thread import LoopThread
from forged.data.model import Indices
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData
from forged.data.transfer.manager import DataTransferManager
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, GlobalTrainingState, RescalingEvent, Standstill, WorkerId, WorldOver
from forged.errors import ForgedError, RequestRefused, without_traceback
from forged.logger_adapter import SCRIPT_LOG
from forged.worker.arguments import count, replica_group
from forged.worker.catalog.worker_catalog import WorkerCatalog
from forged.worker.drain import Leaving
from forged.worker.errors import StepAborted
from forged.worker.events import Event
from forged.worker.host_slots import WorkerSlots
from forged.worker.process.sigterm import heeding_sigterm
from forged.worker.state_transfer.encoding import copy_of
from forged.worker.steps.step_loop import Entering, Step
from forged.worker.steps.world_store import WorldStore
from forged.worker.transport.peer_tls import PeerTls
from forged.worker.worker import JOB, ElasticWorker

R = TypeVar("R")

SUFFIX_BYTES = 3
NOT_OPEN = RequestRefused("worker_not_open", "the worker is not open", "use it inside `with forged.join(...)`")


class BlockingTransfers(BlockingFacade[DataTransferManager]):
    """Moves shards to one worker."""

    def __init__(self, training: Training) -> None:
        self._training = training

    execute_plan = blocking(DataTransferManager.execute_plan)
    transfer_data_shards = blocking(DataTransferManager.transfer_data_shards)

    def _run(self, call: Callable[[DataTransferManager], Awaitable[R]]) -> R:
        return self._training._run(lambda worker: call(worker.transfers))


class BlockingWorldStore(BlockingFacade[WorldStore]):
    """Small values that the workers of one world share; callable in any thread of the script."""

    def __init__(self, training: Training) -> None:
        self._training = training

    set = blocking(WorldStore.set)
    get = blocking(WorldStore.get)
    get_now = blocking(WorldStore.get_now)
    add = blocking(WorldStore.add)
    delete = blocking(WorldStore.delete)

    def _run(self, call: Callable[[WorldStore], Awaitable[R]]) -> R:
        return self._training._run(lambda worker: call(worker.world_store))


class Training(BlockingFacade[ElasticWorker]):
    """A worker in a script without an event loop; made by `join`."""

    def __init__(
        self,
        make: Callable[[], ElasticWorker],
        endpoints: tuple[str, ...],
    ) -> None:
        self._make = make
        self._endpoints = endpoints
        self._loop: LoopThread | None = None
        self._worker: ElasticWorker | None = None
        self._open = contextlib.ExitStack()
        self._step: Step | None = None
        """The step that the script is in."""
        self.uses_with_step = False
        """Whether the script does its steps inside `with step:`, as it has done one; otherwise the state of an aborted
        step is restored. A caller that sets it spares the copy of the state before the first step."""
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        if self._worker is not None:
            raise RequestRefused("training_reopened", "a training can be opened only once", "call `forged.join` again")
        try:
            self._open.enter_context(self._opened())
        except ForgedError as error:
            raise without_traceback(error) from error.__cause__
        return self

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with LoopThread("forged-worker", NOT_OPEN) as loop:
            self._loop = loop
            worker = self._worker = loop.call(self._make)
            # Their subscribers are called in the script's own thread, which has no event loop.
            worker.leaving.is_awaited = worker.world_entered.is_awaited = False
            # Signals arrive in the script's thread, so SIGTERM is handled here.
            with loop.holding(worker.session(*self._endpoints)), heeding_sigterm(worker.told_to_end):
                yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_forked and self.worker.is_registered:
                self._run(lambda worker: worker.leave_because(error))
        finally:
            self.close()

    def close(self) -> None:
        """Leave. Idempotent; no effect in a forked child, to which the worker does not belong."""
        if not self._is_forked:
            self._open.close()

    @property
    def _is_forked(self) -> bool:
        return self._worker is not None and self._worker.process.is_forked

    # Steps.

    def steps(self, total: int | None = None) -> Iterator[Step]:
        """Yield one step after the other, over all rescales; an aborted step again."""
        while (step := self.begin_step(total)) is not None:
            try:
                yield step
            except BaseException:
                # The script has left its loop within the step.
                self.drop_step()
                raise
            self.finish_step()

    def begin_step(self, total: int | None = None) -> Step | None:
        """Wait until a step may begin; None when there are no more. For loops that cannot iterate over `steps`; the
        step ends with `finish_step`, and `with step:` between the two is optional."""
        if self._step is not None:
            raise RequestRefused(
                "step_unfinished", f"step {int(self._step)} was begun and not finished", "call `finish_step` first"
            )
        number = self._come_to_step(total)
        if number is None:
            return None
        self._restore = None if self.uses_with_step else copy_of(self.worker.state)
        self._step = self.worker.step_loop.step_numbered(number, self._repeats_step, self._commit)
        return self._step

    def finish_step(self) -> bool:
        """Tell the other ranks that the step is finished, and wait for theirs; returns whether it is committed."""
        step = self._step
        if step is None:
            raise RequestRefused("step_missing", "there is no step to finish", "call `begin_step` first")
        self.drop_step()
        is_committed = self._run(lambda worker: worker.finish_step())
        if not is_committed and self._restore is not None and self.worker.is_void:
            self._restore()
        return is_committed

    def drop_step(self) -> None:
        """End the present step here without finishing it; the next `begin_step` begins the same step."""
        step, self._step = self._step, None
        if step is not None:
            self.uses_with_step |= step.is_entered
            step.end()

    def _commit(self) -> None:
        self._together(lambda worker: worker.commit_step(), None)

    def meeting(self, name: str) -> AbstractContextManager[None]:
        """Run collectives that are not the library's inside the block, at all ranks in the same order.

        A rank that does not come is told by the stall report, with this name, and evicted by `evict_stalled`. Raises
        `StepAborted` if the world is over already. Waits for nothing itself, and may be called in any thread.
        """
        return self.worker.meeting(name)

    def _repeats_step(self, step: int, error: Exception) -> bool:
        if self._is_forked or not self.worker.is_registered:
            return isinstance(error, StepAborted)
        return self._run(lambda worker: worker.repeats_step(step, error))

    def _come_to_step(self, total: int | None) -> int | None:
        while isinstance(coming := self._run(lambda worker: worker.come_to_step(total)), Leaving | Entering):
            # In the script's own thread, where a subscriber that blocks does not keep the worker from answering.
            if isinstance(coming, Entering):
                self._tell_entered(coming)
                continue
            if coming.is_news:
                self.worker.leaving.fire(coming.reason)
            if self._run(lambda worker: worker.finish_leaving()):
                return None
        return coming

    def _tell_entered(self, entering: Entering) -> None:
        try:
            self.world_entered.fire(entering.topology)
        except Exception as error:
            if not self._repeats_step(entering.step, error):
                raise
        else:
            self.worker.finish_entering()

    def batch(self) -> Indices:
        """This worker's samples of the present step."""
        return self.worker.batch()

    # Metrics.

    def log(self, step: int | None = None, **values: SupportsFloat) -> None:
        """Log values of a step for operators and sinks; by default of the present one. Any thread may call it.

        Nothing waits for it: the daemon gets the newest value of each name once a second. Names have at most 64
        characters, and there are at most 64. A value that is not finite is told at once.
        """
        self.worker.log(step, **values)

    def measure_saving(self) -> AbstractContextManager[None]:
        """Count the time inside the block as the saving of a checkpoint. `Checkpoints` does so by itself."""
        return self.worker.measure_saving()

    # Collectives.

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._together(lambda worker: worker.barrier(), None)

    def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """The sum, mean, minimum or maximum over all ranks; the same at every rank, to the last bit."""
        return self._together(lambda worker: worker.all_reduce(array, op), array)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value."""
        return self._together(lambda worker: worker.broadcast(value, root), value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """The values of all ranks in rank order, at the root; None at the other ranks."""
        instead: list[Any] | None = [value]
        return self._together(lambda worker: worker.gather(value, root), instead)

    @property
    def world_store(self) -> BlockingWorldStore:
        """Small values that the workers of the present world share."""
        return BlockingWorldStore(self)

    def _together(self, act: Callable[[ElasticWorker], Awaitable[R]], instead: R) -> R:
        try:
            return self._run(act)
        except StepAborted:
            if self.uses_with_step or self._step is None or self._step.is_entered:
                raise
            # Without `with step:` the script goes on with a value of the right shape, and its state is restored.
            return instead

    # Identity and progress.

    @property
    def worker(self) -> ElasticWorker:
        """The asynchronous worker behind this one."""
        if self._worker is None:
            raise copy(NOT_OPEN)
        return self._worker

    @property
    def worker_id(self) -> WorkerId:
        return self.worker.worker_id

    @property
    def job(self) -> str:
        """The name of the job."""
        return self.worker.job

    @property
    def rank(self) -> int:
        """The worker's position in its world; -1 outside a world."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        return self.worker.world_size

    @property
    def group(self) -> str:
        """The name of the worker's group; empty for a group of one."""
        return self.worker.group

    @property
    def group_rank(self) -> int:
        """The worker's position in its group."""
        return self.worker.group_rank

    @property
    def group_size(self) -> int:
        """How many workers a group has."""
        return self.worker.group_size

    @property
    def replica_rank(self) -> int:
        """The position of the worker's group among the groups of its world; -1 outside a world."""
        return self.worker.replica_rank

    @property
    def replica_count(self) -> int:
        """How many groups the world has."""
        return self.worker.replica_count

    @property
    def generation(self) -> int:
        """The generation of the world."""
        return self.worker.generation

    @property
    def term(self) -> int:
        """The term of the daemon that has last told the state of the job."""
        return self.worker.term

    @property
    def step(self) -> int:
        """Committed steps; of a worker that is leaving, the steps applied to its state."""
        return self.worker.step

    @property
    def epoch(self) -> int:
        """The epoch that the sampler is in, or that the script has named."""
        return self.worker.epoch

    @property
    def slots(self) -> WorkerSlots:
        """Memory of this host that outlives this process, into which checkpoints are staged."""
        return self.worker.slots

    @property
    def sampler(self) -> ElasticSampler | None:
        """Decides which samples a step uses."""
        return self.worker.sampler

    def use_sampler(self, sampler: ElasticSampler) -> None:
        """Draw the samples of the steps from this sampler. Refused once the worker has registered, at its first
        step."""
        self._checked_loop().call(self.worker.use_sampler, sampler)

    @property
    def learning_rate(self) -> float:
        return self.worker.learning_rate

    @property
    def global_batch_size(self) -> int:
        return self.worker.global_batch_size

    @property
    def current_topology(self) -> ClusterTopology | None:
        return self.worker.current_topology

    @property
    def current_state(self) -> GlobalTrainingState | None:
        return self.worker.current_state

    @property
    def state(self) -> Any:
        return self.worker.state

    def share(self, total: int) -> range:
        """This worker's part of `total` items, such as the samples of a step: equal parts to within one item, in rank
        order; empty outside a world.
        """
        total = count("total", total)
        size, rank = self.world_size, self.rank
        if rank < 0:
            return range(0)
        return range(total * rank // size, total * (rank + 1) // size)

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Set the training progress. In a world, the steps count themselves; before it, the script sets the number."""
        self._checked_loop().call(self.worker.update_training_state, epoch, step, learning_rate)

    # Events.

    @property
    def rescaling_requested(self) -> Event[RescalingEvent]:
        """Happens when this worker has entered another world.

        Subscribers run in the worker's thread while the script waits: they may read this object, and not wait for it.
        """
        return self.worker.rescaling_requested

    @property
    def state_synchronized(self) -> Event[GlobalTrainingState]:
        """Happens when this worker has the training state of its new world. Subscribers run as those of
        `rescaling_requested` do."""
        return self.worker.state_synchronized

    @property
    def world_over(self) -> Event[WorldOver]:
        """Happens once for each world that was entered, at once when no further collective of it will complete, and
        before `world_entered` of the next one.

        Subscribers run in the worker's thread, also while the script computes or hangs: plain functions, which must not
        wait for the worker.
        """
        return self.worker.world_over

    @property
    def world_entered(self) -> Event[ClusterTopology]:
        """Happens before the first step of each world, with its state. Subscribers run in the script's thread, and may
        use the world's collectives.

        If a subscriber raises `StepAborted`, or any exception while the world is over, the worker goes over to the next
        world, where the event happens again. Another exception is raised by `steps`.
        """
        return self.worker.world_entered

    @property
    def standstill(self) -> Event[Standstill]:
        """Happens when training stands still here because the daemon is away, and again when that is over; `lasted_s`
        is None the first time. Subscribers run as those of `rescaling_requested` do."""
        return self.worker.standstill

    @property
    def leaving(self) -> Event[str]:
        """Happens when this worker leaves, after its last step: the moment to save.

        Subscribers run in the script's thread, which waits until they return: plain functions. Collectives
        with other workers are over.
        """
        return self.worker.leaving

    def drain(self, reason: str = "the script asks to leave") -> None:
        """Drain this worker: it leaves after a step. Returns at once, so that a signal handler may call it anywhere."""
        loop = self._checked_loop()
        if loop.is_own_thread:
            self.worker.drain(reason)
        else:
            loop.tell(self.worker.drain, reason)

    # Checkpoints.

    @property
    def checkpoint_catalog(self) -> WorkerCatalog:
        """The catalogue of the job's checkpoints, which `DistributedCheckpoint` and `Checkpoints` use by themselves."""
        return self.worker.checkpoint_catalog

    # Data.

    @property
    def transfers(self) -> BlockingTransfers:
        """Moves shards to this worker. The next rescale may drop shards that were moved by hand."""
        return BlockingTransfers(self)

    redistribute_data = blocking(ElasticWorker.redistribute_data)

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether this worker owns a shard."""
        return self.worker.should_handle_shard(shard_index, total_shards)

    def _run(self, call: Callable[[ElasticWorker], Awaitable[R]]) -> R:
        loop = self._checked_loop()
        if loop.is_own_thread:
            raise RequestRefused(
                "worker_waits_for_itself",
                "a subscriber of an event has called a method that waits for the worker, in the worker's own thread",
                "call it in the next step, or in a subscriber of `leaving`, which runs in the script's thread",
            )
        try:
            return loop.run(call, self.worker)
        except ForgedError as error:
            # Its code, message and fix say what is wrong; an explicit cause, such as an exception of the script's
            # `state_dict`, keeps its traceback.
            raise without_traceback(error) from error.__cause__

    def _checked_loop(self) -> LoopThread:
        if self._loop is None:
            raise copy(NOT_OPEN)
        self.worker.process.check()
        return self._loop


def join(
    *endpoints: str,
    job: str | None = None,
    state: Any = None,
    worker_id: str | WorkerId | None = None,
    config: ElasticTrainingConfig | None = None,
    token: str | None = None,
    learning_rate: float | None = None,
    global_batch_size: int = 0,
    attributes: Mapping[str, str] | None = None,
    local_world_size: int = 1,
    group: str | None = None,
    group_rank: int | None = None,
    group_size: int | None = None,
    data: TrainingData | None = None,
    sampler: ElasticSampler | None = None,
    peer_tls: bool = False,
    log: Any = SCRIPT_LOG,
) -> Training:
    """Take part in the training of a job; a context manager.

    Without endpoints, `token` or `job`, those of `$FORGED_ENDPOINT`, `$FORGED_TOKEN` and `$FORGED_JOB` are used.
    `state` is a dict of arrays and plain values, or an object with `state_dict` and `load_state_dict`. The first worker
    creates the job, with `config` if it gives one. Without a `worker_id` the host's name and the pid make one. With
    `peer_tls`, workers use TLS between each other, with the files that `$FORGED_CA`, `$FORGED_CERTIFICATE` and
    `$FORGED_KEY` name. `log` is a logger of `logging` or structlog; default: the logger `forged`. The `group_size`
    workers of one `group` train one replica of the model, each with a part of the state by its `group_rank`; without
    these arguments, those that `forged launch --group-size` has set, and with a `group_size` alone, as many workers of
    one launcher with consecutive `$LOCAL_RANK`.
    """
    launcher = f"{socket.gethostname()}-{os.getppid()}"
    place = replica_group(group, group_rank, group_size, os.environ, launcher)

    def make() -> ElasticWorker:
        return ElasticWorker(
            worker_id or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(SUFFIX_BYTES).hex()}",
            config,
            job=job or os.environ.get("FORGED_JOB") or JOB,
            state=state,
            token=token,
            learning_rate=learning_rate,
            global_batch_size=global_batch_size,
            attributes=attributes,
            local_world_size=local_world_size,
            group=place.name,
            group_rank=place.rank,
            group_size=place.size,
            data=data,
            sampler=sampler,
            log=log,
            peer_tls=PeerTls.from_environment(os.environ) if peer_tls else None,
        )

    return Training(make, endpoints)
