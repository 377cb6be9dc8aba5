from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from forged.data.store.directory import DirectoryShardStore
from forged.data.store.port import Stamp
from forged.demo.dataset import (
    DIVISION,
    SHARDS,
    DatasetReader,
    bytes_of,
    directory_of,
    misplaced,
    training_data,
    write_shard,
)
from forged.demo.learning import SAMPLES, Task

WORKERS = ["w0", "w1"]


@pytest.fixture(scope="module")
def task() -> Task:
    return Task()


def put(store: DirectoryShardStore, shard: int, data: bytes) -> None:
    with store.receive(shard, Stamp.of(data)) as arriving:
        arriving.write(data)
        arriving.commit()


@pytest.fixture
def stores(tmp_path: Path, task: Task) -> dict[str, DirectoryShardStore]:
    """Two workers that both hold all shards."""
    stores = {name: DirectoryShardStore(directory_of(tmp_path, name)) for name in WORKERS}
    for store in stores.values():
        for number in range(SHARDS):
            put(store, number, bytes_of(task.samples, DIVISION.shard(number)))
    return stores


def test_a_sample_is_the_same_wherever_it_is_read(tmp_path: Path, task: Task) -> None:
    store = DirectoryShardStore(tmp_path)
    for number in range(0, SHARDS, 2):
        put(store, number, bytes_of(task.samples, DIVISION.shard(number)))
    which = np.random.default_rng(1).permutation(SAMPLES)
    reader = DatasetReader(store, task.samples)
    read = reader.read(which)
    assert np.array_equal(read.points, task.samples.points[which])
    assert np.array_equal(read.labels, task.samples.labels[which])
    assert (reader.here, reader.elsewhere) == (SAMPLES // 2, SAMPLES // 2)


def test_no_samples_are_read_from_nowhere(tmp_path: Path, task: Task) -> None:
    reader = DatasetReader(DirectoryShardStore(tmp_path), task.samples)
    assert len(reader.read(np.empty(0, np.int64))) == 0
    assert (reader.here, reader.elsewhere) == (0, 0)


def test_origin_writes_the_bytes_of_the_samples(tmp_path: Path, task: Task) -> None:
    data = training_data(tmp_path, "w0", task.samples)
    assert data.origin is not None
    for number in (0, SHARDS - 1):
        file = io.BytesIO()
        data.origin.write_to(DIVISION.shard(number), file)
        assert file.getvalue() == bytes_of(task.samples, DIVISION.shard(number))
    assert (data.samples, data.shards, data.spec.has_origin) == (SAMPLES, SHARDS, True)
    assert directory_of(tmp_path, "w0").is_dir()


def test_all_samples_are_in_the_shards(task: Task) -> None:
    file = io.BytesIO()
    for number in range(SHARDS):
        write_shard(task.samples, DIVISION.shard(number), file)
    assert len(file.getvalue()) == SAMPLES * 24


class TestMisplaced:
    OWNERS = ["w0", "w1"] * (SHARDS // 2)

    @pytest.mark.usefixtures("stores")
    def test_where_all_is_in_its_place_there_are_no_problems(self, tmp_path: Path, task: Task) -> None:
        assert misplaced(tmp_path, self.OWNERS, WORKERS, task.samples) == []
        assert misplaced(tmp_path, ["w0"] * SHARDS, ["w0"], task.samples) == []

    def test_a_shard_that_is_gone_is_found(
        self, tmp_path: Path, task: Task, stores: dict[str, DirectoryShardStore]
    ) -> None:
        stores["w0"].drop(6)
        assert misplaced(tmp_path, self.OWNERS, WORKERS, task.samples) == [
            "shard 6 is owned by w0 and held by w1",
            "shard 6 has 1 copies, expected 2",
        ]

    def test_one_that_is_another_is_found(
        self, tmp_path: Path, task: Task, stores: dict[str, DirectoryShardStore]
    ) -> None:
        path = stores["w1"].path_of(7)
        path.write_bytes(bytes(path.stat().st_size))
        found = misplaced(tmp_path, self.OWNERS, WORKERS, task.samples)
        assert found == ["shard 7 at w1 differs from the origin"]

    @pytest.mark.usefixtures("stores")
    def test_a_shard_without_owner_is_found(self, tmp_path: Path, task: Task) -> None:
        found = misplaced(tmp_path, ["", *self.OWNERS[1:]], WORKERS, task.samples)
        assert found == ["shard 0 is owned by no worker and held by w0, w1"]

    @pytest.mark.usefixtures("stores")
    def test_owners_that_are_not_known_are_a_problem(self, tmp_path: Path, task: Task) -> None:
        assert misplaced(tmp_path, [], WORKERS, task.samples) == ["the daemon knows the owners of 0 of 48 shards"]
