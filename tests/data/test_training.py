from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from forged.data import DirectoryShardStore, ElasticSampler, FunctionOrigin, TrainingData
from forged.data.messages import DatasetSpec
from forged.data.model import Dataset
from forged.data.placement.planner import REPLICATION_MAX
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import ORIGIN_TIMEOUT_S
from forged.data.training import common_of
from forged.data.transfer.bandwidth import RATE_BYTES_MIN
from forged.errors import RequestRefused
from forged.worker.worker import ElasticWorker


def test_a_directory_is_as_good_as_a_store(tmp_path: Path) -> None:
    data = TrainingData(100, 10, tmp_path / "shards")
    assert isinstance(data.store, DirectoryShardStore)
    store = MemoryShardStore()
    assert TrainingData(100, 10, store).store is store


def test_shared_spec_excludes_store_and_rate_of_the_worker() -> None:
    origin = FunctionOrigin(lambda shard, file: None)
    one = TrainingData(100, 10, MemoryShardStore(), origin=origin, replication=2, rate_bytes_per_s=2e6)
    other = TrainingData(100, 10, MemoryShardStore(), origin=FunctionOrigin(lambda shard, file: None), replication=2)
    assert one.spec == other.spec == DatasetSpec(100, 10, 2, True)
    assert TrainingData(100, 10, MemoryShardStore()).spec == DatasetSpec(100, 10, 0, False)


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_few_samples_are_a_dataset(samples: int) -> None:
    assert TrainingData(samples, samples, MemoryShardStore()).spec.shards == samples


@pytest.mark.parametrize(
    ("samples", "shards", "more"),
    [
        (-1, 1, {}),
        (10, 0, {}),
        (10, 11, {}),
        (10, 2, {"replication": -1}),
        (10, 2, {"replication": 1.5}),
        (10, 2, {"replication": REPLICATION_MAX + 1}),
        (10, 2, {"rate_bytes_per_s": 0}),
        (10, 2, {"rate_bytes_per_s": RATE_BYTES_MIN - 1}),
        (10, 2, {"rate_bytes_per_s": float("inf")}),
        (10, 2, {"rate_bytes_per_s": True}),
        (10, 2, {"rate_bytes_per_s": "1e6"}),
        (10, 2, {"rate_bytes_per_s": float("nan")}),
        (10, 2, {"weight": 0}),
        (10, 2, {"weight": -1.0}),
        (10, 2, {"weight": float("nan")}),
        (10, 2, {"weight": float("inf")}),
        (10, 2, {"weight": True}),
        (10, 2, {"weight": "3"}),
        (10, 2, {"weight": None}),
        (10, 2, {"origin_timeout_s": 0}),
        (10, 2, {"origin_timeout_s": -1.0}),
        (10, 2, {"origin_timeout_s": float("nan")}),
        (10, 2, {"origin_timeout_s": float("inf")}),
        (10, 2, {"origin_timeout_s": True}),
        (10, 2, {"origin_timeout_s": "600"}),
        (10, 2, {"origin_timeout_s": None}),
    ],
)
def test_invalid_training_data_is_refused_at_construction(samples: int, shards: int, more: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        TrainingData(samples, shards, MemoryShardStore(), **more)


def test_a_weight_is_each_workers_own_affair_and_1_where_none_is_given() -> None:
    light, heavy = TrainingData(100, 10, MemoryShardStore()), TrainingData(100, 10, MemoryShardStore(), weight=3)
    assert (light.weight, heavy.weight) == (1.0, 3.0)
    assert type(heavy.weight) is float
    assert light.spec == heavy.spec


def test_how_long_an_origin_may_give_nothing_is_each_workers_own_affair() -> None:
    usual, short = (
        TrainingData(100, 10, MemoryShardStore()),
        TrainingData(100, 10, MemoryShardStore(), origin_timeout_s=3),
    )
    assert (usual.origin_timeout_s, short.origin_timeout_s) == (ORIGIN_TIMEOUT_S, 3.0)
    assert type(short.origin_timeout_s) is float
    assert usual.spec == short.spec


def test_a_patience_that_is_none_is_refused_by_name_before_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"origin_timeout_s must be .*, got 0"):
        TrainingData(100, 10, tmp_path / "shards", origin_timeout_s=0)
    assert not (tmp_path / "shards").exists()


def test_a_weight_that_is_none_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"weight must be .*, got 0") as error:
        TrainingData(100, 10, tmp_path / "shards", weight=0)
    assert error.value.code == "weight_invalid"
    assert not (tmp_path / "shards").exists()


def test_numbers_may_be_numpys() -> None:
    samples, shards, copies = cast("tuple[int, int, int]", (np.int64(100), np.int32(10), np.uint8(1)))
    data = TrainingData(samples, shards, MemoryShardStore(), replication=copies)
    assert msgspec.json.encode(data.spec) == b'{"samples":100,"shards":10,"replication":1,"has_origin":false}'


def test_a_sharded_sampler_without_data_is_refused_at_once() -> None:
    with pytest.raises(RequestRefused, match="the worker has no training data") as error:
        ElasticWorker("a", sampler=ElasticSampler(100, 10, mode="sharded", dataset=Dataset(100, 5)))
    assert error.value.code == "sampler_differs"
    assert error.value.fix == "pass `data`, or use mode shared"


def test_a_sharded_sampler_of_other_shards_is_refused_at_once() -> None:
    data = TrainingData(100, 10, MemoryShardStore())
    with pytest.raises(RequestRefused, match="the sampler's shards must be 10 as in the data, got 5") as error:
        ElasticWorker("a", data=data, sampler=ElasticSampler(100, 10, mode="sharded", dataset=Dataset(100, 5)))
    assert error.value.code == "sampler_differs"
    assert error.value.fix == "use the same dataset for both"


def test_workers_have_the_dataset_and_the_order_of_its_samples_in_common() -> None:
    data = TrainingData(100, 10, MemoryShardStore(), weight=3.0)
    assert common_of(None, None) == {}
    assert common_of(data, ElasticSampler(100, 10, seed=7, drop_last=True)) == {
        "dataset": {"samples": 100, "shards": 10, "replication": 0, "has_origin": False},
        "sampler": {
            "total": 100,
            "seed": 7,
            "shuffle": True,
            "drop_last": True,
            "mode": "shared",
            "shards": 0,
        },
    }


def test_a_sampler_of_other_samples_is_refused_at_once() -> None:
    data = TrainingData(100, 10, MemoryShardStore())
    with pytest.raises(RequestRefused, match="the sampler's samples must be 100 as in the data, got 99") as error:
        ElasticWorker("a", data=data, sampler=ElasticSampler(99, 10))
    assert error.value.code == "sampler_differs"
