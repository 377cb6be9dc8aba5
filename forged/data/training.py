"""`TrainingData`: the dataset of a job, and where one worker keeps and gets its shards.

All workers of a job need the same dataset; store, weight and origin may differ.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import cast

import msgspec

from forged.data.messages import DatasetSpec
from forged.data.model import Dataset
from forged.data.placement.planner import check_replication
from forged.data.placement.shares import check_weight
from forged.data.sampling.sampler import ElasticSampler, SamplingMode
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.origin import ORIGIN_TIMEOUT_S, ShardOrigin, check_origin_timeout
from forged.data.store.port import ShardStore
from forged.data.transfer.bandwidth import RATE_BYTES_MIN
from forged.elastic.compatibility import SharedConfig
from forged.errors import Problem, RequestRefused


@dataclass(frozen=True)
class TrainingData:
    """A dataset of so many samples in so many shards, and the directory or store for the shards of this worker.

    `origin` gives shards that no worker has. `replication` is the number of replicas of each shard. `rate_bytes_per_s`
    limits all transfers to this worker together. `weight` is the share of the data that this worker should hold,
    relative to other workers. A read of a shard fails when the origin gives nothing for `origin_timeout_s`.
    """

    samples: int
    shards: int
    store: ShardStore
    origin: ShardOrigin | None
    replication: int
    rate_bytes_per_s: float | None
    weight: float
    origin_timeout_s: float

    def __init__(
        self,
        samples: int,
        shards: int,
        store: ShardStore | str | os.PathLike[str],
        *,
        origin: ShardOrigin | None = None,
        replication: int = 0,
        rate_bytes_per_s: float | None = None,
        weight: float = 1.0,
        origin_timeout_s: float = ORIGIN_TIMEOUT_S,
    ) -> None:
        dataset = Dataset.of(samples, shards)
        copies = check_replication(replication)
        _check_rate(rate_bytes_per_s)
        check_weight(weight)
        timeout_s = check_origin_timeout(origin_timeout_s)
        shard_store = store if isinstance(store, ShardStore) else DirectoryShardStore(store)
        shard_store.dedicate(dataset)
        for name, value in (
            ("samples", dataset.samples),
            ("shards", dataset.shards),
            ("store", shard_store),
            ("origin", origin),
            ("replication", copies),
            ("rate_bytes_per_s", rate_bytes_per_s),
            ("weight", float(weight)),
            ("origin_timeout_s", timeout_s),
        ):
            object.__setattr__(self, name, value)

    @property
    def spec(self) -> DatasetSpec:
        """What must be the same for all workers of the job."""
        return DatasetSpec(self.samples, self.shards, self.replication, self.origin is not None)


def check_same_samples(data: TrainingData | None, sampler: ElasticSampler | None) -> None:
    """Refuse data and a sampler that do not fit together."""
    if sampler is None:
        return
    if data is None:
        if sampler.mode is SamplingMode.SHARDED:
            text = "the sampler's mode is sharded, which needs shards held here, and the worker has no training data"
            raise RequestRefused("sampler_differs", text, "pass `data`, or use mode shared")
        return
    _require_equal("samples", data.samples, sampler.total)
    if sampler.mode is SamplingMode.SHARDED:
        _require_equal("shards", data.shards, sampler.shards)


def _require_equal(what: str, of_data: int, of_sampler: int) -> None:
    if of_data != of_sampler:
        text = f"the sampler's {what} must be {of_data} as in the data, got {of_sampler}"
        raise RequestRefused("sampler_differs", text, "use the same dataset for both")


def common_of(data: TrainingData | None, sampler: ElasticSampler | None) -> SharedConfig:
    """What all workers of the job have to have in common with one that is given these."""
    common: SharedConfig = {}
    if data is not None:
        common["dataset"] = msgspec.structs.asdict(data.spec)
    if sampler is not None:
        common["sampler"] = dict(sampler.settings)
    return common


def _check_rate(rate: object) -> None:
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if rate is not None and not (is_number and RATE_BYTES_MIN <= cast("float", rate) < math.inf):
        problem = Problem(
            "rate_bytes_per_s", rate, f"a finite number of at least {RATE_BYTES_MIN}, or None for no limit"
        )
        raise RequestRefused("data_invalid", str(problem))
