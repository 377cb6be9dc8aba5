"""Obtains and holds the shards that the daemon assigns to this worker.

For each attempt: offer what is held, wait for the plan, fetch what is missing, report, and repeat until all is held.

Invariants:
- The worker takes part in one attempt at a time. The next starts when the previous one has ended here; received bytes
  are kept.
- The worker offers what its store has verified, and reports ready only when it holds all that the plan requires.
- Shards that the new world does not need here are dropped after its commit, because other workers may fetch them until
  then. What this worker owns changes at the same moment.
- Errors that may pass are retried; an error of the script or of its store ends the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
from anyio.abc import TaskGroup

from forged.clock import Clock
from forged.data.messages import (
    MARK_BYTES,
    CorruptShardFound,
    OfferShards,
    OwnersPage,
    ReadOwners,
    ReadTransfers,
    TransferPart,
    TransfersPlanned,
)
from forged.data.model import Dataset, Indices
from forged.data.ownership.ownership import SHARDS_LOST
from forged.data.sampling.sampler import ElasticSampler, SamplingMode
from forged.data.store.errors import StoreFailed
from forged.data.training import TrainingData
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import TransferReport
from forged.data.transfer.schedule import Source, Wanted
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology
from forged.errors import ForgedError, RequestRefused
from forged.kernel.messages import Fact, Signal, UnknownFact
from forged.log import SILENT, Log
from forged.retry import RetryPolicy
from forged.worker.data.local_shards import LocalShards
from forged.worker.data.transfer_reports import TransferReports
from forged.worker.errors import is_temporary
from forged.worker.mesh import Mesh
from forged.worker.registration import Registration
from forged.worker.worker_state.job_view import Commit

OFFER_SHARDS_MAX = 1 << 16
"""So many shards are named in one message."""
ORIGIN = -1
ATTEMPTS_KEPT_MAX = 4
OVER = frozenset({"attempt_over", "worker_gone"})
"""What the daemon answers when it expects no shards of this worker any more; facts tell the worker what follows."""
PENDING = frozenset({"plan_pending", SHARDS_LOST})
RETRY = RetryPolicy(attempts=None, delay_s=0.2, exponential=True, delay_max_s=5.0, jitter=0.5)
"""The pauses between tries; a try that brings a shard starts them anew."""
REPORT_INTERVAL_S = 1.0
ASK_AGAIN_S = 1.0
"""How long to wait for the fact that the plan exists before the daemon is asked for it."""


@dataclass(frozen=True, slots=True)
class AssignedShards:
    """What the plan of an attempt assigns to this worker."""

    wanted: list[Wanted]
    keep: frozenset[int]
    owned: frozenset[int]
    is_released: bool
    replaced: frozenset[int]
    """Shards of which other workers hold different bytes; this worker drops its copy and fetches theirs."""


class ShardHolder:
    """The shards of one worker. `fail` is called with an error that ends the training."""

    def __init__(
        self,
        data: TrainingData,
        config: ElasticTrainingConfig,
        sampler: ElasticSampler | None,
        line: Registration,
        signal: Callable[[Signal], object],
        mesh: Mesh,
        tasks: TaskGroup,
        fail: Callable[[Exception], None],
        clock: Clock,
        random: Callable[[], float],
        *,
        uses_threads: bool,
        log: Log = SILENT,
    ) -> None:
        self._data = data
        self._dataset = Dataset.of(data.samples, data.shards)
        self._sampler = sampler
        self._line = line
        self._tasks = tasks
        self._fail = fail
        self._clock = clock
        self._random = random
        self._log = log
        self._local = LocalShards(data.store, data.shards, uses_threads=uses_threads)
        self._reports = TransferReports(line, signal, clock, log)
        self.transfers = DataTransferManager(
            config.transfers_at_once,
            worker=line.worker,
            store=data.store,
            connect=mesh.connect_for_shards,
            origin=data.origin,
            origin_timeout_s=data.origin_timeout_s,
            rate_bytes_per_s=data.rate_bytes_per_s,
            clock=clock,
            random=random,
            uses_threads=uses_threads,
            observer=self._reports,
        )
        """Also serves plans of the script; the next attempt ends those."""
        self.is_released = False
        """Whether no other worker needs what this worker holds, so that it may leave."""
        self._owned: frozenset[int] = frozenset()
        """The shards that this worker owns in the committed world."""
        self._assigned: dict[int, AssignedShards] = {}
        """By attempt, for the newest ones: one may be committed while the next is under way."""
        self._planned_attempt = 0
        """The newest attempt that is known to have a plan."""
        self._plan_known = anyio.Event()
        self._obtaining = anyio.Lock()
        self._offering_or_dropping = anyio.Lock()
        """An offer must not name a shard that is about to be dropped."""
        self._background_attempt = 0
        """The attempt whose shards are fetched while training continues; 0 for none."""
        self._background_scope = anyio.CancelScope()
        self._has_offered = False
        """Whether the current attempt has an offer, which holds until it ends."""
        self._begin_attempt(0)
        mesh.serve_shards(data.store)

    def on_fact(self, fact: Fact | UnknownFact) -> None:
        if isinstance(fact, TransfersPlanned):
            self._planned_attempt = max(self._planned_attempt, fact.attempt)
            known, self._plan_known = self._plan_known, anyio.Event()
            known.set()
        elif isinstance(fact, CorruptShardFound) and fact.worker_id == self._line.worker.id:
            self._local.suspects.add(fact.shard)

    def owns(self, shard: int) -> bool:
        """Whether this worker owns the shard in the committed world."""
        return shard in self._owned

    # Obtaining the shards of an attempt.

    def obtain_in_background(self, attempt: int) -> None:
        """Obtain this attempt's shards while training continues, and stop doing so for any other; 0 for none."""
        if attempt == self._background_attempt:
            return
        self._background_attempt = attempt
        self._background_scope.cancel()
        if attempt:
            self._background_scope = anyio.CancelScope()
            self._tasks.start_soon(self._obtain_in_scope, attempt, self._background_scope)

    async def _obtain_in_scope(self, attempt: int, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await self.obtain(attempt, in_background=True)
            except Exception as error:  # noqa: BLE001 - a script's store may raise anything
                self._fail(error)

    async def obtain(self, attempt: int, *, in_background: bool = False) -> None:
        """Try until this worker holds what the attempt assigns to it and has said so, or until the attempt is over."""
        async with self._obtaining:
            try:
                await self._obtain(attempt, in_background=in_background)
            finally:
                self._reports.end()

    async def _obtain(self, attempt: int, *, in_background: bool) -> None:
        while True:
            try:
                await self._try(attempt, in_background=in_background)
                await self._line.ready(attempt)
                return
            except ForgedError as error:
                if error.code in OVER:
                    self._log.info("the attempt ended before all shards were fetched", reason=error.message)
                    return
                if not is_temporary(error):
                    raise
                self._log.warning("shards could not be fetched; retrying", reason=str(error))
                if isinstance(error, StoreFailed):
                    self._reports.store_failed()
                reason = error.message
            await self._pause(reason)

    async def _try(self, attempt: int, *, in_background: bool = False) -> None:
        if attempt != self._attempt:
            async with self._offering_or_dropping:
                self._begin_attempt(attempt)
        if not self._has_offered:
            await self._offer(attempt, in_background=in_background)
            self._has_offered = True
        assigned = await self._read_assigned(attempt)
        for shard in sorted(assigned.replaced - self._replaced):
            await self._local.drop(shard)
            self._replaced.add(shard)
        report = await self._fetch(attempt, assigned.wanted)
        if report.moved:
            self._pauses = RETRY.delays(self._random)
        await self._reports.finish(attempt, report)
        report.require_complete()
        self._assigned[attempt] = assigned
        for older in sorted(self._assigned)[:-ATTEMPTS_KEPT_MAX]:
            del self._assigned[older]

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        self._has_offered = False
        self._replaced: set[int] = set()
        """Shards that were dropped as `AssignedShards.replaced`, and are not dropped again."""
        self._pauses = RETRY.delays(self._random)
        self._reports.begin(attempt)

    async def _pause(self, reason: str) -> None:
        """Wait before the next try, and report the reason meanwhile."""
        self._reports.failed(reason)
        left_s = next(self._pauses)
        while left_s > 0.0:
            self._reports.own_turn()
            pause_s = min(left_s, REPORT_INTERVAL_S)
            await anyio.sleep(pause_s)
            left_s -= pause_s

    # 1. Offer what is held.

    async def _offer(self, attempt: int, *, in_background: bool) -> None:
        while True:
            if not in_background:
                # In the background, training may be using a bad copy: then the daemon stops the training first.
                await self._verify_suspects()
            verified = np.array(sorted(self._local.verified)[:OFFER_SHARDS_MAX], "<i8")
            suspect = await self._send_offer(attempt, verified.tobytes())
            self._local.verified.difference_update(verified.tolist())
            if not suspect:
                return
            # The fact may have been missed, or have reached an earlier process of this worker only.
            self._local.suspects.update(suspect)
            in_background = False

    async def _verify_suspects(self) -> None:
        """Reports that other workers have to wait as long as copies are being read; a hanging disk ends that."""
        reported_at = -math.inf
        async for _ in self._local.verify_suspects():
            now = self._clock.monotonic()
            if now >= reported_at + REPORT_INTERVAL_S:
                self._reports.waiting()
                reported_at = now

    async def _send_offer(self, attempt: int, verified: bytes) -> list[int]:
        """Returns the copies that the daemon wants verified; if there are any, the offer has to be sent again."""
        held = await self._local.inventory()
        starts = range(0, max(1, held.ids.size), OFFER_SHARDS_MAX)
        for start in starts:
            taken = await self._line.send(
                OfferShards(
                    self._line.job,
                    self._line.worker.id,
                    self._line.incarnation,
                    attempt,
                    self._data.spec,
                    held.ids[start : start + OFFER_SHARDS_MAX].tobytes(),
                    held.size,
                    start != starts[-1],
                    self.transfers.bandwidth.bytes_per_s or 0.0,
                    self._data.weight,
                    verified if start == starts[0] else b"",
                    held.marks[start * MARK_BYTES : (start + OFFER_SHARDS_MAX) * MARK_BYTES],
                )
            )
            if taken.suspect:
                return list(np.frombuffer(taken.suspect, "<i8").tolist())
        return []

    # 2. Read the plan, once all members have offered.

    async def _read_assigned(self, attempt: int) -> AssignedShards:
        lost: str | None = None
        is_planned = self._planned_attempt >= attempt
        while True:
            if not is_planned:
                self._reports.waiting(problem=lost)
                with anyio.move_on_after(ASK_AGAIN_S):
                    await self._plan_known.wait()
            try:
                pages = await self._read_pages(attempt)
            except RequestRefused as error:
                if error.code not in PENDING:
                    raise
                is_planned, lost = False, error.message if error.code == SHARDS_LOST else None
            else:
                self._planned_attempt = max(self._planned_attempt, attempt)
                self._reports.own_turn()
                return self._assigned_by(pages)

    async def _read_pages(self, attempt: int) -> Sequence[TransferPart]:
        pages: list[TransferPart] = []
        line, after = self._line, 0
        while not pages or pages[-1].more:
            page = await line.send(ReadTransfers(line.job, line.worker.id, line.incarnation, attempt, after))
            pages.append(page)
            after += max(len(page.shards), len(page.keep)) // 8
        return pages

    def _assigned_by(self, pages: Sequence[TransferPart]) -> AssignedShards:
        wanted = [one for page in pages for one in self._wanted_by(page)]
        keep = np.concatenate([np.frombuffer(page.keep, "<i8") for page in pages])
        is_owned = np.concatenate([np.frombuffer(page.owned, np.bool_) for page in pages])
        replaced = np.concatenate([np.frombuffer(page.replaced, "<i8") for page in pages])
        return AssignedShards(
            wanted,
            frozenset(keep.tolist()),
            frozenset(keep[is_owned].tolist()),
            pages[0].is_released,
            frozenset(replaced.tolist()),
        )

    def _wanted_by(self, page: TransferPart) -> Iterator[Wanted]:
        def source_at(place: int) -> Source:
            return None if place == ORIGIN else page.workers[place]

        shards = np.frombuffer(page.shards, "<i8").tolist()
        sources = np.frombuffer(page.sources, "<i4").reshape(len(shards), page.sources_per_shard).tolist()
        for shard, places in zip(shards, sources, strict=True):
            named = tuple(source_at(place) for place in places if place >= ORIGIN)
            yield Wanted(self._dataset.shard(shard), self._data.shards - shard, named)

    # 3. Fetch what is missing.

    async def _fetch(self, attempt: int, wanted: list[Wanted]) -> TransferReport:
        outcome: TransferReport | ForgedError
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._reports.send_bad_copies_as_found)
            try:
                outcome = await self.transfers.execute(wanted, generation=attempt)
            except ForgedError as error:
                # Raised inside the task group it would come out in an exception group.
                outcome = error
            tasks.cancel_scope.cancel()
        if isinstance(outcome, ForgedError):
            raise outcome
        return outcome

    # 4. After the commit.

    async def adopt(self, commit: Commit) -> None:
        """Own what the committed world assigns, drop the rest, and give the sampler the owners."""
        await self._adopt(commit.attempt, commit.topology)
        if self._sampler is not None and self._sampler.mode is SamplingMode.SHARDED:
            self._sampler.reassign(await self._read_owners(commit.topology), commit.topology.world_size)

    async def _adopt(self, attempt: int, topology: ClusterTopology) -> None:
        assigned = self._assigned.get(attempt)
        if assigned is None:
            # This worker learned of the world without having taken part in its attempt.
            owners = await self._read_owners(topology)
            self._owned = frozenset(np.flatnonzero(owners == topology.rank_of(self._line.worker)).tolist())
            return
        self._owned, self.is_released = assigned.owned, assigned.is_released
        self._assigned = {number: held for number, held in self._assigned.items() if number >= attempt}
        async with self._offering_or_dropping:
            if self._attempt == attempt:
                # During the next attempt nothing is dropped, because this worker has offered it.
                await self._drop_all_except(assigned.keep)

    async def _drop_all_except(self, keep: frozenset[int]) -> None:
        try:
            await self._local.drop_all_except(keep)
        except ForgedError as error:
            # To hold more than required does no harm.
            self._log.warning("shards that moved to other workers could not be deleted here", reason=str(error))

    async def _read_owners(self, topology: ClusterTopology) -> Indices:
        """The rank of each shard's owner in a committed world; -1 for an owner outside it."""
        pages: list[OwnersPage] = []
        while not pages or pages[-1].more:
            page = await self._line.send(ReadOwners(self._line.job, sum(len(page.owners) for page in pages) // 4))
            if page.generation < topology.generation:
                # The daemon's data service processes the commit a moment later.
                await anyio.sleep(ASK_AGAIN_S / 100)
            elif page.generation == topology.generation:
                pages.append(page)
            else:
                over = f"generation {topology.generation} is over"
                raise RequestRefused("generation_over", over, "enter a newer one")
        places = np.frombuffer(b"".join(page.owners for page in pages), "<i4")
        ranks = np.array([*(topology.rank_of(worker) for worker in pages[0].workers), -1], np.int64)
        owners: Indices = ranks[places]
        return owners
