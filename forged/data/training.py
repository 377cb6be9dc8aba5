"""What a worker is given to train with, and where it keeps its part of it.

Law: all workers of a job are given the same dataset; where each of them keeps its shards, and from where it has them
when no worker has, is its own affair.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from forged.data.directory import DirectoryShardStore
from forged.data.messages import DatasetSpec
from forged.data.origin import ShardOrigin
from forged.data.permutation import check_whole
from forged.data.shards import Dataset
from forged.data.store import ShardStore
from forged.errors import Problem, RequestRefused

REPLICATION_MAX = 100
"""So many further copies of a shard there may be."""


@dataclass(frozen=True)
class TrainingData:
    """A dataset of so many samples in so many shards, and the directory, or store, for those that are held here.

    `origin` tells from where a shard comes that no worker has. `replication` is how many further copies there should be
    of each. `rate_bytes_per_s` is how fast shards may come to this worker, all together.
    """

    samples: int
    shards: int
    store: ShardStore
    origin: ShardOrigin | None
    replication: int
    rate_bytes_per_s: float | None

    def __init__(
        self,
        samples: int,
        shards: int,
        store: ShardStore | str | os.PathLike[str],
        *,
        origin: ShardOrigin | None = None,
        replication: int = 0,
        rate_bytes_per_s: float | None = None,
    ) -> None:
        Dataset.of(samples, shards)
        check_whole("data_invalid", "replication", replication, 0, REPLICATION_MAX)
        if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
            problem = Problem("rate_bytes_per_s", rate_bytes_per_s, "a number above 0, or None for as fast as it goes")
            raise RequestRefused("data_invalid", str(problem))
        keeps = store if isinstance(store, ShardStore) else DirectoryShardStore(store)
        for name, value in (
            ("samples", samples),
            ("shards", shards),
            ("store", keeps),
            ("origin", origin),
            ("replication", replication),
            ("rate_bytes_per_s", rate_bytes_per_s),
        ):
            object.__setattr__(self, name, value)

    @property
    def spec(self) -> DatasetSpec:
        """What all workers of the job have to agree on."""
        return DatasetSpec(self.samples, self.shards, self.replication, self.origin is not None)
