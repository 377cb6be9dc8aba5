"""What a worker is given to train with, and where it keeps its part of it.

Law: all workers of a job are given the same dataset; where each of them keeps its shards, how much of the data it
should hold, and from where it has shards when no worker has, is its own affair.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import cast

import msgspec

from forged.data.dataset import Dataset
from forged.data.messages import DatasetSpec
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
    """A dataset of so many samples in so many shards, and the directory, or store, for those that are held here.

    `origin` tells from where a shard comes that no worker has. `replication` is how many further copies there should be
    of each. `rate_bytes_per_s` is how fast shards may come to this worker, all together. `weight` is how much of the
    data this worker should hold, in proportion to the others. `origin_timeout_s` is for how long the origin may give
    nothing of a shard: then it has failed to give it.
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
        patience_s = check_origin_timeout(origin_timeout_s)
        keeps = store if isinstance(store, ShardStore) else DirectoryShardStore(store)
        keeps.dedicate(dataset)
        for name, value in (
            ("samples", dataset.samples),
            ("shards", dataset.shards),
            ("store", keeps),
            ("origin", origin),
            ("replication", copies),
            ("rate_bytes_per_s", rate_bytes_per_s),
            ("weight", float(weight)),
            ("origin_timeout_s", patience_s),
        ):
            object.__setattr__(self, name, value)

    @property
    def spec(self) -> DatasetSpec:
        """What all workers of the job have to agree on."""
        return DatasetSpec(self.samples, self.shards, self.replication, self.origin is not None)


def check_same_samples(data: TrainingData | None, sampler: ElasticSampler | None) -> None:
    """Refuse a worker of whose samples no step could be made."""
    if sampler is None:
        return
    if data is None:
        if sampler.mode is SamplingMode.SHARDED:
            text = "mode = sharded: a rank draws from the shards that it holds, and this worker has no training data"
            raise RequestRefused("sampler_differs", text, "give it `data`, or let the mode be shared")
        return
    _require_equal("samples", data.samples, sampler.total)
    if sampler.mode is SamplingMode.SHARDED:
        _require_equal("shards", data.shards, sampler.shards)


def _require_equal(what: str, of_data: int, of_sampler: int) -> None:
    if of_data != of_sampler:
        text = f"the data has {of_data} {what}, and the sampler {of_sampler}"
        raise RequestRefused("sampler_differs", text, "give both the same dataset")


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
        problem = Problem("rate_bytes_per_s", rate, f"a number from {RATE_BYTES_MIN}, or None for as fast as it goes")
        raise RequestRefused("data_invalid", str(problem))
