from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forged.data.ownership.planning import outvoted_rows

SHARDS, WORKERS = 6, 5
copies = st.dictionaries(
    st.tuples(st.integers(0, WORKERS - 1), st.integers(0, SHARDS - 1)), st.integers(0, 3), max_size=WORKERS * SHARDS
)
"""What each worker's copy of each shard is; 0 where it does not say."""


@given(copies, st.lists(st.integers(-1, WORKERS - 1), min_size=SHARDS, max_size=SHARDS))
def test_the_content_counts_that_most_hold_then_the_owners_then_the_first_ones(
    held: dict[tuple[int, int], int], owners: list[int]
) -> None:
    by_shard: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for (rank, shard), mark in held.items():
        if mark:
            by_shard[shard][rank] = mark
    expected = set()
    for shard, said in by_shard.items():
        votes, own = Counter(said.values()), said.get(owners[shard])
        most = [said[rank] for rank in sorted(said) if votes[said[rank]] == max(votes.values())]
        best = own if own in most else most[0]
        expected |= {(rank, shard) for rank, mark in said.items() if mark != best}
    rows = sorted(held)
    ranks, shards = (np.array([row[place] for row in rows], np.int64) for place in (0, 1))
    marks = np.array([held[row] for row in rows], np.uint64)
    lost = outvoted_rows(shards, marks, ranks.astype(np.int32), np.array(owners, np.int32))
    assert {rows[place] for place in np.flatnonzero(lost)} == expected
