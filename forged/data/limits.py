"""How many shards the daemon plans for: per job, and for all jobs.

A plan takes some fifty bytes per copy of a shard while it is made, and a few while it is kept. A worker announces a
dataset before any shard was offered, so the announcement is limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forged.data.messages import DatasetSpec
from forged.data.model import Dataset
from forged.data.placement.planner import check_replication
from forged.errors import RequestRefused

JOB_SHARDS_MAX = 1 << 22
DAEMON_SHARDS_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """The limits of the copies of shards, replicas included."""

    job_shards_max: int = JOB_SHARDS_MAX
    daemon_shards_max: int = DAEMON_SHARDS_MAX

    def require_room(self, job: str, dataset: DatasetSpec, known: Mapping[str, DatasetSpec]) -> None:
        """Refuse a dataset that is too large for one job, or for the daemon beside those of the other jobs."""
        check_replication(dataset.replication)
        Dataset.of(dataset.samples, dataset.shards)
        wanted = _copies(dataset)
        if wanted > self.job_shards_max:
            raise RequestRefused(
                "too_many_shards",
                f"the dataset of job {job} must have at most {self.job_shards_max} copies of shards, replicas included,"
                f" got {wanted}",
                "use fewer and larger shards, or raise job_shards_max",
            )
        used = sum(_copies(other) for name, other in known.items() if name != job)
        if used + wanted > self.daemon_shards_max:
            raise RequestRefused(
                "too_many_shards",
                f"the datasets of all jobs must have at most {self.daemon_shards_max} copies of shards;"
                f" {used} are in use, and job {job} has {wanted}",
                "remove jobs that are over, use fewer and larger shards, or raise daemon_shards_max",
            )


def _copies(dataset: DatasetSpec) -> int:
    return dataset.shards * (1 + dataset.replication)
