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
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import FunctionOrigin, ShardOrigin
from forged.data.store.port import OpenShard, Stamp, StoreFailed
from forged.data.training import TrainingData
from forged.data.transfer.outcome import BadCopy, MissingShard, ShardInTransit, TransferProgress, TransferReport
from forged.data.transfer.schedule import Wanted
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import AttemptProgress
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import Nothing, Signal
from forged.retry import RetryPolicy
from forged.worker.daemon.registration import Registration
from forged.worker.data import shard_holder as holder_module
from forged.worker.data.shard_holder import (
    ATTEMPTS_KEPT_MAX,
    ORIGIN,
    REPORT_INTERVAL_S,
    ShardHolder,
)
from forged.worker.data.transfer_reports import ORIGIN_SILENCE_REPORTED_S, ORIGIN_TRIES, STORING_MAX_S
from forged.worker.mesh import Mesh

ME, OTHER = WorkerId("me", "host", 1), WorkerId("other", "host", 2)
SHARDS, SIZE = 6, 100
PATIENCE_S = 10.0


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


class Line:
    """Records requests to the daemon, and answers as the test says."""

    job = "run"
    worker = ME
    incarnation = b"i" * 16

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.part = part(keep=())
        self.pages: Callable[[int], OwnersPage] | None = None
        self.refusals: list[RequestRefused] = []
        self.errors: list[ForgedError] = []
        """Raised by the next reports of bad copies."""
        self.suspect: list[bytes] = []
        self.heard: Callable[[Any], None] = lambda request: None

    async def say(self, request: Any) -> Any:
        self.said.append(request)
        self.heard(request)
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

    def told(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.said if isinstance(request, kind)]


class Clock(SystemClock):
    """The real time plus what the test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.now


class NoMesh:
    """A mesh in which no worker is reachable."""

    given: Any = None

    def serve_shards(self, store: Any) -> None:
        self.given = store

    async def connect_for_shards(self, source: WorkerId) -> Any:
        raise Unavailable("peer_gone", f"{source} is not there", "")


class Scene:
    """A shard holder with its store, scripted daemon and signals."""

    def __init__(
        self,
        store: MemoryShardStore | None = None,
        write: Callable[..., None] | None = None,
        *,
        origin: ShardOrigin | None = None,
        **terms: Any,
    ) -> None:
        self.store = store or MemoryShardStore()
        self.line, self.mesh = Line(), NoMesh()
        self.signals: list[AttemptProgress] = []
        self.brought: list[int] = []
        self.clock = Clock()
        data = TrainingData(60, SHARDS, self.store, origin=origin or FunctionOrigin(write or self._write), **terms)
        self.holder = ShardHolder(
            data,
            ElasticTrainingConfig(),
            None,
            cast("Registration", self.line),
            self._hear,
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

    def _hear(self, signal: Signal) -> None:
        assert isinstance(signal, AttemptProgress)
        self.signals.append(signal)

    def waits(self, *under_way: ShardInTransit) -> bool:
        """Whether the holder reports waiting, with these shards in transit."""
        self.holder._reports.on_progress(TransferProgress(0, 0, 2, 0, 1.0, under_way))
        return self.signals[-1].is_waiting

    def tries_once(self) -> None:
        """Make each try ask every source once."""
        manager = self.holder.transfers
        manager._context = replace(manager._bound_context, retry=RetryPolicy(attempts=1))

    async def take_part(self, attempt: int, given: TransferPart) -> None:
        self.line.part = given
        self.holder.on_fact(TransfersPlanned(attempt, TransferTotals()))
        await self.holder._try(attempt)


def topology(epoch: int = 3) -> ClusterTopology:
    return ClusterTopology((OTHER, ME), epoch)


def owners_page(generation: int, *places: int, more: bool = False) -> OwnersPage:
    return OwnersPage(generation, (ME, OTHER), np.array(places, "<i4").tobytes(), more)


class TestTakingPart:
    async def test_is_to_say_what_is_held_fetch_what_is_told_and_say_so(self) -> None:
        it = Scene(filled(0, 1))
        await it.take_part(1, part(4, 2, keep=(0, 2, 4), owned=(0, 4)))
        (offered,) = it.line.told(OfferShards)
        assert (offered.held, offered.held_bytes, offered.attempt, offered.more) == (int64(0, 1), 2 * SIZE, 1, False)
        assert it.brought == [2, 4]
        (reported,) = it.line.told(ReportShards)
        assert (reported.transfers, reported.received, reported.missing) == (2, 2 * SIZE, 0)
        assert it.mesh.given is it.store

    async def test_is_to_hold_on_to_everything_before_the_commit_and_to_no_more_behind_it(self) -> None:
        it = Scene(filled(0, 1))
        await it.take_part(1, part(4, keep=(0, 4), owned=(4,)))
        assert set(it.store.held()) == {0, 1, 4}
        assert not it.holder.owns(4)
        await it.holder._adopt(1, topology())
        assert set(it.store.held()) == {0, 4}
        assert [shard for shard in range(SHARDS) if it.holder.owns(shard)] == [4]

    async def test_is_to_offer_in_parts_what_is_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "OFFER_SHARDS_MAX", 2)
        it = Scene(filled(0, 1, 2, 3, 4))
        await it.take_part(1, part(keep=()))
        offers = it.line.told(OfferShards)
        assert [offer.held for offer in offers] == [int64(0, 1), int64(2, 3), int64(4)]
        assert [offer.more for offer in offers] == [True, True, False]

    async def test_is_to_say_what_each_copy_is_with_each_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "OFFER_SHARDS_MAX", 2)
        it = Scene(filled(0, 1, 2))
        await it.take_part(1, part(keep=()))
        checksums = [Stamp.of(content(shard)).checksum[:8] for shard in range(3)]
        said = [offer.marks for offer in it.line.told(OfferShards)]
        assert said == [checksums[0] + checksums[1], checksums[2]]

    async def test_is_to_drop_what_others_hold_otherwise_before_it_is_fetched_and_once(self) -> None:
        it = Scene(filled(0, 1, 2))
        it.store.drop(1)
        it.store.put(1, [b"something else"])
        given = msgspec.structs.replace(part(1, keep=(0, 1, 2)), replaced=int64(1))
        await it.take_part(1, given)
        assert it.store.held()[1] == Stamp.of(content(1))
        assert it.brought == [1]
        await it.take_part(1, given)
        assert it.brought == [1], "what has come is not dropped when it is tried once more"

    async def test_is_to_say_how_much_it_should_hold_with_each_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "OFFER_SHARDS_MAX", 2)
        it = Scene(filled(0, 1, 2), weight=2.5)
        await it.take_part(1, part(keep=()))
        assert [offer.weight for offer in it.line.told(OfferShards)] == [2.5, 2.5]

    async def test_is_to_offer_nothing_that_is_none_of_the_dataset(self) -> None:
        it = Scene(filled(0, SHARDS, 77))
        await it.take_part(1, part(keep=(0,)))
        assert it.line.told(OfferShards)[0].held == int64(0)

    async def test_is_to_say_that_it_waits_as_long_as_nothing_is_planned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "ASK_AGAIN_S", 0.001)
        it = Scene()
        it.line.refusals = [RequestRefused("plan_pending", "not yet", "") for _ in range(3)]
        await it.holder._try(1)
        waiting = [signal.is_waiting for signal in it.signals]
        assert waiting[:5] == [True] * 4 + [False]
        assert not any(waiting[5:])
        assert {signal.attempt for signal in it.signals} == {1}

    async def test_is_to_wait_for_nobody_when_it_is_known_what_to_fetch_and_that_does_not_come(self) -> None:
        it = Scene()
        it.tries_once()
        from_other = msgspec.structs.replace(part(2, keep=(2,)), sources=np.array([1], "<i4").tobytes())
        for _ in range(2):
            it.signals.clear()
            with pytest.raises(Unavailable):
                await it.take_part(1, from_other)
        assert not any(signal.is_waiting for signal in it.signals)

    async def test_is_to_say_what_nobody_has_while_it_waits_for_that(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder_module, "ASK_AGAIN_S", 0.001)
        it = Scene()
        it.line.refusals = [RequestRefused(SHARDS_LOST, "no worker has 14 shards", "") for _ in range(2)]
        await it.holder._try(1)
        assert [(signal.is_waiting, signal.trouble) for signal in it.signals][:4] == [
            (True, ""),
            (True, "no worker has 14 shards"),
            (True, "no worker has 14 shards"),
            (False, ""),
        ]

    async def test_is_over_when_the_attempt_is(self) -> None:
        it = Scene()
        it.line.refusals = [RequestRefused("attempt_over", "too late", "")]
        with pytest.raises(RequestRefused) as error:
            await it.take_part(1, part(keep=()))
        assert error.value.code == "attempt_over"
        assert it.line.told(ReportShards) == []

    async def test_counts_the_bytes_of_all_tries_together(self) -> None:
        """Or a later try would seem to make no progress."""
        fails = [True]

        def write(shard: DataShard, file: BinaryIO) -> None:
            file.write(content(shard.shard_id))
            if shard.shard_id == 2 and fails[0]:
                raise RequestRefused("shard_not_at_origin", "it is not there", "")

        it = Scene(write=write)
        with pytest.raises(Unavailable) as error:
            await it.take_part(1, part(0, 2, keep=(0, 2)))
        assert error.value.code == "shards_missing"
        before = max(signal.data_bytes for signal in it.signals)
        fails[0] = False
        await it.take_part(1, part(0, 2, keep=(0, 2)))
        assert it.signals[-1].data_bytes == before + SIZE
        assert [signal.data_bytes for signal in it.signals] == sorted(signal.data_bytes for signal in it.signals)
        it.signals.clear()
        await it.take_part(2, part(keep=(0, 2)))
        assert max(signal.data_bytes for signal in it.signals) == 0


class TestSettling:
    async def test_an_attempt_that_was_not_answered_asks_who_owns_what_and_drops_nothing(self) -> None:
        it = Scene(filled(*range(SHARDS)))
        it.line.pages = lambda after: owners_page(3, 0, 1, 0, 1, 1, 0)
        await it.holder._adopt(9, topology())
        assert [shard for shard in range(SHARDS) if it.holder.owns(shard)] == [0, 2, 5]
        assert set(it.store.held()) == set(range(SHARDS))

    async def test_releases_who_was_told_so_and_nobody_else(self) -> None:
        for is_released in (False, True):
            it = Scene()
            await it.take_part(1, part(keep=(), is_released=is_released))
            assert not it.holder.is_released
            await it.holder._adopt(1, topology())
            assert it.holder.is_released == is_released

    async def test_drops_nothing_that_was_offered_to_the_next_attempt_already(self) -> None:
        it = Scene(filled(0, 1))
        await it.take_part(1, part(4, keep=(4,), owned=(4,)))
        await it.take_part(2, part(keep=(0, 4), owned=(0,)))
        await it.holder._adopt(1, topology())
        assert set(it.store.held()) == {0, 1, 4}
        assert [shard for shard in range(SHARDS) if it.holder.owns(shard)] == [4]
        await it.holder._adopt(2, topology(4))
        assert set(it.store.held()) == {0, 4}
        assert [shard for shard in range(SHARDS) if it.holder.owns(shard)] == [0]

    async def test_drops_nothing_when_the_next_attempt_has_only_begun(self) -> None:
        it = Scene(filled(0, 1))
        await it.take_part(1, part(keep=(0,), owned=(0,), is_released=True))
        it.line.refusals = [RequestRefused("attempt_over", "too late", "")]
        with pytest.raises(RequestRefused):
            await it.take_part(2, part(keep=()))
        await it.holder._adopt(1, topology())
        assert set(it.store.held()) == {0, 1}
        assert it.holder.owns(0)
        assert it.holder.is_released

    async def test_offers_nothing_to_the_next_attempt_that_is_just_being_dropped(self) -> None:
        it = Scene(filled(0, 1))
        await it.take_part(1, part(keep=(0,), owned=(0,)))
        async with it.holder._offering_or_dropping, anyio.create_task_group() as tasks:
            tasks.start_soon(it.take_part, 2, part(keep=(0,)))
            await anyio.wait_all_tasks_blocked()
            assert len(it.line.told(OfferShards)) == 1
            it.store.drop(1)
            it.holder._offering_or_dropping.release()
            await anyio.wait_all_tasks_blocked()
            await it.holder._offering_or_dropping.acquire()
        assert [offer.held for offer in it.line.told(OfferShards)] == [int64(0, 1), int64(0)]

    async def test_remembers_only_the_newest_attempts(self) -> None:
        it = Scene(filled(0))
        for attempt in range(1, 3 + ATTEMPTS_KEPT_MAX):
            await it.take_part(attempt, part(keep=(0,), owned=(0,)))
        it.line.pages = lambda after: owners_page(3, *[1] * SHARDS)
        await it.holder._adopt(2, topology())
        assert not it.holder.owns(0)
        await it.holder._adopt(3, topology())
        assert it.holder.owns(0)

    async def test_goes_on_where_something_cannot_be_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        it = Scene(filled(0, 1))

        def fail(shard: int) -> None:
            raise StoreFailed("store_failed", "the disk is read-only", "")

        monkeypatch.setattr(it.store, "drop", fail)
        await it.take_part(1, part(keep=(0,), owned=(0,)))
        await it.holder._adopt(1, topology())
        assert it.holder.owns(0)


class TestTheOwners:
    async def test_are_ranks_in_the_world_that_was_committed(self) -> None:
        it = Scene()
        it.line.pages = lambda after: owners_page(3, 0, 1, -1, 1, 0, 0)
        assert (await it.holder._read_owners(topology())).tolist() == [1, 0, -1, 0, 1, 1]

    async def test_come_in_pages(self) -> None:
        it = Scene()
        pages = {0: owners_page(3, 0, 1, more=True), 2: owners_page(3, 1, 1, 0, more=True), 5: owners_page(3, 0)}
        it.line.pages = pages.__getitem__
        assert (await it.holder._read_owners(topology())).tolist() == [1, 0, 0, 0, 1, 1]

    async def test_are_waited_for_until_the_daemon_has_heard_of_its_commit(self) -> None:
        it = Scene()
        generations = iter([1, 2, 3])
        it.line.pages = lambda after: owners_page(next(generations), *[0] * SHARDS)
        assert (await it.holder._read_owners(topology())).tolist() == [1] * SHARDS

    async def test_of_a_newer_world_are_refused(self) -> None:
        it = Scene()
        it.line.pages = lambda after: owners_page(4, *[0] * SHARDS)
        with pytest.raises(RequestRefused) as error:
            await it.holder._read_owners(topology())
        assert error.value.code == "generation_over"


class TestAFullStore:
    async def test_is_why_others_wait_for_this_worker_which_never_says_that_it_waits_for_them(self) -> None:
        """Such a signal now and then would keep the worker from ever being late."""
        it = Scene(MemoryShardStore(bytes_max=10))
        it.tries_once()
        with pytest.raises(StoreFailed):
            await it.take_part(1, part(2, 4, keep=(2, 4)))
        it.signals.clear()
        for _ in range(3):
            with pytest.raises(StoreFailed):
                await it.take_part(1, part(2, 4, keep=(2, 4)))
        assert it.signals
        assert not any(signal.is_waiting for signal in it.signals)
        assert not it.waits(ShardInTransit(2, None, 0, None, origin_silent_s=1.0))

    async def test_is_told_once_in_an_attempt(self) -> None:
        it = Scene(MemoryShardStore(bytes_max=10))
        it.tries_once()
        for attempt in (1, 1, 2):
            with pytest.raises(StoreFailed):
                await it.take_part(attempt, part(2, 4, keep=(2, 4)))
        assert [(said.attempt, said.not_stored, said.missing) for said in it.line.told(ReportShards)] == [
            (1, 2, 0),
            (2, 2, 0),
        ]


class TestDoubt:
    async def test_of_a_bad_copy_drops_it_before_it_is_offered(self) -> None:
        it = Scene(filled(0, 1, 2))
        it.store.damage(1, b"!" * SIZE)
        it.store.damage(2, b"!")
        for shard in (0, 1, 2, 5):
            it.holder._local.suspects.add(shard)
        await it.take_part(1, part(keep=(0,)))
        assert it.line.told(OfferShards)[0].held == int64(0)

    async def test_drops_nothing_that_may_be_trained_with(self) -> None:
        it = Scene(filled(0, 1))
        it.store.damage(1, b"!" * SIZE)
        it.holder._local.suspects.add(1)
        it.line.part = part(keep=(0, 1))
        it.holder.on_fact(TransfersPlanned(1, TransferTotals()))
        await it.holder._try(1, in_background=True)
        assert it.line.told(OfferShards)[0].held == int64(0, 1), "it says what it has, and the daemon has all stop"
        await it.take_part(2, part(keep=(0,)))
        assert it.line.told(OfferShards)[-1].held == int64(0)

    async def test_that_the_daemon_remembers_is_looked_into_before_all_is_said_anew(self) -> None:
        it = Scene(filled(0, 1, 2))
        it.store.damage(1, b"!" * SIZE)
        it.line.suspect = [int64(1, 2), b""]
        await it.take_part(1, part(keep=(0, 2)))
        said = [(offer.held, offer.verified) for offer in it.line.told(OfferShards)]
        assert said == [(int64(0, 1, 2), b""), (int64(0, 2), int64(1, 2))]
        await it.take_part(2, part(keep=(0, 2)))
        assert it.line.told(OfferShards)[-1].verified == b""

    async def test_is_told_while_the_rest_is_still_on_its_way(self) -> None:
        it = Scene()
        told = asyncio.Event()

        async def fetch(wanted: list[Wanted], generation: int) -> TransferReport:
            it.holder._reports.on_bad_copy(BadCopy(1, OTHER, "shard_corrupt", ""))
            it.holder._reports.on_bad_copy(BadCopy(2, None, "shard_corrupt", ""))
            async with asyncio.timeout(PATIENCE_S):
                await told.wait()
            return TransferReport()

        it.holder.transfers.execute = fetch  # type: ignore[assignment,method-assign]
        it.line.heard = lambda request: told.set() if isinstance(request, ReportCorruptShard) else None
        await it.take_part(1, part(2, keep=(2,)))
        said = [(said.source, said.shard) for said in it.line.told(ReportCorruptShard)]
        assert said == [(OTHER.id, 1)]

    async def test_gets_the_worker_on_which_is_told_at_once(self) -> None:
        it = Scene()
        it.holder._reports.on_bad_copy(BadCopy(1, OTHER, "shard_corrupt", ""))
        it.holder._reports.on_bad_copy(BadCopy(2, OTHER, "shard_corrupt", ""))
        await it.take_part(1, part(2, keep=(2,)))
        told = [signal.shards for signal in it.signals]
        assert {1, 2} <= set(told)
        assert told == sorted(told), "what it has got on with is not taken back"

    async def test_that_could_not_be_told_is_told_before_the_worker_says_that_it_is_done(self) -> None:
        it = Scene()
        it.line.errors = [Unavailable("store_failed", "the daemon's disk is full", "")]
        it.holder._reports.on_bad_copy(BadCopy(1, OTHER, "shard_corrupt", ""))
        await it.take_part(1, part(2, keep=(2,)))
        kinds = [type(said) for said in it.line.said if not isinstance(said, OfferShards | ReadTransfers)]
        assert kinds == [ReportCorruptShard, ReportCorruptShard, ReportShards]

    async def test_is_told_of_shards_that_are_missing_for_bad_copies_once(self) -> None:
        it = Scene()
        bad = TransferReport(
            missing=(MissingShard(1, ()), MissingShard(2, ())), bad_copies=(BadCopy(1, OTHER, "shard_corrupt", ""),)
        )
        for _ in range(3):
            await it.holder._reports._send_missing(4, bad)
        assert [(said.attempt, said.missing) for said in it.line.told(ReportShards)] == [(4, 1)]

    async def test_is_told_again_of_a_shard_that_has_come_since(self) -> None:
        it = Scene()
        bad = TransferReport(missing=(MissingShard(1, ()),), bad_copies=(BadCopy(1, OTHER, "shard_corrupt", ""),))
        await it.holder._reports._send_missing(4, bad)
        await it.take_part(5, part(1, keep=(1,)))
        assert it.brought == [1]
        for _ in range(2):
            await it.holder._reports._send_missing(6, bad)
        assert [said.attempt for said in it.line.told(ReportShards) if said.missing] == [4, 6]

    async def test_is_not_told_of_what_the_origin_sends(self) -> None:
        it = Scene()
        bad = TransferReport(missing=(MissingShard(1, ()),), bad_copies=(BadCopy(1, None, "shard_corrupt", ""),))
        await it.holder._reports._send_missing(4, bad)
        assert it.line.told(ReportShards) == []

    async def test_that_takes_long_is_said_to_last_each_second_as_long_as_it_gets_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it = Scene(filled(0, 1, 2, 3))
        read = os.pread

        def slow(fd: int, size: int, offset: int) -> bytes:
            it.clock.now += 0.3
            return read(fd, size, offset)

        monkeypatch.setattr(os, "pread", slow)
        for shard in range(4):
            it.holder._local.suspects.add(shard)
        said: list[AttemptProgress] = []
        it.line.heard = lambda request: said.extend(it.signals) if isinstance(request, OfferShards) else None
        await it.take_part(1, part(keep=(0,)))
        # Each is read twice: the second time nothing more comes.
        assert [(signal.attempt, signal.is_waiting) for signal in said] == [(1, True)] * 2

    async def test_of_a_copy_that_the_disk_does_not_give_any_more_drops_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it = Scene(filled(0, 1))
        it.holder._local.suspects.add(1)

        def fail(fd: int, size: int, offset: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "pread", fail)
        await it.take_part(1, part(keep=(0,)))
        assert it.line.told(OfferShards)[0].held == int64(0)

    async def test_lasts_until_the_copy_could_be_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        it = Scene(filled(0, 1))
        it.store.damage(1, b"!" * SIZE)
        it.holder._local.suspects.add(1)
        with monkeypatch.context() as context:

            def fail(shard: int) -> OpenShard:
                raise StoreFailed("shard_store_failed", "too many open files", "")

            context.setattr(it.store, "open", fail)
            with pytest.raises(StoreFailed):
                await it.take_part(1, part(keep=(0,)))
        await it.take_part(1, part(keep=(0,)))
        assert it.line.told(OfferShards)[0].held == int64(0)


def no_file(shard: DataShard, file: BinaryIO) -> None:
    raise RequestRefused("shard_not_at_origin", f"there is no shard-{shard.shard_id}", "put it there")


def away(shard: DataShard, file: BinaryIO) -> None:
    raise OSError("the bucket is away")


class TestWhatTheOriginDoesNotGive:
    async def fail(self, it: Scene, given: TransferPart, attempt: int = 1) -> ForgedError:
        """A try, and why it fails."""
        with pytest.raises(Unavailable) as error:
            await it.take_part(attempt, given)
        return error.value

    async def test_is_named_once_with_the_reason(self) -> None:
        it = Scene(write=no_file)
        for _ in range(3):
            await self.fail(it, part(2, 4, keep=(2, 4)))
        (said,) = it.line.told(ReportLostShards)
        assert (said.attempt, said.count, said.shards, said.certain) == (1, 2, [2, 4], True)
        assert said.reason == "shard 2: there is no shard-2 (put it there)"
        assert it.line.told(ReportShards) == []

    async def test_is_named_anew_when_it_is_less_and_in_another_attempt(self) -> None:
        it = Scene(write=no_file)
        await self.fail(it, part(2, 4, keep=(2, 4)))
        it.store.put(4, [content(4)])
        await self.fail(it, part(2, 4, keep=(2, 4)))
        await self.fail(it, part(2, keep=(2,)), attempt=2)
        told = [(said.attempt, said.shards) for said in it.line.told(ReportLostShards)]
        assert told == [(1, [2, 4]), (1, [2]), (2, [2])]

    async def test_is_certain_to_be_lost_when_it_has_failed_for_a_while(self) -> None:
        it = Scene(write=away)
        it.tries_once()
        for _ in range(ORIGIN_TRIES + 2):
            await self.fail(it, part(2, keep=(2,)))
        assert [said.certain for said in it.line.told(ReportLostShards)] == [False, True]

    async def test_is_certain_to_be_lost_when_it_has_hung_for_as_many_tries(self) -> None:
        origin = FunctionOrigin(away)
        # Within the event loop an origin hangs in what it returns.
        object.__setattr__(origin, "write_to", lambda shard, file: anyio.sleep_forever())
        it = Scene(origin=origin, origin_timeout_s=0.001)
        for _ in range(ORIGIN_TRIES + 1):
            await self.fail(it, part(2, keep=(2,)))
        told = it.line.told(ReportLostShards)
        assert [said.certain for said in told] == [False, True]
        assert {said.reason.partition(" (")[0] for said in told} == {
            "shard 2: the origin gave nothing of it for 0.001 s"
        }

    async def test_is_waited_for_already_while_it_is_asked(self) -> None:
        """Or a worker would fail for an origin that takes its time."""
        it = Scene()
        at_origin = ShardInTransit(2, None, 0, None, 0.0)
        assert it.waits(at_origin)
        assert it.waits(at_origin, ShardInTransit(3, None, 0, None, 400.0))
        assert not it.waits(at_origin, ShardInTransit(3, OTHER, 0, SIZE))
        assert not it.waits()

    async def test_is_not_waited_for_where_a_worker_has_it_who_is_not_reached_from_here(self) -> None:
        """Or a hanging origin would hide that this worker cannot reach other workers."""
        it = Scene()
        assert not it.waits(
            ShardInTransit(2, None, 0, None, 400.0), ShardInTransit(3, None, 0, None, 400.0, may_be_at_a_worker=True)
        )

    async def test_is_not_waited_for_while_what_it_gave_hangs_in_the_store(self) -> None:
        it = Scene()
        at_origin, in_store = ShardInTransit(2, None, 0, None, 400.0), ShardInTransit(3, None, SIZE, None)
        assert it.waits(at_origin, in_store)
        it.clock.now += STORING_MAX_S
        assert not it.waits(at_origin, in_store)
        assert it.waits(at_origin)
        assert it.waits(in_store)

    async def test_is_not_waited_for_while_the_store_hangs_though_it_gave_nothing_in_the_try_before(self) -> None:
        it = Scene(write=no_file)
        await self.fail(it, part(2, keep=(2,)))
        in_store = ShardInTransit(2, None, SIZE, None)
        assert it.waits(in_store)
        it.clock.now += STORING_MAX_S
        assert not it.waits(in_store)
        assert it.waits()

    async def test_is_named_as_soon_as_it_has_been_silent_for_a_while_until_something_comes(self) -> None:
        it = Scene()

        def trouble(*silences: float | None) -> str:
            it.waits(*(ShardInTransit(shard, None, 0, None, silence) for shard, silence in enumerate(silences)))
            return it.signals[-1].trouble

        assert trouble(ORIGIN_SILENCE_REPORTED_S - 0.1, None) == ""
        assert trouble(1.0, ORIGIN_SILENCE_REPORTED_S, None) == "the origin has given nothing of shard 1 for 5 s"
        more = "nor of 2 other requested shards"
        assert trouble(6.0, 41.7, 7.0) == f"the origin has given nothing of shard 1 for 42 s, {more}"
        assert trouble(0.1, None) == ""

    async def test_is_named_with_what_was_the_matter_before(self) -> None:
        it = Scene(write=no_file)
        error = await self.fail(it, part(2, keep=(2,)))
        await it.holder._pause(str(error))
        it.waits(ShardInTransit(2, None, 0, None, 42.0))
        assert it.signals[-1].trouble == f"the origin has given nothing of shard 2 for 42 s; before: {error}"
        it.waits(ShardInTransit(2, None, 0, None, 0.0))
        assert it.signals[-1].trouble == str(error)

    async def test_is_waited_for_and_told_so_and_nothing_is_offered_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it = Scene(filled(0), write=no_file)
        error = await self.fail(it, part(2, keep=(0, 2)))
        assert not it.signals[-1].is_waiting
        it.signals.clear()
        pauses = await self.rests(it, str(error), 12, monkeypatch)
        assert all(signal.is_waiting and "there is no shard-2" in signal.trouble for signal in it.signals)
        assert max(pauses) <= REPORT_INTERVAL_S
        assert len(it.signals) == len(pauses)
        await self.fail(it, part(2, keep=(0, 2)))
        assert all(signal.is_waiting for signal in it.signals)
        assert len(it.line.told(OfferShards)) == 1

    async def rests(self, it: Scene, why: str, times: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """How long it sleeps when it rests so many times."""
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        with monkeypatch.context() as context:
            context.setattr(anyio, "sleep", sleep)
            for _ in range(times):
                await it.holder._pause(why)
        return slept

    async def test_is_tried_again_ever_more_rarely_until_something_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gives: set[int] = set()

        def write(shard: DataShard, file: BinaryIO) -> None:
            file.write(content(shard.shard_id)) if shard.shard_id in gives else no_file(shard, file)

        it = Scene(write=write)
        await self.fail(it, part(2, 4, keep=(2, 4)))
        rests = [sum(await self.rests(it, "why", 1, monkeypatch)) for _ in range(8)]
        assert rests == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
        gives.add(4)
        await self.fail(it, part(2, 4, keep=(2, 4)))
        assert sum(await self.rests(it, "why", 1, monkeypatch)) == pytest.approx(0.2)
        await self.fail(it, part(2, keep=(2,)), attempt=2)
        assert sum(await self.rests(it, "why", 1, monkeypatch)) == pytest.approx(0.2)

    async def test_is_no_more_waited_for_when_it_has_come(self) -> None:
        gives: set[int] = set()

        def write(shard: DataShard, file: BinaryIO) -> None:
            file.write(content(shard.shard_id)) if shard.shard_id in gives else no_file(shard, file)

        it = Scene(write=write)
        await self.fail(it, part(2, keep=(2,)))
        gives.add(2)
        await it.take_part(1, part(2, keep=(2,)))
        (reported,) = it.line.told(ReportShards)
        assert reported.transfers == 1
        it.signals.clear()
        await it.take_part(1, part(2, keep=(2,)))
        assert {(signal.is_waiting, signal.trouble) for signal in it.signals[1:]} == {(False, "")}

    async def test_is_another_matter_than_what_this_host_does_not_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        it = Scene(MemoryShardStore(bytes_max=10))
        it.tries_once()
        error = await self.fail(it, part(2, keep=(2,)))
        assert isinstance(error, StoreFailed)
        assert error.message == "cannot store shard 2 (no space (free some space))"
        it.signals.clear()
        await self.rests(it, str(error), 1, monkeypatch)
        assert [(signal.is_waiting, signal.trouble) for signal in it.signals] == [(False, str(error))]
        assert it.line.told(ReportLostShards) == []
