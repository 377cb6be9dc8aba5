"""Makes the transfer plan of an attempt from the members' offers. Changes nothing, so a thread may do it.

Invariants:
- If copies of a shard differ, the content that most workers hold counts; in a tie the owner's, then the lowest rank's.
- A copy without a mark counts as equal to the majority's.
- The origin is not asked: an origin that gives different bytes each time is often the cause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from forged.data.columns import NOBODY, Column, Mask, count
from forged.data.messages import NAMED_MAX, DatasetSpec, TransferTotals
from forged.data.model import Indices, SourceKind, TransferPace
from forged.data.ownership.attempt import NO_SHARDS, Assignment, DataAttempt, Draft, LostShards, Marks, Offer
from forged.data.ownership.ownership import ShardOwnership
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.planner import DataRedistributor
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, RedistributionType, WorkerId
from forged.errors import RequestRefused


def draft(ownership: ShardOwnership, attempt: DataAttempt, config: ElasticTrainingConfig) -> Draft:
    """Plan the transfers of an attempt, once all members have offered."""
    dataset, assignment = ownership.dataset, ownership.assignment
    present = ClusterTopology(attempt.members)
    offers = dict(attempt.offers)
    copies = {worker: offers[worker].copies for worker in present.workers}
    held = {worker: ids for worker, (ids, _) in copies.items()}
    bytes_per_sample = _bytes_per_sample(dataset, offers, held, otherwise=ownership.bytes_per_sample)
    pace = TransferPace.average([one.bytes_per_second for one in offers.values()], bytes_per_sample) or ownership.pace
    owners = _current_owners(assignment, held)
    minority = _outvoted(copies, owners)
    if minority and dataset.has_origin:
        held |= {worker: np.setdiff1d(held[worker], ids) for worker, ids in minority.items()}
        owners = _current_owners(assignment, held)
    weights = {worker: one.weight for worker, one in offers.items() if one.weight != 1.0}
    plan = DataRedistributor(config, replication=dataset.replication).calculate_plan(
        present,
        ClusterTopology(attempt.target),
        dataset.samples,
        shards=dataset.shards,
        current=owners,
        # Without the owners' own copies, which are nearly all.
        replicas={worker: ids[owners[ids] != rank] for rank, (worker, ids) in enumerate(held.items())},
        weights=_weights_where_full(ownership, attempt, config, weights, owners),
        draining=attempt.draining,
        pace=pace,
    )
    # The grouping by worker is computed here, in a thread, and not when the first member asks.
    for worker in attempt.target[:1]:
        plan.for_worker(worker)
        plan.copy_assignments.ids(worker)
    without_source = NO_SHARDS if dataset.has_origin else _without_source(plan)
    lost = LostShards(
        int(without_source.size),
        tuple(without_source[:NAMED_MAX].tolist()),
        last_held_by=last_holders(assignment, without_source, held),
    )
    planned = Assignment(0, attempt.target, plan.owners, plan.replicas, weights)
    return Draft(plan, _totals(plan, bytes_per_sample), bytes_per_sample, pace, lost, planned, minority)


def preview(
    ownership: ShardOwnership, names: list[str], config: ElasticTrainingConfig, gone: Collection[str] = ()
) -> TransferTotals:
    """The transfers of a rescale to `workers`, in rank order; current workers except `gone` give their shards."""
    assignment, dataset = ownership.assignment, ownership.dataset
    known = {worker.id: worker for worker in assignment.workers}
    if len(set(names)) < len(names):
        raise RequestRefused("workers_invalid", "a worker is named twice", "name each worker once")
    # The hosts of new workers are unknown: each counts as a host of its own.
    target = tuple(known.get(name) or WorkerId(name, f"host of {name}", 0) for name in names)
    plan = DataRedistributor(config, replication=dataset.replication).calculate_plan(
        ClusterTopology(assignment.workers),
        ClusterTopology(target),
        dataset.samples,
        shards=dataset.shards,
        current=assignment.owners,
        replicas=assignment.replicas,
        weights=assignment.weights,
        draining=[worker for worker in assignment.workers if worker not in target and worker.id not in gone],
        pace=ownership.pace,
    )
    return _totals(plan, ownership.bytes_per_sample)


def last_holders(assignment: Assignment, shards: Indices, present: Collection[WorkerId]) -> tuple[str, ...]:
    """The workers that held these shards in the last world and are gone, the holder of most of them first."""
    holders = np.concatenate((assignment.owners[np.newaxis, shards], assignment.replicas[:, shards]))
    held = count(holders, len(assignment.workers))
    order = np.argsort(-held, kind="stable")[: np.count_nonzero(held)].tolist()
    return tuple(assignment.workers[place].id for place in order if assignment.workers[place] not in present)[
        :NAMED_MAX
    ]


def _weights_where_full(
    ownership: ShardOwnership,
    attempt: DataAttempt,
    config: ElasticTrainingConfig,
    weights: Mapping[WorkerId, float],
    owners: Column,
) -> Mapping[WorkerId, float]:
    """Weights with which a full worker gets nothing new.

    It keeps its share where shards stay in place, and gets none where they do not.
    """
    full = [worker for worker in attempt.target if worker in ownership.full]
    others = math.fsum(weights.get(worker, 1.0) for worker in attempt.target if worker not in ownership.full)
    if not full or not 0.0 < others < math.inf:
        return weights
    dataset = ownership.dataset
    held = count(owners, len(attempt.members))
    kept = {worker: int(held[attempt.members.index(worker)]) for worker in full}
    left = dataset.shards - sum(kept.values())
    if config.redistribution_type is not RedistributionType.INCREMENTAL or dataset.replication or not left:
        return {**weights, **dict.fromkeys(full, 0.0)}
    shares = {worker: number * others / left for worker, number in kept.items()}
    return {**weights, **{worker: min(share, weights.get(worker, 1.0)) for worker, share in shares.items()}}


def _current_owners(assignment: Assignment, held: Mapping[WorkerId, Indices]) -> Column:
    """The owner of each shard: its owner in the last world if it still offers it, else the first worker that does."""
    owners = np.full(assignment.owners.size, NOBODY, np.int32)
    known = {worker: place for place, worker in enumerate(assignment.workers)}
    for rank, (worker, ids) in enumerate(held.items()):
        place = known.get(worker)
        if place is not None:
            own = ids[assignment.owners[ids] == place]
            owners[own] = rank
    for rank, ids in enumerate(held.values()):
        free = ids[owners[ids] == NOBODY]
        owners[free] = rank
    return owners


def _bytes_per_sample(
    dataset: DatasetSpec, offers: Mapping[WorkerId, Offer], held: Mapping[WorkerId, Indices], *, otherwise: float
) -> float:
    size, larger = divmod(dataset.samples, dataset.shards or 1)
    samples = sum(size * ids.size + int(np.searchsorted(ids, larger)) for ids in held.values())
    return sum(one.bytes for one in offers.values()) / samples if samples else otherwise


def _outvoted(copies: Mapping[WorkerId, tuple[Indices, Marks]], owners: Column) -> dict[WorkerId, Indices]:
    sizes = [ids.size for ids, _ in copies.values()]
    ids = np.concatenate([NO_SHARDS, *(ids for ids, _ in copies.values())])
    marks = np.concatenate([NO_SHARDS.view(np.uint64), *(marks for _, marks in copies.values())])
    lost = outvoted_rows(ids, marks, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), owners)
    if not lost.any():
        return {}
    parts = np.split(np.flatnonzero(lost), np.searchsorted(np.flatnonzero(lost), np.cumsum(sizes)[:-1]))
    return {worker: ids[part] for worker, part in zip(copies, parts, strict=True) if part.size}


def outvoted_rows(shards: Indices, marks: Marks, ranks: Column, owners: Column) -> Mask:
    """Which copies are outvoted. Each row has a shard, its mark and its rank; `owners` has a rank for each shard."""
    found = np.zeros(shards.size, np.bool_)
    known = np.flatnonzero(marks)
    reference = np.zeros(owners.size, np.uint64)
    reference[shards[known]] = marks[known]
    is_disputed = np.zeros(owners.size, np.bool_)
    is_disputed[shards[known[marks[known] != reference[shards[known]]]]] = True
    rows = known[is_disputed[shards[known]]]
    if rows.size:
        found[_losers(rows[np.lexsort((ranks[rows], marks[rows], shards[rows]))], shards, marks, ranks, owners)] = True
    return found


def _losers(rows: Indices, shards: Indices, marks: Marks, ranks: Column, owners: Column) -> Indices:
    """The rows whose mark is outvoted; `rows` is sorted by shard, then mark."""
    is_other = (shards[rows][1:] != shards[rows][:-1]) | (marks[rows][1:] != marks[rows][:-1])
    starts = np.flatnonzero(np.concatenate(([True], is_other)))
    votes = np.diff(np.append(starts, rows.size))
    of_owner = np.logical_or.reduceat(ranks[rows] == owners[shards[rows]], starts)
    of_shard, of_rank = shards[rows[starts]], ranks[rows[starts]]
    best = np.lexsort((of_rank, ~of_owner, -votes, of_shard))
    is_first = np.concatenate(([True], of_shard[best][1:] != of_shard[best][:-1]))
    counts = np.zeros(starts.size, np.bool_)
    counts[best[is_first]] = True
    return rows[~np.repeat(counts, votes)]


def _without_source(plan: DataRedistributionPlan) -> Indices:
    columns = plan.columns
    found: Indices = columns.shards[(columns.sources == NOBODY) & (columns.copies == 0)]
    return found


def _totals(plan: DataRedistributionPlan, bytes_per_sample: float) -> TransferTotals:
    return TransferTotals(
        shards=plan.moved,
        transfers=len(plan.transfers),
        from_owners=plan.transfer_count(SourceKind.OWNER),
        from_replicas=plan.transfer_count(SourceKind.REPLICA),
        from_origin=plan.transfer_count(SourceKind.ORIGIN),
        bytes=plan.bytes_to_move(bytes_per_sample),
        estimated_s=plan.estimated_seconds,
    )
