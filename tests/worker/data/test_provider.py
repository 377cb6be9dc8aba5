"""How a worker comes by its training data, with a custodian that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import numpy as np
import pytest

from forged.data.dataset import Dataset
from forged.data.messages import CorruptShardFound, TransfersPlanned, TransferTotals
from forged.data.sampling.sampler import ElasticSampler
from forged.elastic.messages import JobPaused
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.log import SILENT
from forged.worker.daemon.registration import Registration
from forged.worker.data.provider import DataProvider
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.errors import NEWS_DIFFER
from forged.worker.worker_state.job_view import Commit

ME, OTHER = WorkerId("me", "host", 1), WorkerId("other", "host", 2)
PATIENCE_S = 10.0


class Scene:
    """A supply, and all that it is told and tells; `open` lets attempts get on."""

    worker = ME

    def __init__(self) -> None:
        self.acts: list[tuple[str, Any]] = []
        self.errors: list[Exception] = []
        """What goes wrong, one after the other."""
        self.failures: list[Exception] = []
        self.open = asyncio.Event()
        self.open.set()
        self.moved = asyncio.Event()
        self.owned = np.zeros(2, np.int64)

    # What it is for the supply: its custodian and its line.

    async def take_part(self, attempt: int, *, beside: bool = False) -> None:
        self._act("begins", attempt)
        try:
            await self.open.wait()
        except BaseException:
            with anyio.CancelScope(shield=True):
                # What is under way in a thread has to end first.
                await asyncio.sleep(0)
            self._act("ends", attempt)
            raise
        if self.errors:
            raise self.errors.pop(0)
        self._act("has", attempt)

    async def ready(self, attempt: int) -> bool:
        self._act("ready", attempt)
        return True

    async def rest(self, why: str) -> None:
        self._act("rests", why)

    async def settle(self, attempt: int, topology: ClusterTopology) -> None:
        self._act("settles", attempt)

    async def owners(self, topology: ClusterTopology) -> Any:
        return self.owned

    def hear_of_plan(self, attempt: int) -> None:
        self._act("plan", attempt)

    def doubt(self, shard: int) -> None:
        self._act("doubts", shard)

    def fail(self, error: Exception) -> None:
        self.failures.append(error)
        self._act("fails", str(error))

    def _act(self, what: str, about: Any) -> None:
        self.acts.append((what, about))
        self.moved.set()

    async def until(self, *acts: tuple[str, Any]) -> None:
        """Wait until all that has happened is this."""
        async with asyncio.timeout(PATIENCE_S):
            while self.acts != list(acts):
                assert len(self.acts) < len(acts), self.acts
                self.moved.clear()
                await self.moved.wait()

    @asynccontextmanager
    async def supply(self, sampler: ElasticSampler | None = None) -> AsyncIterator[DataProvider]:
        async with anyio.create_task_group() as tasks:
            yield DataProvider(cast("ShardHolder", self), sampler, cast("Registration", self), tasks, self.fail, SILENT)
            tasks.cancel_scope.cancel()


class TestTaking:
    async def test_is_done_when_that_was_said(self) -> None:
        it = Scene()
        async with it.supply() as supply:
            await supply.take(3)
        assert it.acts == [("begins", 3), ("has", 3), ("ready", 3)]

    @pytest.mark.parametrize(
        "error",
        [
            Unavailable("shards_missing", "the source is gone"),
            PeerError("frame_length", "it makes no sense"),
            *(RequestRefused(code, "not yet", "wait") for code in sorted(NEWS_DIFFER)),
        ],
        ids=lambda error: error.code,
    )
    async def test_is_tried_again_where_that_may_help(self, error: ForgedError) -> None:
        it = Scene()
        it.errors = [error, error]
        async with it.supply() as supply:
            await supply.take(3)
        tried = [("begins", 3), ("rests", error.message)]
        assert it.acts == [*tried * 2, ("begins", 3), ("has", 3), ("ready", 3)]

    async def test_ends_without_a_word_where_the_attempt_is_over(self) -> None:
        it = Scene()
        it.errors = [RequestRefused("attempt_over", "too late", "go by the newest")]
        async with it.supply() as supply:
            await supply.take(3)
        assert it.acts == [("begins", 3)]

    async def test_raises_what_is_the_scripts_mistake(self) -> None:
        it = Scene()
        it.errors = [RequestRefused("dataset_differs", "the others have another", "give the same")]
        async with it.supply() as supply:
            with pytest.raises(RequestRefused):
                await supply.take(3)


class TestFollowing:
    async def test_takes_the_data_while_the_caller_goes_on(self) -> None:
        it = Scene()
        async with it.supply() as supply:
            supply.follow(3)
            assert it.acts == []
            await it.until(("begins", 3), ("has", 3), ("ready", 3))

    async def test_the_same_attempt_twice_takes_it_once(self) -> None:
        it = Scene()
        async with it.supply() as supply:
            supply.follow(3)
            await it.until(("begins", 3), ("has", 3), ("ready", 3))
            supply.follow(3)
            supply.follow(4)
            await it.until(("begins", 3), ("has", 3), ("ready", 3), ("begins", 4), ("has", 4), ("ready", 4))

    async def test_another_attempt_begins_when_the_one_before_has_ended(self) -> None:
        it = Scene()
        it.open.clear()
        async with it.supply() as supply:
            supply.follow(3)
            await it.until(("begins", 3))
            supply.follow(4)
            it.open.set()
            await it.until(("begins", 3), ("ends", 3), ("begins", 4), ("has", 4), ("ready", 4))

    async def test_an_attempt_that_was_superseded_at_once_never_begins(self) -> None:
        it = Scene()
        async with it.supply() as supply:
            for attempt in (3, 4, 5):
                supply.follow(attempt)
            await it.until(("begins", 5), ("has", 5), ("ready", 5))

    async def test_none_ends_what_is_under_way(self) -> None:
        it = Scene()
        it.open.clear()
        async with it.supply() as supply:
            supply.follow(3)
            await it.until(("begins", 3))
            supply.follow(0)
            await it.until(("begins", 3), ("ends", 3))
        assert it.failures == []

    async def test_one_for_which_all_stop_begins_when_the_one_before_has_ended(self) -> None:
        it = Scene()
        it.open.clear()
        async with it.supply() as supply:
            supply.follow(3)
            await it.until(("begins", 3))
            supply.follow(0)
            it.open.set()
            await supply.take(4)
        assert it.acts == [("begins", 3), ("ends", 3), ("begins", 4), ("has", 4), ("ready", 4)]

    @pytest.mark.parametrize(
        "error",
        [RequestRefused("dataset_differs", "the others have another", "give the same"), OSError("the disk is gone")],
        ids=["refused", "by a store of the script's"],
    )
    async def test_tells_what_ends_the_training(self, error: Exception) -> None:
        it = Scene()
        it.errors = [error]
        async with it.supply() as supply:
            supply.follow(3)
            await it.until(("begins", 3), ("fails", str(error)))
            assert it.failures == [error]
            supply.follow(4)
            await it.until(("begins", 3), ("fails", str(error)), ("begins", 4), ("has", 4), ("ready", 4))

    async def test_of_one_that_is_over_is_no_failure(self) -> None:
        it = Scene()
        it.errors = [RequestRefused("attempt_over", "too late", "go by the newest")]
        async with it.supply() as supply:
            supply.follow(3)
            await it.until(("begins", 3))
        assert it.failures == []


class TestSettling:
    def commit(self) -> Commit:
        topology = ClusterTopology((ME, OTHER), 2)
        return Commit(3, ClusterTopology(), topology, None, None, 0.0, 0, "why")

    async def test_gives_a_sampler_that_draws_from_shards_their_owners(self) -> None:
        it, sampler = Scene(), ElasticSampler(8, 4, mode="sharded", dataset=Dataset.of(8, 2), shuffle=False)
        it.owned = np.array([1, 0])
        async with it.supply(sampler) as supply:
            await supply.settle(self.commit())
        assert it.acts == [("settles", 3)]
        assert [sampler.batch(rank, 2).tolist() for rank in (0, 1)] == [[4, 5], [0, 1]]

    async def test_asks_for_no_owners_where_everybody_reads_everything(self) -> None:
        it, sampler = Scene(), ElasticSampler(8, 4)
        async with it.supply(sampler) as supply:
            await supply.settle(self.commit())
        assert it.acts == [("settles", 3)]


async def test_what_is_said_about_the_data_is_heard_by_whom_it_concerns() -> None:
    it = Scene()
    async with it.supply() as supply:
        supply.hear(TransfersPlanned(5, TransferTotals()))
        supply.hear(CorruptShardFound("me", 7, "other"))
        supply.hear(CorruptShardFound("other", 8, "me"))
        supply.hear(JobPaused("lunch"))
    assert it.acts == [("plan", 5), ("doubts", 7)]
