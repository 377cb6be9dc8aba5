"""What a worker reports to the daemon about the shards that it fetches for an attempt.

Invariants:
- A bad copy is reported as soon as it is found, because other workers may be about to fetch it.
- Lost shards are reported when they change, a full store once per attempt, and a request that all workers offer anew
  once per missing shard.
- The worker says that it waits only while progress depends on other workers or on the origin, never while it is its own
  turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import anyio

from forged.clock import Clock
from forged.data.messages import NAMED_MAX, ReportCorruptShard, ReportLostShards, ReportShards
from forged.data.transfer.execution import TransferObserver
from forged.data.transfer.outcome import BadCopy, MissingShard, ShardInTransit, TransferProgress, TransferReport
from forged.elastic.messages import AttemptProgress
from forged.errors import ForgedError
from forged.kernel.messages import Signal
from forged.log import Log
from forged.phrases import counted
from forged.worker.registration import Registration

PROBLEM_CHARS_MAX = 500
ORIGIN_TRIES = 3
"""After so many tries in a row, each with several attempts, the shards that the origin does not give count as lost."""
ORIGIN_SILENCE_REPORTED_S = 5.0
STORING_MAX_S = 5.0
"""While the store takes less than this for bytes from the origin, the worker still waits for the origin."""


class StoreFailure:
    """For how long a worker's store has kept it from holding its shards.

    It counts over all attempts, while the worker has a plan, until a shard is stored. So an attempt that is restarted
    again and again, or a daemon that restarts, does not start it anew.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._before_s = 0.0
        """Until the last pause."""
        self._since: float | None = None
        """Since the last pause; None while the worker waits for its plan, or trains."""

    def failed(self, now: float) -> None:
        """The store has refused a shard."""
        self.has_failed = True
        self.plan_known(now)

    def plan_known(self, now: float) -> None:
        if self.has_failed and self._since is None:
            self._since = now

    def pause(self, now: float) -> None:
        """The worker fetches nothing, until `plan_known`."""
        self._before_s, self._since = self.seconds(now), None

    def stored(self) -> None:
        """A shard is stored, or none has to be."""
        self.has_failed, self._before_s, self._since = False, 0.0, None

    def seconds(self, now: float) -> float:
        return self._before_s + (0.0 if self._since is None else now - self._since)

    def reported_s(self, now: float) -> float:
        """0 while the worker waits for its plan, with which the failure may be over."""
        return 0.0 if self._since is None else self.seconds(now)


class TransferReports(TransferObserver):
    """Reports of one worker; `signal` sends a signal to the daemon without waiting."""

    def __init__(self, line: Registration, signal: Callable[[Signal], object], clock: Clock, log: Log) -> None:
        self._line = line
        self._signal = signal
        self._clock = clock
        self._log = log
        self._bad_copies: list[BadCopy] = []
        """Not reported yet."""
        self._bad_copy_found = anyio.Event()
        self._bad_copies_reported = 0
        self._last_progress = (0, 0)
        """The transfers done and bytes received that were signalled last."""
        self._refetched: set[int] = set()
        """Missing shards for which all workers were asked to offer anew: once until they arrive, or it never ends."""
        self._store_failure = StoreFailure()
        self._problem = ""
        """Why the last try failed."""
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Report about this attempt from now on."""
        self._attempt = attempt
        self._done: int | None = None
        """Shards that were held when this try last reported its progress."""
        self._received = 0
        """Bytes received in this attempt before the current try."""
        self._tries_without_origin = 0
        """Tries in a row that brought everything except shards that no worker has and the origin does not give."""
        self._reported_lost: ReportLostShards | None = None
        self._has_reported_not_stored = False
        self._is_full = False
        """Whether the last try brought shards that could not be stored."""
        if not self._store_failure.has_failed:
            self._problem = ""
        self._storing_since: float | None = None
        """Since when a transfer from the origin was seen waiting for the store."""

    def end(self) -> None:
        """The worker fetches nothing until its next turn."""
        self._store_failure.pause(self._clock.monotonic())

    # Signals, without waiting.

    def on_progress(self, progress: TransferProgress) -> None:
        if self._done is not None and progress.done > self._done:
            self._store_failure.stored()
        self._done = progress.done
        waits = self._waits_for_origin_only(progress.in_transit)
        problem = "; before: ".join(filter(None, (_origin_silence(progress.in_transit), self._problem)))
        self._last_progress = progress.done, self._received + progress.bytes_moved
        self._send(*self._last_progress, waits=waits, problem=problem)

    def on_bad_copy(self, copy: BadCopy) -> None:
        self._bad_copies.append(copy)
        self._bad_copy_found.set()

    def waiting(self, problem: str | None = None) -> None:
        """The worker waits for other workers or for the daemon; `problem` replaces the last failure."""
        self._send(waits=True, problem=problem)

    def own_turn(self) -> None:
        """The worker has its plan, and waits for nothing except, after such a try, the origin."""
        self._done = None
        self._store_failure.plan_known(self._clock.monotonic())
        self._send(waits=self._is_without_origin)

    def failed(self, reason: str) -> None:
        """A try failed for this reason, which the following signals carry."""
        self._problem = reason[:PROBLEM_CHARS_MAX]

    def store_failed(self) -> None:
        self._store_failure.failed(self._clock.monotonic())

    def _send(self, transfers: int = 0, received: int = 0, *, waits: bool = False, problem: str | None = None) -> None:
        line = self._line
        self._signal(
            AttemptProgress(
                line.job,
                line.worker.id,
                line.incarnation,
                self._attempt,
                0,
                # To find out that a copy is bad is progress, too.
                transfers + self._bad_copies_reported,
                received or self._received,
                waits and not self._is_full,
                (self._problem if problem is None else problem)[:PROBLEM_CHARS_MAX],
                store_failing_s=self._store_failure.reported_s(self._clock.monotonic()),
            )
        )

    def _waits_for_origin_only(self, in_transit: Sequence[ShardInTransit]) -> bool:
        """Not where a worker has a shard and was not reached, because other workers might reach it.

        Received bytes are in the store for a moment; unless that lasts, the worker still waits for the origin.
        """
        if any(one.source is not None or one.may_be_at_a_worker for one in in_transit):
            self._storing_since = None
            return False
        if all(one.origin_silent_s is not None for one in in_transit):
            self._storing_since = None
            return bool(in_transit) or self._is_without_origin
        now = self._clock.monotonic()
        self._storing_since = now if self._storing_since is None else self._storing_since
        return now - self._storing_since < STORING_MAX_S

    @property
    def _is_without_origin(self) -> bool:
        return self._tries_without_origin > 0

    # Requests, until the daemon has answered.

    async def send_bad_copies_as_found(self) -> None:
        """Runs until it is cancelled, or until a report fails; `finish` sends what is left."""
        while True:
            try:
                await self._send_bad_copies()
            except ForgedError as error:
                self._log.info(
                    "a corrupt shard copy could not be reported to the daemon yet; retrying", reason=error.message
                )
                return
            await self._bad_copy_found.wait()

    async def finish(self, attempt: int, report: TransferReport) -> None:
        """Report the result of a try: done, or what is missing."""
        self._received += report.bytes
        if report.moved or report.is_complete:
            self._store_failure.stored()
        await self._send_bad_copies()
        await self._send_missing(attempt, report)
        await self._send_not_stored(attempt, report)
        if report.is_complete:
            self._problem = ""
            await self.send_done(attempt, report)

    async def send_done(self, attempt: int, report: TransferReport) -> None:
        line = self._line
        moved = len(report.moved)
        await line.send(
            ReportShards(line.job, line.worker.id, line.incarnation, attempt, moved, report.bytes, report.seconds)
        )

    async def _send_bad_copies(self) -> None:
        while self._bad_copies:
            copy = self._bad_copies[0]
            if copy.source is not None:
                line = self._line
                await line.send(
                    ReportCorruptShard(line.job, line.worker.id, line.incarnation, copy.source.id, copy.shard_id)
                )
            self._bad_copies.pop(0)
            self._bad_copies_reported += 1
            self._send(*self._last_progress)
        self._bad_copy_found = anyio.Event()

    async def _send_missing(self, attempt: int, report: TransferReport) -> None:
        """Ask all workers to offer anew where bad copies left a shard missing; else report lost shards."""
        bad = {copy.shard_id for copy in report.bad_copies if copy.source is not None}
        missing = {one.shard_id for one in report.missing}
        # A shard that has arrived may be missing again later.
        self._refetched &= missing
        news = missing & bad - self._refetched
        if news:
            self._refetched |= news
            line = self._line
            await line.send(ReportShards(line.job, line.worker.id, line.incarnation, attempt, missing=len(news)))
        else:
            await self._send_lost(attempt, report)

    async def _send_lost(self, attempt: int, report: TransferReport) -> None:
        lost = [one for one in report.missing if one.has_no_holder]
        # While anything else is missing, this worker has to solve that first.
        is_all = bool(lost) and len(lost) == len(report.missing)
        self._tries_without_origin = self._tries_without_origin + 1 if is_all else 0
        if not lost:
            self._reported_lost = None
            return
        told = self._lost_report(attempt, lost)
        if told != self._reported_lost:
            await self._line.send(told)
            self._reported_lost = told

    def _lost_report(self, attempt: int, lost: list[MissingShard]) -> ReportLostShards:
        line, first = self._line, lost[0]
        return ReportLostShards(
            line.job,
            line.worker.id,
            line.incarnation,
            attempt,
            len(lost),
            [one.shard_id for one in lost[:NAMED_MAX]],
            f"shard {first.shard_id}: {first.reason}"[:PROBLEM_CHARS_MAX],
            certain=self._tries_without_origin >= ORIGIN_TRIES or any(one.is_refused for one in lost),
        )

    async def _send_not_stored(self, attempt: int, report: TransferReport) -> None:
        """Ask for another plan, once: to evict this worker would also lose the shards that it holds."""
        not_stored = sum(one.is_own_fault for one in report.missing)
        self._is_full = not_stored > 0
        if not_stored and not self._has_reported_not_stored:
            line, self._has_reported_not_stored = self._line, True
            await line.send(ReportShards(line.job, line.worker.id, line.incarnation, attempt, not_stored=not_stored))


def _origin_silence(in_transit: Iterable[ShardInTransit]) -> str:
    silences = [(one.origin_silent_s or 0.0, one.shard_id) for one in in_transit]
    silent = [(seconds, shard) for seconds, shard in silences if seconds >= ORIGIN_SILENCE_REPORTED_S]
    if not silent:
        return ""
    seconds, shard = max(silent)
    more = f", nor of {counted(len(silent) - 1, 'other requested shard')}" if len(silent) > 1 else ""
    return f"the origin has sent no byte of shard {shard} for {seconds:.0f} s{more}"
