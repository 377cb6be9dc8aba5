"""Finds the copies of a shard that differ from the majority's.

Invariants:
- If copies of a shard differ, the content that most workers hold counts; in a tie the owner's, then the lowest rank's.
- A copy without a mark counts as equal to the majority's.
- The origin is not asked: an origin that gives different bytes each time is often the cause.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forged.data.columns import Column, Mask
from forged.data.model import Indices

Marks = npt.NDArray[np.uint64]
"""The first bytes of each copy's checksum; 0 where unknown."""
MARK_BYTES = 8


def mark_of(checksum: bytes) -> bytes:
    """The mark of a checksum."""
    return checksum[:MARK_BYTES].ljust(MARK_BYTES, b"\0")


def outvoted(shards: Indices, marks: Marks, ranks: Column, owners: Column) -> Mask:
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
