"""Answers what operators ask about a job's data: holders, transfers under way, and a preview of a rescale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forged.clock import Clock
from forged.data.computations import Computations
from forged.data.messages import (
    DataView,
    OwnersPage,
    PlanData,
    ReadOwners,
    ShowData,
    ShowTransfers,
    TransfersView,
    TransferTotals,
    WorkerTransfers,
)
from forged.data.ownership.attempt import DataAttempt, FinishedTransfers
from forged.data.ownership.pages import data_view, owners_page
from forged.data.ownership.planning import preview
from forged.data.ownership_store import OWNER, OwnershipStore
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import AttemptProgress
from forged.errors import RequestRefused
from forged.jobs.model import ShowJob
from forged.kernel.bus import Bus
from forged.kernel.messages import Call


class DataInspection:
    """Reads the ownerships of all jobs; changes nothing but the progress that workers signal."""

    def __init__(self, bus: Bus, clock: Clock, computations: Computations, store: OwnershipStore) -> None:
        self._bus = bus
        self._clock = clock
        self._computations = computations
        self._store = store
        self._progress: dict[str, tuple[int, dict[str, AttemptProgress]]] = {}
        """By job: the newest attempt, and each worker's latest signal."""
        bus.serve(ReadOwners, self._read_owners, owner=OWNER)
        bus.serve(ShowData, self._show_data, owner=OWNER)
        bus.serve(ShowTransfers, self._show_transfers, owner=OWNER)
        bus.serve(PlanData, self._preview, owner=OWNER)
        bus.on_signal(AttemptProgress, self._on_progress, name="data.progress")

    def forget(self, job: str) -> None:
        self._progress.pop(job, None)

    def clear(self) -> None:
        self._progress.clear()

    def _on_progress(self, signal: AttemptProgress, call: Call) -> None:
        attempt, known = self._progress.get(signal.job, (0, {}))
        if signal.attempt > attempt:
            attempt, known = signal.attempt, {}
        if signal.attempt == attempt and signal.job in self._store.jobs:
            known[signal.worker_id] = signal
            self._progress[signal.job] = attempt, known

    def _read_owners(self, request: ReadOwners, call: Call) -> OwnersPage:
        return owners_page(self._store.ownership(request.job), request.after)

    async def _show_data(self, request: ShowData, call: Call) -> DataView:
        work = partial(data_view, self._store.ownership(request.job))
        view: DataView = await self._computations.run(call.principal.holder, request.job, work)
        return view

    def _show_transfers(self, request: ShowTransfers, call: Call) -> TransfersView:
        attempt = self._store.ownership(request.job).attempt
        if attempt is None:
            raise RequestRefused("transfers_none", f"job {request.job} has had no transfers yet", "ask later")
        workers, lost = list(self._workers(request.job, attempt)), attempt.lost
        return TransfersView(
            job=request.job,
            attempt=attempt.number,
            running=not (attempt.is_over or attempt.is_aborted),
            totals=attempt.totals,
            done=sum(worker.done for worker in workers),
            bytes=sum(worker.bytes for worker in workers),
            elapsed_s=self._elapsed_s(attempt),
            waiting_for=[worker.id for worker in attempt.waiting_for],
            lost=lost.number,
            lost_shards=list(lost.shards),
            lost_because=lost.reason,
            last_held_by=list(lost.last_held_by),
            aborted=attempt.is_aborted,
            planned=attempt.plan is not None,
            workers=workers,
        )

    def _elapsed_s(self, attempt: DataAttempt) -> float:
        if attempt.took_s is not None or attempt.plan is None:
            return attempt.took_s or 0.0
        return round(self._clock.monotonic() - attempt.planned_at, 3)

    def _workers(self, job: str, attempt: DataAttempt) -> Iterator[WorkerTransfers]:
        number, progress = self._progress.get(job, (0, {}))
        for worker in attempt.target:
            told = progress.get(worker.id) if number == attempt.number else None
            finished = attempt.finished.get(worker.id)
            reported = FinishedTransfers(told.shards, told.data_bytes) if told else FinishedTransfers(0, 0)
            done, moved, _ = finished or reported
            transfers = 0 if attempt.plan is None else len(attempt.plan.for_worker(worker))
            yield WorkerTransfers(worker.id, done, transfers, moved, finished is not None)

    async def _preview(self, request: PlanData, call: Call) -> TransferTotals:
        ownership, job = self._store.ownership(request.job), await self._bus.ask(ShowJob(request.job))
        config = ElasticTrainingConfig.from_settings(job.settings)
        work = partial(preview, ownership, request.workers, config, request.gone)
        totals: TransferTotals = await self._computations.run(call.principal.holder, request.job, work)
        return totals
