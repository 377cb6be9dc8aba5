"""Reads the current holders of shards from a caller's arguments.

Invariants:
- The result names only reachable workers: the new topology by rank, then workers that leave and still serve.
- No worker holds a shard twice, and no shard has two owners; contradictory arguments are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Places, ordinals
from forged.data.model import DataShard
from forged.data.placement.plan import Assignments
from forged.elastic.model import RANK_NONE, ClusterTopology, WorkerId
from forged.errors import RequestRefused

AnyArray = npt.NDArray[Any]
Ids = Sequence[int] | Sequence[DataShard] | AnyArray
Held = Sequence[int] | AnyArray | Mapping[WorkerId, Ids]
"""Old ranks by shard, -1 for none; or the shards that each worker of the old topology holds."""
HeldCopies = Held | Sequence[Sequence[int]]
"""The same, or one row of old ranks for each replica."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The reachable workers, the first `world` of which are the new topology; their hosts; and the old ranks."""

    workers: tuple[WorkerId, ...]
    world: int
    hosts: Column
    old: ClusterTopology
    numbers: Column

    @classmethod
    def of(cls, old: ClusterTopology, new: ClusterTopology, draining: Collection[WorkerId]) -> Roster:
        """The new topology, and the workers of the old one that leave and still serve."""
        serving = frozenset(draining)
        workers = (*new.workers, *(one for one in old.workers if one in serving and one not in new))
        known: dict[str, int] = {}
        hosts = [known.setdefault(one.hostname, len(known)) for one in workers]
        place = {one: number for number, one in enumerate(workers)}
        numbers = [place.get(one, NOBODY) for one in old.workers]
        # Index -1, for no worker, reads the last element.
        return cls(workers, new.world_size, np.array(hosts, np.int32), old, np.array([*numbers, NOBODY], np.int32))

    def renumbered(self, ranks: Column) -> Column:
        """The places of these old ranks."""
        renumbered: Column = np.take(self.numbers, ranks, mode="wrap")
        return renumbered


def read_owners(roster: Roster, shards: int, current: Held | None) -> Column:
    """The owner of each shard; by default shards are dealt in rounds over the old ranks."""
    if current is None:
        return np.resize(roster.numbers[:-1], shards) if roster.old.world_size else np.full(shards, NOBODY, np.int32)
    if not isinstance(current, Mapping):
        return roster.renumbered(_checked_ranks("current", _as_array("current", current), (shards,), roster))
    owners = np.full(shards, NOBODY, np.int32)
    for rank, ids in _claims("current", current, roster.old, shards):
        if (owners[ids] != NOBODY).any():
            shard = int(ids[owners[ids] != NOBODY][0])
            raise _refused(f"current: shard {shard} has two owners", "pass replicas as `replicas`")
        owners[ids] = rank
    return roster.renumbered(owners)


def read_replicas(roster: Roster, owners: Column, replicas: HeldCopies | None) -> Column:
    """One row of workers for each replica, -1 where there is none."""
    shards = owners.size
    if replicas is None:
        return np.empty((0, shards), np.int32)
    if isinstance(replicas, Mapping):
        ranks = _stacked(list(_claims("replicas", replicas, roster.old, shards)), shards)
    else:
        given = _as_array("replicas", replicas)
        rows = given if given.ndim > 1 else given[np.newaxis]
        ranks = _checked_ranks("replicas", rows, (rows.shape[0], shards), roster)
    found = roster.renumbered(ranks)
    _forget_repetitions(found, owners)
    known: Column = found[(found != NOBODY).any(axis=1)]
    return known


def _forget_repetitions(replicas: Column, owners: Column) -> None:
    for number, row in enumerate(replicas):
        for earlier in (owners, *replicas[:number]):
            row[row == earlier] = NOBODY


def _checked_ranks(field: str, ranks: AnyArray, shape: tuple[int, ...], roster: Roster) -> Column:
    if ranks.shape != shape or (ranks.size and ranks.dtype.kind not in "iu"):
        raise _refused(f"{field} must be {shape[-1]} ranks, one per shard", "pass a whole number for every shard")
    if ranks.size and (ranks.min() < RANK_NONE or ranks.max() >= roster.old.world_size):
        raise _refused(
            f"{field} must contain ranks from 0 to {roster.old.world_size - 1} of the old topology, or -1",
            "use -1 for a shard without an owner",
        )
    checked: Column = ranks.astype(np.int32, copy=False)
    return checked


def _claims(
    field: str, held: Mapping[WorkerId, Ids], old: ClusterTopology, shards: int
) -> Iterator[tuple[int, Places]]:
    """The rank of each worker and the shards that it holds, each once."""
    for worker, given in held.items():
        numbers = held.ids(worker) if isinstance(held, Assignments) else _numbers(given)
        rank, ids = old.rank_of(worker), _as_array(field, numbers)
        if rank == RANK_NONE:
            raise _refused(
                f"{field} names {worker}, which is not in the old topology", "name workers of the old topology"
            )
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= shards):
            raise _refused(f"{field}: the shards of {worker} must be from 0 to {shards - 1}", "check the dataset")
        yield rank, np.unique(ids.astype(np.intp))


def _numbers(given: Ids) -> object:
    """The ids of shards that are given as values."""
    if isinstance(given, Sequence) and given and isinstance(given[0], DataShard):
        return [one.shard_id if isinstance(one, DataShard) else one for one in given]
    return given


def _stacked(claims: Sequence[tuple[int, Places]], shards: int) -> Column:
    """One row for the first holder of each shard, a second row for the second, and so on."""
    ids = np.concatenate([ids for _, ids in claims]) if claims else np.empty(0, np.intp)
    rows = ordinals(ids, shards)
    stacked = np.full((int(rows.max(initial=-1)) + 1, shards), NOBODY, np.int32)
    stacked[rows, ids] = np.repeat(np.array([rank for rank, _ in claims], np.int32), [ids.size for _, ids in claims])
    return stacked


def _as_array(field: str, given: object) -> AnyArray:
    try:
        return np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise _refused(f"{field} must be an array of whole numbers: {error}", "pass one array") from error


def _refused(message: str, fix: str) -> RequestRefused:
    return RequestRefused("holdings_invalid", message, fix)
