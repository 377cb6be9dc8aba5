from __future__ import annotations

import pytest

from forged.data.limits import ShardLimits
from forged.data.messages import DatasetSpec
from forged.errors import RequestRefused

LIMITS = ShardLimits(job_shards_max=100, daemon_shards_max=150)


@pytest.mark.parametrize(
    ("shards", "replication", "others", "text"),
    [
        (100, 0, 50, None),
        (50, 1, 0, None),
        (101, 0, 0, "job a must have at most 100 copies of shards, replicas included, got 101"),
        (10**8, 0, 0, "got 100000000"),
        (34, 2, 0, "got 102"),
        (100, 0, 51, "all jobs must have at most 150 copies of shards; 51 are in use, and job a has 100"),
    ],
)
def test_dataset_beyond_the_limit_of_its_job_or_the_daemon_is_refused(
    shards: int, replication: int, others: int, text: str | None
) -> None:
    dataset = DatasetSpec(10**9, shards, replication)
    known = {"a": DatasetSpec(10**9, 90), "b": DatasetSpec(10**9, others)}
    if text is None:
        LIMITS.require_room("a", dataset, known)
        return
    with pytest.raises(RequestRefused) as caught:
        LIMITS.require_room("a", dataset, known)
    assert caught.value.code == "too_many_shards"
    assert text in caught.value.message
