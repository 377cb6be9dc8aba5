"""What members and operators read from a job's ownership: transfer pages, owner pages and views. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Counts, count
from forged.data.messages import NAMED_MAX, PAGE_SHARDS_MAX, DatasetSpec, DataView, HeldView, OwnersPage, TransferPart
from forged.data.ownership.attempt import NO_SHARDS, Assignment, DataAttempt, LostShards
from forged.data.ownership.ownership import SHARDS_LOST, ShardOwnership
from forged.data.placement.plan import DataRedistributionPlan
from forged.errors import RequestRefused
from forged.phrases import counted, named

FURTHER_SOURCES_MAX = 3
"""So many workers are named as sources of a shard besides the first."""
NO_SOURCE = -2
"""Fills the places behind a shard's last source."""


def transfer_page(ownership: ShardOwnership, worker_id: str, attempt: int, after: int) -> TransferPart:
    """What a member has to fetch and to keep, from row `after` on."""
    current = ownership.attempt
    if current is None or current.number != attempt:
        raise RequestRefused("attempt_over", f"attempt {attempt} is not under way", "use the newest attempt")
    plan = current.plan
    if plan is None:
        raise _not_planned(current)
    worker = next((worker for worker in plan.workers if worker.id == worker_id), None)
    if worker is None:
        raise RequestRefused(
            "not_a_member", f"{worker_id} is not a member of attempt {attempt}", "wait for the next attempt"
        )
    assignments = plan.copy_assignments
    # A worker that leaves keeps nothing.
    keep = assignments.ids(worker) if worker in assignments else NO_SHARDS
    rows = plan.for_worker(worker).rows
    until = after + PAGE_SHARDS_MAX
    shards = plan.columns.shards[rows[after:until]].astype("<i8")
    sources = _sources(ownership.dataset, plan, rows[after:until])
    return TransferPart(
        plan.workers,
        shards.tobytes(),
        np.ascontiguousarray(sources.T, "<i4").tobytes(),
        sources.shape[0],
        keep[after:until].astype("<i8").tobytes(),
        (plan.owners[keep[after:until]] == plan.workers.index(worker)).astype(np.uint8).tobytes(),
        until < max(rows.size, keep.size),
        any(worker.id == worker_id for worker in current.draining),
        np.intersect1d(shards, current.replaced.get(worker, NO_SHARDS)).astype("<i8").tobytes(),
    )


def owners_page(ownership: ShardOwnership, after: int) -> OwnersPage:
    """The owners of the shards from `after` on."""
    assignment, until = ownership.assignment, after + PAGE_SHARDS_MAX
    owners = assignment.owners[after:until].astype("<i4")
    return OwnersPage(assignment.generation, assignment.workers, owners.tobytes(), until < ownership.dataset.shards)


def data_view(ownership: ShardOwnership) -> DataView:
    """What each worker holds, and what is lost. A thread may call this."""
    attempt = ownership.attempt
    lost = LostShards() if attempt is None else attempt.lost
    differing = NO_SHARDS if attempt is None else attempt.differing
    return DataView(
        job=ownership.job,
        dataset=ownership.dataset,
        generation=ownership.assignment.generation,
        workers=list(_held(ownership.dataset, ownership.assignment)),
        lost=lost.number,
        lost_shards=list(lost.shards),
        lost_because=lost.reason,
        last_held_by=list(lost.last_held_by),
        differing=int(differing.size),
        differing_shards=differing[:NAMED_MAX].tolist(),
    )


def _not_planned(attempt: DataAttempt) -> RequestRefused:
    lost = attempt.lost_in_plan
    if lost.number:
        return RequestRefused(SHARDS_LOST, lost_in_words(lost), "restart a worker that held them with its directory")
    waiting_for = ", ".join(worker.id for worker in attempt.waiting_for[:NAMED_MAX])
    return RequestRefused("plan_pending", f"no plan yet; waiting for {waiting_for or 'the plan'}", "ask later")


def lost_in_words(lost: LostShards) -> str:
    shards = ", ".join(map(str, lost.shards)) + (", …" if lost.number > len(lost.shards) else "")
    text = f"no worker has {counted(lost.number, 'shard')}: {shards}"
    return f"{text}; last held by {named(lost.last_held_by)}" if lost.last_held_by else text


def _sources(dataset: DatasetSpec, plan: DataRedistributionPlan, rows: npt.NDArray[np.intp]) -> Column:
    """The sources of these transfers, one row per rank of preference: the plan's, further holders, the origin."""
    shards, first = plan.columns.shards[rows], plan.columns.sources[rows]
    held = np.concatenate((plan.owners_before[np.newaxis, shards], plan.replicas_before[:, shards]))
    others = np.where(held == first, NOBODY, held)
    # In each column the holders come before the gaps.
    others = np.take_along_axis(others, np.argsort(others == NOBODY, axis=0, kind="stable"), axis=0)
    sources = np.concatenate((first[np.newaxis], others[:FURTHER_SOURCES_MAX]))
    gaps = np.where(sources == NOBODY, NO_SOURCE, sources)
    if dataset.has_origin:
        gaps = np.concatenate((gaps, np.full((1, rows.size), NOBODY, np.int32)))
    return gaps.astype(np.int32)


def _held(dataset: DatasetSpec, assignment: Assignment) -> Iterator[HeldView]:
    workers = len(assignment.workers)
    owned, copies = count(assignment.owners, workers), count(assignment.replicas, workers)
    samples = _samples_of_workers(dataset, assignment.owners, workers)
    for place, worker in enumerate(assignment.workers):
        weight = assignment.weights.get(worker, 1.0)
        yield HeldView(worker.id, int(owned[place]), int(copies[place]), int(samples[place]), weight)


def _samples_of_workers(dataset: DatasetSpec, owners: Column, workers: int) -> Counts:
    if not dataset.shards:
        return np.zeros(workers, np.int64)
    # The first `larger` shards have one sample more than the others.
    size, larger = divmod(dataset.samples, dataset.shards)
    return size * count(owners, workers) + count(owners[:larger], workers)
