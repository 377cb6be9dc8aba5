"""The attempts of a shard holder whose single tries are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup

from forged.clock import SystemClock
from forged.data.messages import CorruptShardFound, TransfersPlanned, TransferTotals
from forged.data.model import Dataset, Indices
from forged.data.sampling.sampler import ElasticSampler
from forged.data.store.memory import MemoryShardStore
from forged.data.training import TrainingData
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import JobPaused
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.errors import NEWS_DIFFER
from forged.worker.mesh import Mesh
from forged.worker.registration import Registration
from forged.worker.worker_state.job_view import Commit

ME, OTHER = WorkerId("me", "host", 1), WorkerId("other", "host", 2)
PATIENCE_S = 30.0


class Recorder:
    """Stands for the daemon, the mesh and each try of a holder, and records what happens in order."""

    worker = ME
    job = "run"
    incarnation = b"i" * 16

    def __init__(self) -> None:
        self.acts: list[tuple[str, Any]] = []
        self.errors: list[Exception] = []
        """Raised by the next tries, one each."""
        self.failures: list[Exception] = []
        self.may_continue = asyncio.Event()
        self.may_continue.set()
        self.changed = asyncio.Event()
        self.owners = np.zeros(2, np.int64)

    async def ready(self, attempt: int) -> bool:
        self.record("ready", attempt)
        return True

    def serve_shards(self, store: Any) -> None:
        return

    async def connect_for_shards(self, source: WorkerId) -> Any:
        raise AssertionError(source)

    def fail(self, error: Exception) -> None:
        self.failures.append(error)
        self.record("fail", str(error))

    def record(self, what: str, about: Any) -> None:
        self.acts.append((what, about))
        self.changed.set()

    async def until(self, *acts: tuple[str, Any]) -> None:
        """Wait until exactly this has happened."""
        async with asyncio.timeout(PATIENCE_S):
            while self.acts != list(acts):
                assert len(self.acts) < len(acts), self.acts
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def holder(self, sampler: ElasticSampler | None = None) -> AsyncIterator[ShardHolder]:
        async with anyio.create_task_group() as tasks:
            yield ScriptedHolder(self, sampler, tasks)
            tasks.cancel_scope.cancel()


class ScriptedHolder(ShardHolder):
    """A holder whose tries do what the recorder says."""

    def __init__(self, recorder: Recorder, sampler: ElasticSampler | None, tasks: TaskGroup) -> None:
        super().__init__(
            TrainingData(8, 2, MemoryShardStore()),
            ElasticTrainingConfig(),
            sampler,
            cast("Registration", recorder),
            lambda signal: None,
            cast("Mesh", recorder),
            tasks,
            recorder.fail,
            SystemClock(),
            lambda: 0.0,
            uses_threads=False,
        )
        self._recorder = recorder

    async def _try(self, attempt: int, *, in_background: bool = False) -> None:
        self._recorder.record("begin", attempt)
        try:
            await self._recorder.may_continue.wait()
        except BaseException:
            with anyio.CancelScope(shield=True):
                # A thread that is under way ends before the next attempt begins.
                await asyncio.sleep(0)
            self._recorder.record("end", attempt)
            raise
        if self._recorder.errors:
            raise self._recorder.errors.pop(0)
        self._recorder.record("hold", attempt)

    async def _pause(self, reason: str) -> None:
        self._recorder.record("pause", reason)

    async def _adopt(self, attempt: int, topology: ClusterTopology) -> None:
        self._recorder.record("adopt", attempt)

    async def _read_owners(self, topology: ClusterTopology) -> Indices:
        return self._recorder.owners


class TestObtaining:
    async def test_ends_when_the_worker_has_reported_ready(self) -> None:
        it = Recorder()
        async with it.holder() as holder:
            await holder.obtain(3)
        assert it.acts == [("begin", 3), ("hold", 3), ("ready", 3)]

    @pytest.mark.parametrize(
        "error",
        [
            Unavailable("shards_missing", "the source is gone"),
            PeerError("frame_length", "it makes no sense"),
            *(RequestRefused(code, "not yet", "wait") for code in sorted(NEWS_DIFFER)),
        ],
        ids=lambda error: error.code,
    )
    async def test_is_retried_after_errors_that_may_pass(self, error: ForgedError) -> None:
        it = Recorder()
        it.errors = [error, error]
        async with it.holder() as holder:
            await holder.obtain(3)
        tried = [("begin", 3), ("pause", error.message)]
        assert it.acts == [*tried * 2, ("begin", 3), ("hold", 3), ("ready", 3)]

    async def test_ends_without_report_when_the_attempt_is_over(self) -> None:
        it = Recorder()
        it.errors = [RequestRefused("attempt_over", "too late", "go by the newest")]
        async with it.holder() as holder:
            await holder.obtain(3)
        assert it.acts == [("begin", 3)]

    async def test_raises_errors_of_the_script(self) -> None:
        it = Recorder()
        it.errors = [RequestRefused("dataset_differs", "the others have another", "give the same")]
        async with it.holder() as holder:
            with pytest.raises(RequestRefused):
                await holder.obtain(3)


class TestObtainingInBackground:
    async def test_obtains_while_the_caller_continues(self) -> None:
        it = Recorder()
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            assert it.acts == []
            await it.until(("begin", 3), ("hold", 3), ("ready", 3))

    async def test_same_attempt_is_obtained_once(self) -> None:
        it = Recorder()
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            await it.until(("begin", 3), ("hold", 3), ("ready", 3))
            holder.obtain_in_background(3)
            holder.obtain_in_background(4)
            await it.until(("begin", 3), ("hold", 3), ("ready", 3), ("begin", 4), ("hold", 4), ("ready", 4))

    async def test_next_attempt_begins_when_the_previous_one_has_ended(self) -> None:
        it = Recorder()
        it.may_continue.clear()
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            await it.until(("begin", 3))
            holder.obtain_in_background(4)
            it.may_continue.set()
            await it.until(("begin", 3), ("end", 3), ("begin", 4), ("hold", 4), ("ready", 4))

    async def test_attempt_that_is_superseded_at_once_never_begins(self) -> None:
        it = Recorder()
        async with it.holder() as holder:
            for attempt in (3, 4, 5):
                holder.obtain_in_background(attempt)
            await it.until(("begin", 5), ("hold", 5), ("ready", 5))

    async def test_attempt_0_ends_the_current_one(self) -> None:
        it = Recorder()
        it.may_continue.clear()
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            await it.until(("begin", 3))
            holder.obtain_in_background(0)
            await it.until(("begin", 3), ("end", 3))
        assert it.failures == []

    async def test_synchronous_attempt_begins_when_the_background_one_has_ended(self) -> None:
        it = Recorder()
        it.may_continue.clear()
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            await it.until(("begin", 3))
            holder.obtain_in_background(0)
            it.may_continue.set()
            await holder.obtain(4)
        assert it.acts == [("begin", 3), ("end", 3), ("begin", 4), ("hold", 4), ("ready", 4)]

    @pytest.mark.parametrize(
        "error",
        [RequestRefused("dataset_differs", "the others have another", "give the same"), OSError("the disk is gone")],
        ids=["refused", "by a store of the script's"],
    )
    async def test_error_that_cannot_pass_ends_the_training(self, error: Exception) -> None:
        it = Recorder()
        it.errors = [error]
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            await it.until(("begin", 3), ("fail", str(error)))
            assert it.failures == [error]
            holder.obtain_in_background(4)
            await it.until(("begin", 3), ("fail", str(error)), ("begin", 4), ("hold", 4), ("ready", 4))

    async def test_attempt_that_is_over_is_no_failure(self) -> None:
        it = Recorder()
        it.errors = [RequestRefused("attempt_over", "too late", "go by the newest")]
        async with it.holder() as holder:
            holder.obtain_in_background(3)
            await it.until(("begin", 3))
        assert it.failures == []


class TestAdopting:
    def commit(self) -> Commit:
        topology = ClusterTopology((ME, OTHER), 2)
        return Commit(3, ClusterTopology(), topology, None, None, 0.0, 0, "why")

    async def test_tells_a_sharded_sampler_the_owners(self) -> None:
        it, sampler = Recorder(), ElasticSampler(8, 4, mode="sharded", dataset=Dataset.of(8, 2), shuffle=False)
        it.owners = np.array([1, 0])
        async with it.holder(sampler) as holder:
            await holder.adopt(self.commit())
        assert it.acts == [("adopt", 3)]
        assert [sampler.batch(rank, 2).tolist() for rank in (0, 1)] == [[4, 5], [0, 1]]

    async def test_reads_no_owners_for_a_shared_sampler(self) -> None:
        it, sampler = Recorder(), ElasticSampler(8, 4)
        async with it.holder(sampler) as holder:
            await holder.adopt(self.commit())
        assert it.acts == [("adopt", 3)]


async def test_on_fact_takes_plans_and_bad_copies_of_this_worker() -> None:
    it = Recorder()
    async with it.holder() as holder:
        holder.on_fact(TransfersPlanned(5, TransferTotals()))
        holder.on_fact(CorruptShardFound("me", 7, "other"))
        holder.on_fact(CorruptShardFound("other", 8, "me"))
        holder.on_fact(JobPaused("lunch"))
        assert holder._planned_attempt == 5
        assert holder._local.suspects == {7}
