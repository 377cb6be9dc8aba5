"""A worker's part of the job's training data.

Law: at every attempt the worker says what it holds by what lies verified in its store, fetches what it is told to, and
answers only when it holds all that it has to. What it need not hold any more it drops when the attempt was committed,
and not before: until then others may come for it. As long as it waits for others, or for the dataset's origin, or looks
through copies that are in doubt, it says so; and what keeps it from getting on it says as long as that does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio
import numpy as np
import xxhash
from anyio import to_thread

from forged.clock import Clock
from forged.data.dataset import Dataset, Indices
from forged.data.messages import (
    NAMED_MAX,
    OfferShards,
    OwnersPage,
    ReadOwners,
    ReadTransfers,
    ReportCorruptShard,
    ReportLostShards,
    ReportShards,
    TransferPart,
)
from forged.data.ownership.conflicting_copies import MARK_BYTES, mark_of
from forged.data.ownership.ownership import SHARDS_LOST
from forged.data.store.port import OpenShard, ShardStore, Stamp
from forged.data.training import TrainingData
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import BadCopy, MissingShard, TransferProgress, TransferReport, UnderWay
from forged.data.transfer.schedule import Source, Wanted
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import AttemptProgress
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, RequestRefused
from forged.kernel.messages import Signal
from forged.log import SILENT, Log
from forged.phrases import counted
from forged.retry import RetryPolicy
from forged.worker.daemon.registration import Registration
from forged.worker.mesh import Mesh

R = TypeVar("R")

PIECE_BYTES = 1 << 20
OFFER_SHARDS_MAX = 1 << 16
"""So many shards are named in one message."""
ORIGIN = -1
ATTEMPTS_KEPT_MAX = 4
"""Of so many attempts it is remembered what is held for them."""
FETCHING = RetryPolicy(attempts=None, delay_s=0.2, exponential=True, delay_max_s=5.0, jitter=0.5)
"""How long a worker rests before it tries again to fetch its data; a try that brings something begins anew."""
SAYING_INTERVAL_S = 1.0
"""How often it says meanwhile what it waits for."""
TROUBLE_CHARS_MAX = 500
ORIGIN_TRIES = 3
"""So many tries in a row, each of which asks several times, and an origin that fails has lost what it does not give."""
SILENCE_TOLD_S = 5.0
"""How long the origin may give nothing before this worker says that it does."""
PUT_AWAY_S = 5.0
"""For so long the store may be with what came from the origin before it is this worker that is waited for."""
PENDING = frozenset({"plan_pending", SHARDS_LOST})
NEVER_SAID = -math.inf
ASK_AGAIN_S = 1.0
"""How long to wait for the word that a plan is there, before asking for it all the same."""


@dataclass(frozen=True, slots=True)
class Part:
    """What this worker has to fetch, and what it has to hold then."""

    wanted: list[Wanted]
    keep: frozenset[int]
    owned: frozenset[int]
    is_released: bool
    replaced: frozenset[int]
    """Of which others hold something else."""


class ShardHolder:
    """Holds shards for one worker."""

    def __init__(
        self,
        data: TrainingData,
        config: ElasticTrainingConfig,
        line: Registration,
        signal: Callable[[Signal], object],
        mesh: Mesh,
        clock: Clock,
        random: Callable[[], float],
        *,
        uses_threads: bool,
        log: Log = SILENT,
    ) -> None:
        self._data = data
        self._log = log
        self._dataset = Dataset.of(data.samples, data.shards)
        self._line = line
        self._signal = signal
        self._uses_threads = uses_threads
        self._planned = 0
        """The attempt of the newest plan that was heard of."""
        self._news = anyio.Event()
        self._holds: dict[int, Part] = {}
        """What is held for the newest attempts: one may have been committed, and the next be under way already."""
        self._turn = anyio.Lock()
        """Who says what is held, and who drops some of it, do so one after the other."""
        self._random = random
        self._clock = clock
        self._begin_attempt(0)
        self._owned: frozenset[int] = frozenset()
        """The shards that are this worker's in the committed world."""
        self.is_released = False
        """Whether this worker may go, because nobody needs what it holds any more."""
        self._bad_copies: list[BadCopy] = []
        """Of which nobody was told yet."""
        self._bad_found = 0
        """How many copies were found to be bad."""
        self._moved = (0, 0)
        """How many transfers were done, and how many bytes had come, as was told last."""
        self._found = anyio.Event()
        """Another one was."""
        self._doubted: set[int] = set()
        self._looked_at: set[int] = set()
        """At which copies it has looked since it last said what it holds."""
        self._complained: set[int] = set()
        """For which shards it has had all say anew what they hold: once until they come, or it would never end."""
        self._manager = DataTransferManager(
            line.worker,
            data.store,
            mesh.visit_shards,
            origin=data.origin,
            origin_timeout_s=data.origin_timeout_s,
            max_concurrent_transfers=config.transfers_at_once,
            rate_bytes_per_s=data.rate_bytes_per_s,
            clock=clock,
            random=random,
            uses_threads=uses_threads,
            progress=self._tell_progress,
            bad_copy=self._find_bad,
        )
        mesh.give_shards(data.store)

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        """The one that this worker takes part in."""
        self._has_offered = False
        """Whether it has said what it holds, which counts as long as the attempt does."""
        self._arrived = 0
        """How many bytes have come in this attempt, before the present try."""
        self._pauses = FETCHING.delays(self._random)
        self._starved_tries = 0
        """How many tries in a row have brought all but what no worker has and the origin does not give."""
        self._replaced: set[int] = set()
        """What was dropped because others hold something else, and is not dropped once more."""
        self._said_lost: ReportLostShards | None = None
        self._has_said_unkept = False
        self._is_full = False
        """Whether the last try has brought what could not be kept: then it is this worker that is waited for."""
        self._trouble = ""
        """Why the last try has failed; empty where none has."""
        self._stored_since: float | None = None
        """Since when something from the origin was seen with the store; None: it is up to something else."""

    def hear_of_plan(self, attempt: int) -> None:
        """It is settled what has to travel for an attempt."""
        self._planned = max(self._planned, attempt)
        news, self._news = self._news, anyio.Event()
        news.set()

    def doubt(self, shard: int) -> None:
        """Somebody has found the copy here to be bad: look at it before it is offered again."""
        self._doubted.add(shard)

    async def take_part(self, attempt: int, *, beside: bool = False) -> None:
        """Hold what this worker has to hold when the attempt is committed; `beside` training, or while it rests."""
        if attempt != self._attempt:
            async with self._turn:
                self._begin_attempt(attempt)
        if not self._has_offered:
            await self._offer(attempt, beside=beside)
            self._has_offered = True
        part = await self._part(attempt)
        await self._drop_replaced(part.replaced)
        report = await self._fetch(attempt, part.wanted)
        self._arrived += report.bytes
        if report.moved:
            self._pauses = FETCHING.delays(self._random)
        await self._tell_bad_copies()
        await self._tell_missing(attempt, report)
        await self._tell_unkept(attempt, report)
        report.require_complete()
        self._trouble = ""
        await self._tell_done(attempt, report)
        self._holds[attempt] = part
        for older in sorted(self._holds)[:-ATTEMPTS_KEPT_MAX]:
            del self._holds[older]

    async def _drop_replaced(self, replaced: frozenset[int]) -> None:
        for shard in sorted(replaced - self._replaced):
            await self._run(partial(self._data.store.drop, shard))
            self._replaced.add(shard)

    async def _fetch(self, attempt: int, wanted: list[Wanted]) -> TransferReport:
        """Have it moved here, and say of bad copies as soon as they are found: others may be about to take them."""
        outcome: TransferReport | ForgedError
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_as_found)
            try:
                outcome = await self._manager.execute(wanted, generation=attempt)
            except ForgedError as error:
                # What is raised within a task group comes out in a group.
                outcome = error
            tasks.cancel_scope.cancel()
        if isinstance(outcome, ForgedError):
            raise outcome
        return outcome

    async def _tell_as_found(self) -> None:
        while True:
            try:
                await self._tell_bad_copies()
            except ForgedError as error:
                # It is said once more when all has come.
                self._log.info("it could not be told that a copy is bad", why=error.message)
                return
            await self._found.wait()

    async def rest(self, why: str) -> None:
        """Let some time pass before the next try, and say why, and whether this worker waits for others."""
        self._trouble = why[:TROUBLE_CHARS_MAX]
        left_s = next(self._pauses)
        while left_s > 0.0:
            self._tell(waits=self._is_starved)
            pause_s = min(left_s, SAYING_INTERVAL_S)
            await anyio.sleep(pause_s)
            left_s -= pause_s

    async def settle(self, attempt: int, topology: ClusterTopology) -> None:
        """The attempt was committed: know what this worker owns, and drop what somebody else is to hold.

        When the next attempt is under way nothing is dropped: it counts on what was said to be here.
        """
        part = self._holds.get(attempt)
        if part is None:
            # Somebody has told of the world and not of the attempt that led to it.
            owners = await self.owners(topology)
            self._owned = frozenset(np.flatnonzero(owners == topology.rank_of(self._line.worker)).tolist())
            return
        self._owned, self.is_released = part.owned, part.is_released
        self._holds = {number: held for number, held in self._holds.items() if number >= attempt}
        async with self._turn:
            if self._attempt == attempt:
                await self._drop_all_but(part.keep)

    async def _drop_all_but(self, keep: Container[int]) -> None:
        try:
            await self._run(partial(_keep_only, self._data.store, keep))
        except ForgedError as error:
            # More is held than has to be, which does no harm.
            self._log.warning("shards that others hold now could not be dropped", why=str(error))

    @property
    def transfers(self) -> DataTransferManager:
        """What moves shards here, for plans besides what attempts do; the next attempt ends those."""
        return self._manager

    def owns(self, shard: int) -> bool:
        """Whether a shard is this worker's in the committed world."""
        return shard in self._owned

    async def owners(self, topology: ClusterTopology) -> Indices:
        """The rank of the owner of each shard, in a world that was committed; -1 for who is not in it."""
        pages: list[OwnersPage] = []
        while not pages or pages[-1].more:
            page = await self._line.say(ReadOwners(self._line.job, sum(len(page.owners) for page in pages) // 4))
            if page.generation < topology.epoch:
                # The daemon hears of its own commit a moment later.
                await anyio.sleep(ASK_AGAIN_S / 100)
            elif page.generation == topology.epoch:
                pages.append(page)
            else:
                raise RequestRefused("generation_over", f"generation {topology.epoch} is over", "enter newer ones")
        places = np.frombuffer(b"".join(page.owners for page in pages), "<i4")
        ranks = np.array([*(topology.rank_of(worker) for worker in pages[0].workers), -1], np.int64)
        owners: Indices = ranks[places]
        return owners

    async def _offer(self, attempt: int, *, beside: bool) -> None:
        while True:
            if not beside:
                # A bad copy is dropped, and training may be under way with it: then the daemon has all stop first.
                await self._look_at_doubted()
            looked_at = np.array(sorted(self._looked_at)[:OFFER_SHARDS_MAX], "<i8")
            doubted = await self._say_what_is_held(attempt, looked_at.tobytes())
            self._looked_at.difference_update(looked_at.tolist())
            if not doubted:
                return
            # What was said of them may not have been heard, or by another process only. Whoever is asked looks.
            self._doubted.update(doubted)
            beside = False

    async def _look_at_doubted(self) -> None:
        """Drop what is bad, and say that this may last as long as it gets on: with a disk that hangs it does not."""
        said_at = NEVER_SAID
        while self._doubted:
            shard = min(self._doubted)
            with closing(_drop_if_bad(self._data.store, shard)) as look:
                while await self._run(partial(next, look, None)):
                    said_at = self._tell_of_looking(said_at)
            self._doubted.discard(shard)
            self._looked_at.add(shard)

    def _tell_of_looking(self, said_at: float) -> float:
        """Returns when it was told last."""
        now = self._clock.monotonic()
        if now < said_at + SAYING_INTERVAL_S:
            return said_at
        self._tell(waits=True)
        return now

    async def _say_what_is_held(self, attempt: int, looked_at: bytes) -> list[int]:
        """Returns which copies are in doubt, so that it has to be said anew."""
        ids, size, marks = await self._run(partial(_told_of, self._data.store, self._data.shards))
        starts = range(0, max(1, ids.size), OFFER_SHARDS_MAX)
        for start in starts:
            taken = await self._line.say(
                OfferShards(
                    self._line.job,
                    self._line.worker.id,
                    self._line.incarnation,
                    attempt,
                    self._data.spec,
                    ids[start : start + OFFER_SHARDS_MAX].tobytes(),
                    size,
                    start != starts[-1],
                    self._manager.bandwidth.overall_bytes_per_s or 0.0,
                    self._data.weight,
                    looked_at if start == starts[0] else b"",
                    marks[start * MARK_BYTES : (start + OFFER_SHARDS_MAX) * MARK_BYTES],
                )
            )
            if taken.doubted:
                return list(np.frombuffer(taken.doubted, "<i8").tolist())
        return []

    async def _part(self, attempt: int) -> Part:
        """What this worker is told, as soon as all have said what they hold."""
        lack: str | None = None
        is_planned = self._planned >= attempt
        while True:
            if not is_planned:
                self._tell(waits=True, trouble=lack)
                with anyio.move_on_after(ASK_AGAIN_S):
                    await self._news.wait()
            try:
                pages = await self._pages(attempt)
            except RequestRefused as error:
                if error.code not in PENDING:
                    raise
                is_planned, lack = False, error.message if error.code == SHARDS_LOST else None
            else:
                # Who tries again waits for nobody: it has all that it needs to get on, and is waited for.
                self._planned = max(self._planned, attempt)
                self._tell(waits=self._is_starved)
                wanted = [one for page in pages for one in self._wanted(page)]
                keep = np.concatenate([np.frombuffer(page.keep, "<i8") for page in pages])
                is_owned = np.concatenate([np.frombuffer(page.owned, np.bool_) for page in pages])
                replaced = np.frombuffer(b"".join(page.replaced for page in pages), "<i8")
                kept, owned = frozenset(keep.tolist()), frozenset(keep[is_owned].tolist())
                return Part(wanted, kept, owned, pages[0].is_released, frozenset(replaced.tolist()))

    async def _pages(self, attempt: int) -> Sequence[TransferPart]:
        pages: list[TransferPart] = []
        after = 0
        while not pages or pages[-1].more:
            page = await self._line.say(ReadTransfers(self._line.job, self._line.worker.id, attempt, after))
            pages.append(page)
            after += max(len(page.shards), len(page.keep)) // 8
        return pages

    def _wanted(self, page: TransferPart) -> Iterator[Wanted]:
        shards = np.frombuffer(page.shards, "<i8").tolist()
        sources = np.frombuffer(page.sources, "<i4").reshape(len(shards), page.sources_per_shard).tolist()
        for shard, places in zip(shards, sources, strict=True):
            named = [self._source(page.workers, place) for place in places if place >= ORIGIN]
            yield Wanted(self._dataset.shard(shard), self._data.shards - shard, tuple(named))

    @staticmethod
    def _source(workers: tuple[WorkerId, ...], place: int) -> Source:
        return None if place == ORIGIN else workers[place]

    async def _tell_done(self, attempt: int, report: TransferReport) -> None:
        await self._line.say(
            ReportShards(
                self._line.job,
                self._line.worker.id,
                self._line.incarnation,
                attempt,
                len(report.moved),
                report.bytes,
                report.seconds,
            )
        )

    async def _tell_missing(self, attempt: int, report: TransferReport) -> None:
        """Ask that all say anew what they hold, if what some have said they do not; or tell what nobody has."""
        bad = {copy.shard_id for copy in report.bad_copies if copy.source is not None}
        missing = {one.shard_id for one in report.missing}
        # What has come since may be missing again some day.
        self._complained &= missing
        news = missing & bad - self._complained
        if news:
            self._complained |= news
            line = self._line
            await line.say(ReportShards(line.job, line.worker.id, line.incarnation, attempt, missing=len(news)))
        else:
            await self._tell_lost(attempt, report)

    async def _tell_unkept(self, attempt: int, report: TransferReport) -> None:
        """Have others take what does not fit here, once: whoever was put out for it would take along what it has."""
        unkept = sum(one.is_own_fault for one in report.missing)
        self._is_full = unkept > 0
        if unkept and not self._has_said_unkept:
            line, self._has_said_unkept = self._line, True
            await line.say(ReportShards(line.job, line.worker.id, line.incarnation, attempt, unkept=unkept))

    async def _tell_lost(self, attempt: int, report: TransferReport) -> None:
        """Say which shards no worker has and the origin does not give, if that is news."""
        lost = [one for one in report.missing if one.is_with_nobody]
        # As long as anything else is the matter, this worker has to mend that.
        self._starved_tries = self._starved_tries + 1 if lost and len(lost) == len(report.missing) else 0
        if not lost:
            self._said_lost = None
            return
        said = self._report_of(attempt, lost)
        if said != self._said_lost:
            await self._line.say(said)
            self._said_lost = said

    def _report_of(self, attempt: int, lost: list[MissingShard]) -> ReportLostShards:
        line, first = self._line, lost[0]
        return ReportLostShards(
            line.job,
            line.worker.id,
            line.incarnation,
            attempt,
            len(lost),
            [one.shard_id for one in lost[:NAMED_MAX]],
            f"shard {first.shard_id}: {first.reason}"[:TROUBLE_CHARS_MAX],
            certain=self._starved_tries >= ORIGIN_TRIES or any(one.is_refused for one in lost),
        )

    async def _tell_bad_copies(self) -> None:
        while self._bad_copies:
            copy = self._bad_copies[0]
            if copy.source is not None:
                said = ReportCorruptShard(self._line.job, self._line.worker.id, copy.source.id, copy.shard_id)
                await self._line.say(said)
            self._bad_copies.pop(0)
            self._bad_found += 1
            self._tell(*self._moved)
        self._found = anyio.Event()

    def _find_bad(self, copy: BadCopy) -> None:
        self._bad_copies.append(copy)
        self._found.set()

    def _tell_progress(self, progress: TransferProgress) -> None:
        """Say how far it is, whether that is up to the origin alone, and if that is silent."""
        waits = self._is_up_to_origin(progress.under_way)
        trouble = "; before: ".join(filter(None, (_silence(progress.under_way), self._trouble)))
        self._moved = progress.done, self._arrived + progress.bytes_moved
        self._tell(*self._moved, waits=waits, trouble=trouble)

    def _is_up_to_origin(self, under_way: Sequence[UnderWay]) -> bool:
        """Whether nothing else is waited for: not, where this worker alone may not reach who has it.

        What has come from it is with the store for a moment; as long as that lasts no longer, nothing is the matter.
        """
        if any(one.source is not None or one.is_elsewhere for one in under_way):
            self._stored_since = None
            return False
        if all(one.origin_silent_s is not None for one in under_way):
            self._stored_since = None
            return bool(under_way) or self._is_starved
        now = self._clock.monotonic()
        self._stored_since = now if self._stored_since is None else self._stored_since
        return now - self._stored_since < PUT_AWAY_S

    @property
    def _is_starved(self) -> bool:
        """Whether the last try brought all but what no worker has and the origin does not give."""
        return self._starved_tries > 0

    def _tell(self, transfers: int = 0, arrived: int = 0, *, waits: bool = False, trouble: str | None = None) -> None:
        line = self._line
        said = AttemptProgress(
            line.job,
            line.worker.id,
            line.incarnation,
            self._attempt,
            0,
            # To know that a copy is bad is to have got on, too.
            transfers + self._bad_found,
            arrived or self._arrived,
            waits and not self._is_full,
            (self._trouble if trouble is None else trouble)[:TROUBLE_CHARS_MAX],
        )
        self._signal(said)

    async def _run(self, act: Callable[[], R]) -> R:
        return await to_thread.run_sync(act) if self._uses_threads else act()


def _silence(under_way: Iterable[UnderWay]) -> str:
    """That the origin gives nothing, if it has for a while."""
    silences = [(one.origin_silent_s or 0.0, one.shard_id) for one in under_way]
    silent = [(seconds, shard) for seconds, shard in silences if seconds >= SILENCE_TOLD_S]
    if not silent:
        return ""
    seconds, shard = max(silent)
    more = f", and nothing of {counted(len(silent) - 1, 'other')} that it was asked for" if len(silent) > 1 else ""
    return f"the origin has given nothing of shard {shard} for {seconds:.0f} s{more}"


def _drop_if_bad(store: ShardStore, shard: int) -> Generator[bool]:
    """Look at a copy; yields after each piece, as others want to know that it gets on."""
    try:
        with store.open(shard) as opened:
            is_sound = yield from _is_sound(opened)
    except RequestRefused:
        # It is no longer held, and the store has seen to that.
        return
    if not is_sound:
        store.drop(shard)


def _is_sound(opened: OpenShard) -> Generator[bool, None, bool]:
    checksum, size = xxhash.xxh3_128(), 0
    try:
        while piece := os.pread(opened.fd, PIECE_BYTES, size):
            checksum.update(piece)
            size += len(piece)
            yield True
    except OSError:
        # What the disk does not give any more is no copy.
        return False
    return opened.stamp == Stamp(size, checksum.digest())


def _told_of(store: ShardStore, shards: int) -> tuple[Indices, int, bytes]:
    """Which shards are held, how many bytes they are, and what each of them is."""
    held: dict[int, Stamp] = dict(store.held())
    ids = sorted(shard for shard in held if shard < shards)
    marks = b"".join(mark_of(held[shard].checksum) for shard in ids)
    return np.array(ids, "<i8"), sum(held[shard].size for shard in ids), marks


def _keep_only(store: ShardStore, keep: Container[int]) -> None:
    """Drop all other shards."""
    for shard in [shard for shard in store.held() if shard not in keep]:
        store.drop(shard)
