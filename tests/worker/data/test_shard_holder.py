"""The shard holder with a scripted daemon."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO, cast

import anyio
import msgspec
import numpy as np
import pytest
from anyio.abc import TaskGroup

from forged.clock import SystemClock
from forged.data.messages import (
    OfferShards,
    OfferTaken,
    OwnersPage,
    ReadOwners,
    ReadTransfers,
    ReportCorruptShard,
    ReportLostShards,
    ReportShards,
    TransferPart,
    TransfersPlanned,
    TransferTotals,
)
from forged.data.model import DataShard
from forged.data.ownership.ownership import SHARDS_LOST
from forged.data.store.errors import StoreFailed
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import FunctionOrigin, ShardOrigin
from forged.data.store.port import OpenShard, Stamp
from forged.data.training import TrainingData
from forged.data.transfer.outcome import BadCopy, MissingShard, ShardInTransit, TransferProgress, TransferReport
from forged.data.transfer.schedule import Wanted
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import AttemptProgress
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import Nothing, Signal
from forged.retry import RetryPolicy
from forged.worker.data import shard_holder as holder_module
from forged.worker.data.shard_holder import (
    ATTEMPTS_KEPT_MAX,
    ORIGIN,
    REPORT_INTERVAL_S,
    ShardHolder,
)
from forged.worker.data.transfer_reports import ORIGIN_SILENCE_REPORTED_S, ORIGIN_TRIES, STORING_MAX_S, StoreFailure
from forged.worker.mesh import Mesh
from forged.worker.registration import Registration
from tests.data.damage import damage

ME, OTHER = WorkerId("me", "host", 1), WorkerId("other", "host", 2)
SHARDS, SIZE = 6, 100
PATIENCE_S = 30.0


def content(shard: int) -> bytes:
    return bytes([shard + 1]) * SIZE


def filled(*shards: int) -> MemoryShardStore:
    store = MemoryShardStore()
    for shard in shards:
        with store.receive(shard, Stamp.of(content(shard))) as arriving:
            arriving.write(content(shard))
            arriving.commit()
    return store


def int64(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def part(*wanted: int, keep: tuple[int, ...], owned: tuple[int, ...] = (), is_released: bool = False) -> TransferPart:
    """A part of a plan in which all shards come from the origin."""
    sources = np.full(len(wanted), ORIGIN, "<i4").tobytes()
    flags = bytes(shard in owned for shard in keep)
    return TransferPart((ME, OTHER), int64(*wanted), sources, 1, int64(*keep), flags, False, is_released)


class ScriptedDaemon:
    """Records requests to the daemon, and answers as the test says."""

    job = "run"
    worker = ME
    incarnation = b"i" * 16

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.part = part(keep=())
        self.pages: Callable[[int], OwnersPage] | None = None
        self.refusals: list[RequestRefused] = []
        self.errors: list[ForgedError] = []
        """Raised by the next reports of bad copies."""
        self.suspect: list[bytes] = []
        self.on_request: Callable[[Any], None] = lambda request: None

    async def send(self, request: Any) -> Any:
        self.requests.append(request)
        self.on_request(request)
        if isinstance(request, OfferShards):
            return OfferTaken(self.suspect.pop(0) if self.suspect else b"")
        if isinstance(request, ReportCorruptShard) and self.errors:
            raise self.errors.pop(0)
        if isinstance(request, ReadTransfers):
            if self.refusals:
                raise self.refusals.pop(0)
            return self.part
        if isinstance(request, ReadOwners):
            assert self.pages is not None
            return self.pages(request.after)
        return Nothing()

    def requests_of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


class Clock(SystemClock):
    """The real time plus what the test adds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._began_at = super().monotonic()

    def monotonic(self) -> float:
        return super().monotonic() + self.now

    def passed(self) -> float:
        """The real time since this clock was made."""
        return super().monotonic() - self._began_at


class NoMesh:
    """A mesh in which no worker is reachable."""

    given: Any = None

    def serve_shards(self, store: Any) -> None:
        self.given = store

    async def connect_for_shards(self, source: WorkerId) -> Any:
        raise Unavailable("peer_gone", f"{source} is not there", "")


class HolderFixture:
    """A shard holder with its store, a scripted daemon and recorded signals."""

    def __init__(
        self,
        store: MemoryShardStore | None = None,
        write: Callable[..., None] | None = None,
        *,
        origin: ShardOrigin | None = None,
        **terms: Any,
    ) -> None:
        self.store = store or MemoryShardStore()
        self.daemon, self.mesh = ScriptedDaemon(), NoMesh()
        self.signals: list[AttemptProgress] = []
        self.brought: list[int] = []
        self.clock = Clock()
        data = TrainingData(60, SHARDS, self.store, origin=origin or FunctionOrigin(write or self._write), **terms)
        self.holder = ShardHolder(
            data,
            ElasticTrainingConfig(),
            None,
            cast("Registration", self.daemon),
            self._record_signal,
            cast("Mesh", self.mesh),
            cast("TaskGroup", None),
            lambda error: None,
            self.clock,
            lambda: 0.0,
            uses_threads=False,
        )

    def _write(self, shard: DataShard, file: BinaryIO) -> None:
        self.brought.append(shard.shard_id)
        file.write(content(shard.shard_id))

    def _record_signal(self, signal: Signal) -> None:
        assert isinstance(signal, AttemptProgress)
        self.signals.append(signal)

    def waits(self, *under_way: ShardInTransit) -> bool:
        """Whether the holder reports waiting, with these shards in transit."""
        self.holder._reports.on_progress(TransferProgress(0, 0, 2, 0, 1.0, under_way))
        return self.signals[-1].is_waiting

    def disable_retries(self) -> None:
        """Make each try ask every source once."""
        manager = self.holder.transfers
        manager._context = replace(manager._bound_context, retry=RetryPolicy(attempts=1))

    async def run_attempt(self, attempt: int, given: TransferPart) -> None:
        self.daemon.part = given
        self.holder.on_fact(TransfersPlanned(attempt, TransferTotals()))
        await self.holder._try(attempt)


def topology(epoch: int = 3) -> ClusterTopology:
    return ClusterTopology((OTHER, ME), epoch)


def owners_page(generation: int, *places: int, more: bool = False) -> OwnersPage:
    return OwnersPage(generation, (ME, OTHER), np.array(places, "<i4").tobytes(), more)


class TestStoreFailure:
    def test_time_of_a_failing_store_counts_over_attempts_while_the_worker_has_a_plan(self) -> None:
        failure = StoreFailure()
        failure.plan_known(0.0)
        assert failure.reported_s(9.0) == 0.0
        failure.failed(10.0)
        assert failure.reported_s(14.0) == 4.0
        failure.pause(15.0)
        assert failure.reported_s(40.0) == 0.0
        failure.plan_known(50.0)
        assert failure.reported_s(53.0) == 8.0
        failure.failed(54.0)
        assert failure.reported_s(55.0) == 10.0
        failure.pause(55.0)
        failure.plan_known(60.0)
        failure.stored()
        assert failure.reported_s(61.0) == 0.0
        failure.plan_known(62.0)
        assert failure.reported_s(63.0) == 0.0

    async def test_new_attempt_reports_the_time_of_the_failing_store(self) -> None:
        fixture = HolderFixture(MemoryShardStore(bytes_max=SIZE))
        fixture.disable_retries()
        with pytest.raises(StoreFailed):
            await fixture.run_attempt(1, part(0, 2, keep=(0, 2)))
        reports = fixture.holder._reports
        reports.store_failed()
        fixture.clock.now += 7.0
        reports.own_turn()
        assert self.is_about(fixture, 7.0)
        fixture.clock.now += 2.0
        reports.end()
        with pytest.raises(StoreFailed):
            await fixture.run_attempt(2, part(2, keep=(0, 2)))
        assert fixture.signals[-1].attempt == 2
        assert self.is_about(fixture, 9.0)
        fixture.store._bytes_max = None
        await fixture.run_attempt(3, part(2, keep=(0, 2)))
        reports.own_turn()
        assert fixture.signals[-1].store_failing_s == 0.0

    async def test_time_between_two_attempts_does_not_count_for_a_failing_store(self) -> None:
        fixture = HolderFixture()
        fixture.daemon.refusals.append(RequestRefused("attempt_over", "attempt 1 is over", "use the newest attempt"))
        fixture.holder._reports.store_failed()
        fixture.holder.on_fact(TransfersPlanned(1, TransferTotals()))
        await fixture.holder.obtain(1)
        fixture.clock.now += 3600.0
        fixture.holder._reports.own_turn()
        assert self.is_about(fixture, 0.0)
        assert fixture.signals[-1].store_failing_s <= fixture.clock.passed()

    async def test_shard_that_is_stored_ends_the_time_of_a_failing_store(self) -> None:
        fixture = HolderFixture()
        reports = fixture.holder._reports
        reports.store_failed()
        fixture.clock.now += 7.0
        reports.own_turn()
        reports.on_progress(TransferProgress(3, 0, 5, 0, 1.0))
        assert self.is_about(fixture, 7.0)
        reports.on_progress(TransferProgress(4, 0, 5, 0, 1.0))
        assert fixture.signals[-1].store_failing_s == 0.0

    @staticmethod
    def is_about(fixture: HolderFixture, seconds: float) -> bool:
        """Whether the time of the failing store is this, and what the test has taken."""
        return seconds <= fixture.signals[-1].store_failing_s <= fixture.clock.now + fixture.clock.passed()


class TestAttempt:
    async def test_attempt_offers_held_shards_fetches_the_plan_and_reports(self) -> None:
        fixture = HolderFixture(filled(0, 1))
        await fixture.run_attempt(1, part(4, 2, keep=(0, 2, 4), owned=(0, 4)))
        (offered,) = fixture.daemon.requests_of(OfferShards)
        assert (offered.held, offered.held_bytes, offered.attempt, offered.more) == (int64(0, 1), 2 * SIZE, 1, False)
        assert fixture.brought == [2, 4]
        (reported,) = fixture.daemon.requests_of(ReportShards)
        assert (reported.transfers, reported.received, reported.missing) == (2, 2 * SIZE, 0)
        assert fixture.mesh.given is fixture.store

    async def test_unplanned_shards_are_kept_until_the_commit_and_dropped_after_it(self) -> None:
        fixture = HolderFixture(filled(0, 1))
        await fixture.run_attempt(1, part(4, keep=(0, 4), owned=(4,)))
        assert set(fixture.store.held()) == {0, 1, 4}
        assert not fixture.holder.owns(4)
        await fixture.holder._adopt(1, topology())
        assert set(fixture.store.held()) == {0, 4}
        assert [shard for shard in range(SHARDS) if fixture.holder.owns(shard)] == [4]

    async def test_large_offer_is_sent_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "OFFER_SHARDS_MAX", 2)
        fixture = HolderFixture(filled(0, 1, 2, 3, 4))
        await fixture.run_attempt(1, part(keep=()))
        offers = fixture.daemon.requests_of(OfferShards)
        assert [offer.held for offer in offers] == [int64(0, 1), int64(2, 3), int64(4)]
        assert [offer.more for offer in offers] == [True, True, False]

    async def test_each_part_of_an_offer_carries_its_checksums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "OFFER_SHARDS_MAX", 2)
        fixture = HolderFixture(filled(0, 1, 2))
        await fixture.run_attempt(1, part(keep=()))
        checksums = [Stamp.of(content(shard)).checksum[:8] for shard in range(3)]
        sent = [offer.marks for offer in fixture.daemon.requests_of(OfferShards)]
        assert sent == [checksums[0] + checksums[1], checksums[2]]

    async def test_replaced_copy_is_dropped_once_before_it_is_fetched(self) -> None:
        fixture = HolderFixture(filled(0, 1, 2))
        fixture.store.drop(1)
        fixture.store.put(1, [b"something else"])
        given = msgspec.structs.replace(part(1, keep=(0, 1, 2)), replaced=int64(1))
        await fixture.run_attempt(1, given)
        assert fixture.store.held()[1] == Stamp.of(content(1))
        assert fixture.brought == [1]
        await fixture.run_attempt(1, given)
        assert fixture.brought == [1], "a replaced copy is not dropped again in a later try"

    async def test_each_part_of_an_offer_carries_the_weight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "OFFER_SHARDS_MAX", 2)
        fixture = HolderFixture(filled(0, 1, 2), weight=2.5)
        await fixture.run_attempt(1, part(keep=()))
        assert [offer.weight for offer in fixture.daemon.requests_of(OfferShards)] == [2.5, 2.5]

    async def test_shards_outside_the_dataset_are_not_offered(self) -> None:
        fixture = HolderFixture(filled(0, SHARDS, 77))
        await fixture.run_attempt(1, part(keep=(0,)))
        assert fixture.daemon.requests_of(OfferShards)[0].held == int64(0)

    async def test_holder_reports_waiting_until_the_plan_is_ready(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "ASK_AGAIN_S", 0.001)
        fixture = HolderFixture()
        fixture.daemon.refusals = [RequestRefused("plan_pending", "not yet", "") for _ in range(3)]
        await fixture.holder._try(1)
        waiting = [signal.is_waiting for signal in fixture.signals]
        assert waiting[:5] == [True] * 4 + [False]
        assert not any(waiting[5:])
        assert {signal.attempt for signal in fixture.signals} == {1}

    async def test_holder_does_not_report_waiting_when_planned_shards_fail(self) -> None:
        fixture = HolderFixture()
        fixture.disable_retries()
        from_other = msgspec.structs.replace(part(2, keep=(2,)), sources=np.array([1], "<i4").tobytes())
        for _ in range(2):
            fixture.signals.clear()
            with pytest.raises(Unavailable):
                await fixture.run_attempt(1, from_other)
        assert not any(signal.is_waiting for signal in fixture.signals)

    async def test_holder_reports_lost_shards_while_it_waits_for_the_plan(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(holder_module, "ASK_AGAIN_S", 0.001)
        fixture = HolderFixture()
        fixture.daemon.refusals = [RequestRefused(SHARDS_LOST, "no worker has 14 shards", "") for _ in range(2)]
        await fixture.holder._try(1)
        assert [(signal.is_waiting, signal.problem) for signal in fixture.signals][:4] == [
            (True, ""),
            (True, "no worker has 14 shards"),
            (True, "no worker has 14 shards"),
            (False, ""),
        ]

    async def test_holder_stops_when_the_attempt_is_over(self) -> None:
        fixture = HolderFixture()
        fixture.daemon.refusals = [RequestRefused("attempt_over", "too late", "")]
        with pytest.raises(RequestRefused) as error:
            await fixture.run_attempt(1, part(keep=()))
        assert error.value.code == "attempt_over"
        assert fixture.daemon.requests_of(ReportShards) == []

    async def test_received_bytes_are_summed_over_all_tries(self) -> None:
        """Otherwise a later try would seem to make no progress."""
        fails = [True]

        def write(shard: DataShard, file: BinaryIO) -> None:
            file.write(content(shard.shard_id))
            if shard.shard_id == 2 and fails[0]:
                raise RequestRefused("shard_not_at_origin", "it is not there", "")

        fixture = HolderFixture(write=write)
        with pytest.raises(Unavailable) as error:
            await fixture.run_attempt(1, part(0, 2, keep=(0, 2)))
        assert error.value.code == "shards_missing"
        before = max(signal.data_bytes for signal in fixture.signals)
        fails[0] = False
        await fixture.run_attempt(1, part(0, 2, keep=(0, 2)))
        assert fixture.signals[-1].data_bytes == before + SIZE
        assert [signal.data_bytes for signal in fixture.signals] == sorted(
            signal.data_bytes for signal in fixture.signals
        )
        fixture.signals.clear()
        await fixture.run_attempt(2, part(keep=(0, 2)))
        assert max(signal.data_bytes for signal in fixture.signals) == 0


class TestCommit:
    async def test_commit_of_an_unplanned_attempt_reads_the_owners_and_drops_nothing(self) -> None:
        fixture = HolderFixture(filled(*range(SHARDS)))
        fixture.daemon.pages = lambda after: owners_page(3, 0, 1, 0, 1, 1, 0)
        await fixture.holder._adopt(9, topology())
        assert [shard for shard in range(SHARDS) if fixture.holder.owns(shard)] == [0, 2, 5]
        assert set(fixture.store.held()) == set(range(SHARDS))

    async def test_commit_releases_the_worker_only_when_the_plan_says_so(self) -> None:
        for is_released in (False, True):
            fixture = HolderFixture()
            await fixture.run_attempt(1, part(keep=(), is_released=is_released))
            assert not fixture.holder.is_released
            await fixture.holder._adopt(1, topology())
            assert fixture.holder.is_released == is_released

    async def test_commit_keeps_shards_offered_to_the_next_attempt(self) -> None:
        fixture = HolderFixture(filled(0, 1))
        await fixture.run_attempt(1, part(4, keep=(4,), owned=(4,)))
        await fixture.run_attempt(2, part(keep=(0, 4), owned=(0,)))
        await fixture.holder._adopt(1, topology())
        assert set(fixture.store.held()) == {0, 1, 4}
        assert [shard for shard in range(SHARDS) if fixture.holder.owns(shard)] == [4]
        await fixture.holder._adopt(2, topology(4))
        assert set(fixture.store.held()) == {0, 4}
        assert [shard for shard in range(SHARDS) if fixture.holder.owns(shard)] == [0]

    async def test_commit_drops_nothing_after_the_next_attempt_has_begun(self) -> None:
        fixture = HolderFixture(filled(0, 1))
        await fixture.run_attempt(1, part(keep=(0,), owned=(0,), is_released=True))
        fixture.daemon.refusals = [RequestRefused("attempt_over", "too late", "")]
        with pytest.raises(RequestRefused):
            await fixture.run_attempt(2, part(keep=()))
        await fixture.holder._adopt(1, topology())
        assert set(fixture.store.held()) == {0, 1}
        assert fixture.holder.owns(0)
        assert fixture.holder.is_released

    async def test_shard_being_dropped_is_not_offered_to_the_next_attempt(self) -> None:
        fixture = HolderFixture(filled(0, 1))
        await fixture.run_attempt(1, part(keep=(0,), owned=(0,)))
        async with fixture.holder._offering_or_dropping, anyio.create_task_group() as tasks:
            tasks.start_soon(fixture.run_attempt, 2, part(keep=(0,)))
            await anyio.wait_all_tasks_blocked()
            assert len(fixture.daemon.requests_of(OfferShards)) == 1
            fixture.store.drop(1)
            fixture.holder._offering_or_dropping.release()
            await anyio.wait_all_tasks_blocked()
            await fixture.holder._offering_or_dropping.acquire()
        assert [offer.held for offer in fixture.daemon.requests_of(OfferShards)] == [int64(0, 1), int64(0)]

    async def test_only_the_newest_attempts_are_remembered(self) -> None:
        fixture = HolderFixture(filled(0))
        for attempt in range(1, 3 + ATTEMPTS_KEPT_MAX):
            await fixture.run_attempt(attempt, part(keep=(0,), owned=(0,)))
        fixture.daemon.pages = lambda after: owners_page(3, *[1] * SHARDS)
        await fixture.holder._adopt(2, topology())
        assert not fixture.holder.owns(0)
        await fixture.holder._adopt(3, topology())
        assert fixture.holder.owns(0)

    async def test_commit_continues_when_a_shard_cannot_be_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = HolderFixture(filled(0, 1))

        def fail(shard: int) -> None:
            raise StoreFailed("store_failed", "the disk is read-only", "")

        monkeypatch.setattr(fixture.store, "drop", fail)
        await fixture.run_attempt(1, part(keep=(0,), owned=(0,)))
        await fixture.holder._adopt(1, topology())
        assert fixture.holder.owns(0)


class TestOwners:
    async def test_owners_are_ranks_of_the_committed_world(self) -> None:
        fixture = HolderFixture()
        fixture.daemon.pages = lambda after: owners_page(3, 0, 1, -1, 1, 0, 0)
        assert (await fixture.holder._read_owners(topology())).tolist() == [1, 0, -1, 0, 1, 1]

    async def test_owners_are_read_in_pages(self) -> None:
        fixture = HolderFixture()
        pages = {0: owners_page(3, 0, 1, more=True), 2: owners_page(3, 1, 1, 0, more=True), 5: owners_page(3, 0)}
        fixture.daemon.pages = pages.__getitem__
        assert (await fixture.holder._read_owners(topology())).tolist() == [1, 0, 0, 0, 1, 1]

    async def test_owners_are_retried_until_the_daemon_has_the_commit(self) -> None:
        fixture = HolderFixture()
        generations = iter([1, 2, 3])
        fixture.daemon.pages = lambda after: owners_page(next(generations), *[0] * SHARDS)
        assert (await fixture.holder._read_owners(topology())).tolist() == [1] * SHARDS

    async def test_owners_of_a_newer_generation_are_refused(self) -> None:
        fixture = HolderFixture()
        fixture.daemon.pages = lambda after: owners_page(4, *[0] * SHARDS)
        with pytest.raises(RequestRefused) as error:
            await fixture.holder._read_owners(topology())
        assert error.value.code == "generation_over"


class TestFullStore:
    async def test_worker_with_a_full_store_never_reports_waiting(self) -> None:
        """Such a signal now and then would keep the worker from ever being late."""
        fixture = HolderFixture(MemoryShardStore(bytes_max=10))
        fixture.disable_retries()
        with pytest.raises(StoreFailed):
            await fixture.run_attempt(1, part(2, 4, keep=(2, 4)))
        fixture.signals.clear()
        for _ in range(3):
            with pytest.raises(StoreFailed):
                await fixture.run_attempt(1, part(2, 4, keep=(2, 4)))
        assert fixture.signals
        assert not any(signal.is_waiting for signal in fixture.signals)
        assert not fixture.waits(ShardInTransit(2, None, 0, None, origin_silent_s=1.0))

    async def test_full_store_is_reported_once_per_attempt(self) -> None:
        fixture = HolderFixture(MemoryShardStore(bytes_max=10))
        fixture.disable_retries()
        for attempt in (1, 1, 2):
            with pytest.raises(StoreFailed):
                await fixture.run_attempt(attempt, part(2, 4, keep=(2, 4)))
        assert [
            (report.attempt, report.not_stored, report.missing) for report in fixture.daemon.requests_of(ReportShards)
        ] == [
            (1, 2, 0),
            (2, 2, 0),
        ]


class TestSuspectCopies:
    async def test_bad_suspect_copy_is_dropped_before_the_offer(self) -> None:
        fixture = HolderFixture(filled(0, 1, 2))
        damage(fixture.store, 1, b"!" * SIZE)
        damage(fixture.store, 2, b"!")
        for shard in (0, 1, 2, 5):
            fixture.holder._local.suspects.add(shard)
        await fixture.run_attempt(1, part(keep=(0,)))
        assert fixture.daemon.requests_of(OfferShards)[0].held == int64(0)

    async def test_suspect_copy_is_not_dropped_during_a_background_attempt(self) -> None:
        fixture = HolderFixture(filled(0, 1))
        damage(fixture.store, 1, b"!" * SIZE)
        fixture.holder._local.suspects.add(1)
        fixture.daemon.part = part(keep=(0, 1))
        fixture.holder.on_fact(TransfersPlanned(1, TransferTotals()))
        await fixture.holder._try(1, in_background=True)
        assert fixture.daemon.requests_of(OfferShards)[0].held == int64(0, 1), (
            "the offer names every shard, so that the daemon pauses training"
        )
        await fixture.run_attempt(2, part(keep=(0,)))
        assert fixture.daemon.requests_of(OfferShards)[-1].held == int64(0)

    async def test_suspect_named_by_the_daemon_is_verified_before_the_next_offer(self) -> None:
        fixture = HolderFixture(filled(0, 1, 2))
        damage(fixture.store, 1, b"!" * SIZE)
        fixture.daemon.suspect = [int64(1, 2), b""]
        await fixture.run_attempt(1, part(keep=(0, 2)))
        sent = [(offer.held, offer.verified) for offer in fixture.daemon.requests_of(OfferShards)]
        assert sent == [(int64(0, 1, 2), b""), (int64(0, 2), int64(1, 2))]
        await fixture.run_attempt(2, part(keep=(0, 2)))
        assert fixture.daemon.requests_of(OfferShards)[-1].verified == b""

    async def test_bad_copy_is_reported_while_other_shards_transfer(self) -> None:
        fixture = HolderFixture()
        was_reported = asyncio.Event()

        async def fetch(wanted: list[Wanted], generation: int) -> TransferReport:
            fixture.holder._reports.on_bad_copy(BadCopy(1, OTHER, "shard_corrupt", ""))
            fixture.holder._reports.on_bad_copy(BadCopy(2, None, "shard_corrupt", ""))
            async with asyncio.timeout(PATIENCE_S):
                await was_reported.wait()
            return TransferReport()

        fixture.holder.transfers.execute = fetch  # type: ignore[assignment,method-assign]
        fixture.daemon.on_request = lambda request: (
            was_reported.set() if isinstance(request, ReportCorruptShard) else None
        )
        await fixture.run_attempt(1, part(2, keep=(2,)))
        sent = [(report.source, report.shard) for report in fixture.daemon.requests_of(ReportCorruptShard)]
        assert sent == [(OTHER.id, 1)]

    async def test_bad_copy_report_counts_as_progress_at_once(self) -> None:
        fixture = HolderFixture()
        fixture.holder._reports.on_bad_copy(BadCopy(1, OTHER, "shard_corrupt", ""))
        fixture.holder._reports.on_bad_copy(BadCopy(2, OTHER, "shard_corrupt", ""))
        await fixture.run_attempt(1, part(2, keep=(2,)))
        sent = [signal.shards for signal in fixture.signals]
        assert {1, 2} <= set(sent)
        assert sent == sorted(sent), "progress never decreases"

    async def test_failed_bad_copy_report_is_repeated_before_the_worker_reports_ready(self) -> None:
        fixture = HolderFixture()
        fixture.daemon.errors = [Unavailable("store_failed", "the daemon's disk is full", "")]
        fixture.holder._reports.on_bad_copy(BadCopy(1, OTHER, "shard_corrupt", ""))
        await fixture.run_attempt(1, part(2, keep=(2,)))
        kinds = [
            type(request) for request in fixture.daemon.requests if not isinstance(request, OfferShards | ReadTransfers)
        ]
        assert kinds == [ReportCorruptShard, ReportCorruptShard, ReportShards]

    async def test_shards_missing_for_bad_copies_are_reported_once(self) -> None:
        fixture = HolderFixture()
        bad = TransferReport(
            missing=(MissingShard(1, ()), MissingShard(2, ())), bad_copies=(BadCopy(1, OTHER, "shard_corrupt", ""),)
        )
        for _ in range(3):
            await fixture.holder._reports._send_missing(4, bad)
        assert [(report.attempt, report.missing) for report in fixture.daemon.requests_of(ReportShards)] == [(4, 1)]

    async def test_shard_received_since_and_missing_again_is_reported_again(self) -> None:
        fixture = HolderFixture()
        bad = TransferReport(missing=(MissingShard(1, ()),), bad_copies=(BadCopy(1, OTHER, "shard_corrupt", ""),))
        await fixture.holder._reports._send_missing(4, bad)
        await fixture.run_attempt(5, part(1, keep=(1,)))
        assert fixture.brought == [1]
        for _ in range(2):
            await fixture.holder._reports._send_missing(6, bad)
        assert [report.attempt for report in fixture.daemon.requests_of(ReportShards) if report.missing] == [4, 6]

    async def test_bad_copies_of_the_origin_are_not_reported(self) -> None:
        fixture = HolderFixture()
        bad = TransferReport(missing=(MissingShard(1, ()),), bad_copies=(BadCopy(1, None, "shard_corrupt", ""),))
        await fixture.holder._reports._send_missing(4, bad)
        assert fixture.daemon.requests_of(ReportShards) == []

    async def test_long_verification_reports_waiting_each_second_while_it_progresses(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture = HolderFixture(filled(0, 1, 2, 3))
        read = os.pread

        def slow(fd: int, size: int, offset: int) -> bytes:
            fixture.clock.now += 0.3
            return read(fd, size, offset)

        monkeypatch.setattr(os, "pread", slow)
        for shard in range(4):
            fixture.holder._local.suspects.add(shard)
        before_offer: list[AttemptProgress] = []
        fixture.daemon.on_request = lambda request: (
            before_offer.extend(fixture.signals) if isinstance(request, OfferShards) else None
        )
        await fixture.run_attempt(1, part(keep=(0,)))
        # Each is read twice: the second time nothing more comes.
        assert [(signal.attempt, signal.is_waiting) for signal in before_offer] == [(1, True)] * 2

    async def test_suspect_copy_that_the_disk_cannot_read_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = HolderFixture(filled(0, 1))
        fixture.holder._local.suspects.add(1)

        def fail(fd: int, size: int, offset: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "pread", fail)
        await fixture.run_attempt(1, part(keep=(0,)))
        assert fixture.daemon.requests_of(OfferShards)[0].held == int64(0)

    async def test_copy_stays_suspect_until_it_can_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = HolderFixture(filled(0, 1))
        damage(fixture.store, 1, b"!" * SIZE)
        fixture.holder._local.suspects.add(1)
        with monkeypatch.context() as context:

            def fail(shard: int) -> OpenShard:
                raise StoreFailed("shard_store_failed", "too many open files", "")

            context.setattr(fixture.store, "open", fail)
            with pytest.raises(StoreFailed):
                await fixture.run_attempt(1, part(keep=(0,)))
        await fixture.run_attempt(1, part(keep=(0,)))
        assert fixture.daemon.requests_of(OfferShards)[0].held == int64(0)


def missing_at_origin(shard: DataShard, file: BinaryIO) -> None:
    raise RequestRefused("shard_not_at_origin", f"there is no shard-{shard.shard_id}", "put it there")


def unavailable_origin(shard: DataShard, file: BinaryIO) -> None:
    raise OSError("the bucket is unavailable_origin")


class TestShardsMissingAtTheOrigin:
    async def fail(self, fixture: HolderFixture, given: TransferPart, attempt: int = 1) -> ForgedError:
        """Run an attempt that fails; return its error."""
        with pytest.raises(Unavailable) as error:
            await fixture.run_attempt(attempt, given)
        return error.value

    async def test_lost_shards_are_reported_once_with_the_reason(self) -> None:
        fixture = HolderFixture(write=missing_at_origin)
        for _ in range(3):
            await self.fail(fixture, part(2, 4, keep=(2, 4)))
        (report,) = fixture.daemon.requests_of(ReportLostShards)
        assert (report.attempt, report.count, report.shards, report.certain) == (1, 2, [2, 4], True)
        assert report.reason == "shard 2: there is no shard-2 (put it there)"
        assert fixture.daemon.requests_of(ReportShards) == []

    async def test_lost_shards_are_reported_again_when_fewer_and_in_another_attempt(self) -> None:
        fixture = HolderFixture(write=missing_at_origin)
        await self.fail(fixture, part(2, 4, keep=(2, 4)))
        fixture.store.put(4, [content(4)])
        await self.fail(fixture, part(2, 4, keep=(2, 4)))
        await self.fail(fixture, part(2, keep=(2,)), attempt=2)
        sent = [(report.attempt, report.shards) for report in fixture.daemon.requests_of(ReportLostShards)]
        assert sent == [(1, [2, 4]), (1, [2]), (2, [2])]

    async def test_shard_is_certainly_lost_after_repeated_origin_failures(self) -> None:
        fixture = HolderFixture(write=unavailable_origin)
        fixture.disable_retries()
        for _ in range(ORIGIN_TRIES + 2):
            await self.fail(fixture, part(2, keep=(2,)))
        assert [report.certain for report in fixture.daemon.requests_of(ReportLostShards)] == [False, True]

    async def test_shard_is_certainly_lost_after_repeated_origin_hangs(self) -> None:
        origin = FunctionOrigin(unavailable_origin)
        # In the event loop an origin hangs in the awaitable that it returns.
        object.__setattr__(origin, "write_to", lambda shard, file: anyio.sleep_forever())
        fixture = HolderFixture(origin=origin, origin_timeout_s=0.001)
        for _ in range(ORIGIN_TRIES + 1):
            await self.fail(fixture, part(2, keep=(2,)))
        sent = fixture.daemon.requests_of(ReportLostShards)
        assert [report.certain for report in sent] == [False, True]
        assert {report.reason.partition(" (")[0] for report in sent} == {
            "shard 2: the origin sent no byte of it for 0.001 s"
        }

    async def test_holder_reports_waiting_while_it_reads_the_origin(self) -> None:
        """Otherwise a slow origin would make the worker fail."""
        fixture = HolderFixture()
        at_origin = ShardInTransit(2, None, 0, None, 0.0)
        assert fixture.waits(at_origin)
        assert fixture.waits(at_origin, ShardInTransit(3, None, 0, None, 400.0))
        assert not fixture.waits(at_origin, ShardInTransit(3, OTHER, 0, SIZE))
        assert not fixture.waits()

    async def test_holder_does_not_report_waiting_when_an_unreachable_worker_may_hold_the_shard(self) -> None:
        """Otherwise a hanging origin would hide that this worker cannot reach other workers."""
        fixture = HolderFixture()
        assert not fixture.waits(
            ShardInTransit(2, None, 0, None, 400.0), ShardInTransit(3, None, 0, None, 400.0, may_be_at_a_worker=True)
        )

    async def test_holder_does_not_report_waiting_while_an_origin_shard_hangs_in_the_store(self) -> None:
        fixture = HolderFixture()
        at_origin, in_store = ShardInTransit(2, None, 0, None, 400.0), ShardInTransit(3, None, SIZE, None)
        assert fixture.waits(at_origin, in_store)
        fixture.clock.now += STORING_MAX_S
        assert not fixture.waits(at_origin, in_store)
        assert fixture.waits(at_origin)
        assert fixture.waits(in_store)

    async def test_holder_does_not_report_waiting_on_a_hanging_store_after_a_missing_shard(self) -> None:
        fixture = HolderFixture(write=missing_at_origin)
        await self.fail(fixture, part(2, keep=(2,)))
        in_store = ShardInTransit(2, None, SIZE, None)
        assert fixture.waits(in_store)
        fixture.clock.now += STORING_MAX_S
        assert not fixture.waits(in_store)
        assert fixture.waits()

    async def test_silent_origin_is_reported_until_it_sends_bytes(self) -> None:
        fixture = HolderFixture()

        def problem(*silences: float | None) -> str:
            fixture.waits(*(ShardInTransit(shard, None, 0, None, silence) for shard, silence in enumerate(silences)))
            return fixture.signals[-1].problem

        assert problem(ORIGIN_SILENCE_REPORTED_S - 0.1, None) == ""
        assert problem(1.0, ORIGIN_SILENCE_REPORTED_S, None) == "the origin has sent no byte of shard 1 for 5 s"
        more = "nor of 2 other requested shards"
        assert problem(6.0, 41.7, 7.0) == f"the origin has sent no byte of shard 1 for 42 s, {more}"
        assert problem(0.1, None) == ""

    async def test_silent_origin_is_reported_with_the_previous_error(self) -> None:
        fixture = HolderFixture(write=missing_at_origin)
        error = await self.fail(fixture, part(2, keep=(2,)))
        await fixture.holder._pause(str(error))
        fixture.waits(ShardInTransit(2, None, 0, None, 42.0))
        assert fixture.signals[-1].problem == f"the origin has sent no byte of shard 2 for 42 s; before: {error}"
        fixture.waits(ShardInTransit(2, None, 0, None, 0.0))
        assert fixture.signals[-1].problem == str(error)

    async def test_holder_reports_waiting_between_tries_without_a_new_offer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture = HolderFixture(filled(0), write=missing_at_origin)
        error = await self.fail(fixture, part(2, keep=(0, 2)))
        assert not fixture.signals[-1].is_waiting
        fixture.signals.clear()
        pauses = await self.pauses_of(fixture, str(error), 12, monkeypatch)
        assert all(signal.is_waiting and "there is no shard-2" in signal.problem for signal in fixture.signals)
        assert max(pauses) <= REPORT_INTERVAL_S
        assert len(fixture.signals) == len(pauses)
        await self.fail(fixture, part(2, keep=(0, 2)))
        assert all(signal.is_waiting for signal in fixture.signals)
        assert len(fixture.daemon.requests_of(OfferShards)) == 1

    async def pauses_of(
        self, fixture: HolderFixture, why: str, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> list[float]:
        """Pause `times` times; return the durations slept."""
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        with monkeypatch.context() as context:
            context.setattr(anyio, "sleep", sleep)
            for _ in range(times):
                await fixture.holder._pause(why)
        return slept

    async def test_pause_between_tries_grows_until_a_shard_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gives: set[int] = set()

        def write(shard: DataShard, file: BinaryIO) -> None:
            file.write(content(shard.shard_id)) if shard.shard_id in gives else missing_at_origin(shard, file)

        fixture = HolderFixture(write=write)
        await self.fail(fixture, part(2, 4, keep=(2, 4)))
        pauses = [sum(await self.pauses_of(fixture, "why", 1, monkeypatch)) for _ in range(8)]
        assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
        gives.add(4)
        await self.fail(fixture, part(2, 4, keep=(2, 4)))
        assert sum(await self.pauses_of(fixture, "why", 1, monkeypatch)) == pytest.approx(0.2)
        await self.fail(fixture, part(2, keep=(2,)), attempt=2)
        assert sum(await self.pauses_of(fixture, "why", 1, monkeypatch)) == pytest.approx(0.2)

    async def test_holder_stops_reporting_waiting_when_the_shard_has_arrived(self) -> None:
        gives: set[int] = set()

        def write(shard: DataShard, file: BinaryIO) -> None:
            file.write(content(shard.shard_id)) if shard.shard_id in gives else missing_at_origin(shard, file)

        fixture = HolderFixture(write=write)
        await self.fail(fixture, part(2, keep=(2,)))
        gives.add(2)
        await fixture.run_attempt(1, part(2, keep=(2,)))
        (reported,) = fixture.daemon.requests_of(ReportShards)
        assert reported.transfers == 1
        fixture.signals.clear()
        await fixture.run_attempt(1, part(2, keep=(2,)))
        assert {(signal.is_waiting, signal.problem) for signal in fixture.signals[1:]} == {(False, "")}

    async def test_full_store_of_this_host_is_not_reported_as_lost_shards(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixture = HolderFixture(MemoryShardStore(bytes_max=10))
        fixture.disable_retries()
        error = await self.fail(fixture, part(2, keep=(2,)))
        assert isinstance(error, StoreFailed)
        assert error.message == "cannot store shard 2 (no space (free some space))"
        fixture.signals.clear()
        await self.pauses_of(fixture, str(error), 1, monkeypatch)
        assert [(signal.is_waiting, signal.problem) for signal in fixture.signals] == [(False, str(error))]
        assert fixture.daemon.requests_of(ReportLostShards) == []
