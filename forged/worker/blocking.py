"""Elastic training in a script: `with forged.join(...) as worker: for step in worker.steps(): ...`.

Law: there is no second implementation. The worker runs on a loop in a thread of its own, so that it answers while the
script computes; the script waits for it at step boundaries and in collectives, and nowhere else. A signal may interrupt
it there, whatever its handler does. Whatever ends the script, the worker leaves: in good order if nothing failed, and
never so that the end has to wait for others.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from forged.data.dataset import Indices
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, GlobalTrainingState, RescalingEvent, WorkerId
from forged.errors import RequestRefused
from forged.log import Log
from forged.loop_thread import LoopThread
from forged.worker.arguments import count
from forged.worker.data.blocking_transfers import BlockingTransfers
from forged.worker.drain.withdrawal import Parting
from forged.worker.errors import StepAborted
from forged.worker.events import Event
from forged.worker.process.sigterm import heeding_sigterm
from forged.worker.script_log import SCRIPT_LOG
from forged.worker.state_transfer.encoding import copy_of
from forged.worker.step import Step
from forged.worker.transport.peer_tls import PeerTls
from forged.worker.worker import JOB, ElasticWorker

R = TypeVar("R")

SUFFIX_BYTES = 3
NOT_OPEN = RequestRefused("worker_not_open", "the worker is not open", "use it inside `with forged.join(...)`")


class Training:
    """A worker in a script without an event loop; made by `join`."""

    def __init__(
        self,
        make: Callable[[], ElasticWorker],
        endpoints: tuple[str, ...],
    ) -> None:
        self._careful = False
        """Whether the script does its steps inside `with step:`."""
        self._is_stepping = False
        self._make = make
        self._endpoints = endpoints
        self._restore: Callable[[], None] | None = None
        self._loop: LoopThread | None = None
        self._worker: ElasticWorker | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._worker is not None:
            raise RequestRefused("training_reopened", "a training is opened once", "call `forged.join` again")
        self._open.enter_context(self._opened())
        return self

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with LoopThread("forged-worker", NOT_OPEN) as loop:
            self._loop = loop
            worker = self._worker = loop.call(self._make)
            # The script is told of it in its own thread, which has no loop.
            worker.leaving.is_awaited = False
            # SIGTERM is heeded here, because signals come to the thread of the script.
            with loop.holding(worker.session(*self._endpoints)), heeding_sigterm(worker.told_to_end):
                yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_forked and self.worker.is_registered:
                self._run(self.worker.leave_because, error)
        finally:
            self.close()

    def close(self) -> None:
        """Leave. Idempotent; nothing happens in a forked child, to which the worker does not belong."""
        if not self._is_forked:
            self._open.close()

    @property
    def _is_forked(self) -> bool:
        return self._worker is not None and self._worker.process.is_forked

    # Steps.

    def steps(self, total: int | None = None) -> Iterator[Step]:
        """The steps to be done, over all rescales; the same one again if it was broken off."""
        while (number := self._begin_step(total)) is not None:
            self._keep_state()
            self._is_stepping = True
            step = Step.numbered(number, self._entered, lambda: self.worker.is_void)
            try:
                yield step
            finally:
                self._is_stepping = False
                step.end()
            if not self._run(self.worker.finish_step):
                self._give_back_state()

    def _begin_step(self, total: int | None) -> int | None:
        while isinstance(coming := self._run(self.worker.come_to_step, total), Parting):
            # In the script's own thread, where blocking calls do not keep the worker from answering.
            if coming.is_news:
                self.worker.leaving.fire(coming.reason)
            if self._run(self.worker.part):
                return None
        return coming

    def _entered(self) -> None:
        self._careful = True

    def _keep_state(self) -> None:
        self._restore = None if self._careful else copy_of(self.worker.state)

    def _give_back_state(self) -> None:
        if self._restore is not None and self.worker.is_void:
            self._restore()

    def batch(self) -> Indices:
        """The samples that are this worker's in the present step."""
        return self.worker.batch()

    # Collectives.

    def barrier(self) -> None:
        """Wait for all."""
        self._together(self.worker.barrier, None)

    def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """The sum, mean, minimum or maximum over all; the same at every worker, to the last bit."""
        return self._together(partial(self.worker.all_reduce, array, op), array)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value."""
        return self._together(partial(self.worker.broadcast, value, root), value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Everybody's value, in the order of ranks, at the root; None elsewhere."""
        gathered: list[Any] | None = self._together(partial(self.worker.gather, value, root), [value])
        return gathered

    def _together(self, act: Callable[[], Awaitable[Any]], instead: Any) -> Any:
        try:
            return self._run(act)
        except StepAborted:
            if self._careful or not self._is_stepping:
                raise
            # The script goes on with something of the right shape; what it makes of it does not count.
            return instead

    # What it is.

    @property
    def worker(self) -> ElasticWorker:
        """The worker that does the work."""
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
        """Its rank; -1 while it has none."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        return self.worker.world_size

    @property
    def generation(self) -> int:
        """The number of the world."""
        return self.worker.generation

    @property
    def term(self) -> int:
        """The term of the daemon's in which it has learnt last where the job is."""
        return self.worker.term

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self.worker.step

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
        """This worker's part of `total` things, such as the samples of a step: equal to one, in the order of ranks.

        Who is in no world has none.
        """
        total = count("total", total)
        size, rank = self.world_size, self.rank
        if rank < 0:
            return range(0)
        return range(total * rank // size, total * (rank + 1) // size)

    @property
    def rescaling_requested(self) -> Event[RescalingEvent]:
        """Happens when this worker has gone over into another world.

        Subscribers run in the worker's thread while the script waits: they may look, and wait for nothing of this
        object's.
        """
        return self.worker.rescaling_requested

    @property
    def state_synchronized(self) -> Event[GlobalTrainingState]:
        """Happens when this worker is where the others are. Subscribers run as those of `rescaling_requested` do."""
        return self.worker.state_synchronized

    @property
    def leaving(self) -> Event[str]:
        """Happens when this worker is to go, behind its last step: the moment to save something.

        Subscribers run in the script's thread, which waits until they return: plain functions. The others do not meet
        this worker any more.
        """
        return self.worker.leaving

    def drain(self, reason: str = "the script wants to go") -> None:
        """Finish the present step, and go. It does not wait: the handler of a signal may ask for it, at any moment."""
        loop = self._there()
        if loop.is_own_thread:
            self.worker.drain(reason)
        else:
            loop.tell(self.worker.drain, reason)

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Say how far the training is. The steps of a world are counted by the world; before it, by the script."""
        self._there().call(self.worker.update_training_state, epoch, step, learning_rate)

    @property
    def transfers(self) -> BlockingTransfers:
        """What moves shards to this worker, besides rescales."""
        return BlockingTransfers(lambda: self.worker.transfers, self._run)

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether a shard is this worker's."""
        return self.worker.should_handle_shard(shard_index, total_shards)

    # Inside.

    def _run(self, call: Callable[..., Awaitable[R]], *arguments: Any) -> R:
        loop = self._there()
        if loop.is_own_thread:
            raise RequestRefused(
                "worker_waits_for_itself",
                "a subscriber would wait for the worker, in the worker's own thread",
                "take note in the subscriber, and do this in the next step; subscribers of `leaving` may do it at once",
            )
        return loop.run(call, *arguments)

    def _there(self) -> LoopThread:
        if self._loop is None:
            raise copy(NOT_OPEN)
        self.worker.process.check()
        return self._loop


def join(
    *endpoints: str,
    job: str = JOB,
    state: Any = None,
    worker_id: str | WorkerId | None = None,
    config: ElasticTrainingConfig | None = None,
    token: str | None = None,
    learning_rate: float = 0.0,
    global_batch_size: int = 0,
    attributes: Mapping[str, str] | None = None,
    local_world_size: int = 1,
    data: TrainingData | None = None,
    sampler: ElasticSampler | None = None,
    peer_tls: bool = False,
    log: Log = SCRIPT_LOG,
) -> Training:
    """Take part in the training of a job; a context manager.

    `state` is a dict of arrays and plain values, or an object with `state_dict` and `load_state_dict`. The first worker
    creates the job, with `config` if it gives one. Without a `worker_id` the host's name and the pid make one. With
    `peer_tls`, workers speak TLS to each other, with what `$FORGED_CA`, `$FORGED_CERTIFICATE` and `$FORGED_KEY` name.
    """

    def make() -> ElasticWorker:
        return ElasticWorker(
            worker_id or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(SUFFIX_BYTES).hex()}",
            config,
            job=job,
            state=state,
            token=token,
            learning_rate=learning_rate,
            global_batch_size=global_batch_size,
            attributes=attributes,
            local_world_size=local_world_size,
            data=data,
            sampler=sampler,
            log=log,
            peer_tls=PeerTls.from_environment(os.environ) if peer_tls else None,
        )

    return Training(make, endpoints)
