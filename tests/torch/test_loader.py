"""Loaders of torch scripts: each sample of an epoch is used once, whatever happens to the workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import forged.torch as ft
from forged.errors import RequestRefused
from forged.torch.loader import indexed
from tests.client.threaded_daemon import ThreadedDaemon
from tests.torch import loading_script
from tests.torch.loading_script import BATCH, SAMPLES, SHARDS
from tests.torch.torch_cluster import TorchCluster

STEPS = math.ceil(SAMPLES / BATCH)
"""The steps of an epoch."""
EPOCHS = 2


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    daemon = ThreadedDaemon(tmp_path_factory.mktemp("daemon"))
    yield daemon.runner.endpoint
    daemon.close()


@pytest.fixture
def cluster(endpoint: str) -> Iterator[TorchCluster]:
    cluster = TorchCluster(endpoint)
    yield cluster
    cluster.close()


def used_of(cluster: TorchCluster) -> dict[int, list[int]]:
    """By step, the samples that all workers have used."""
    used: dict[int, list[int]] = {}
    for worker in cluster.workers.values():
        for report in worker.all_of("step"):
            used.setdefault(report["step"], []).extend(report["samples"])
    return used


def check_epochs(used: dict[int, list[int]], steps: range) -> None:
    assert sorted(used) == list(steps)
    for first in range(0, len(steps), STEPS):
        epoch = [sample for step in steps[first : first + STEPS] for sample in used[step]]
        assert Counter(epoch) == Counter(range(SAMPLES))


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("shards", [False, True], ids=["samples", "shards"])
def test_each_sample_is_used_once_though_a_worker_dies_and_a_step_is_aborted(
    shards: bool, processes: int, cluster: TorchCluster
) -> None:
    options = {"shards": shards, "loading_processes": processes, "total": EPOCHS * STEPS}
    for name, fails in (("a", "abort"), ("b", "abort"), ("c", "")):
        cluster.start(name, loading_script.main, size=3, fails=fails, at=5, **options)
    for worker in cluster.workers.values():
        worker.wait_for("held")
    victim = cluster.workers["c"]
    victim.process.kill()
    victim.process.join()
    cluster.release(but="c")
    for name in "ab":
        cluster.workers[name].wait_for("end")
    check_epochs(used_of(cluster), range(EPOCHS * STEPS))
    for epoch in range(EPOCHS):
        audit = cluster.client.audit_data(cluster.job, epoch)
        assert audit.complete, audit
    report = cluster.workers["a"].all_of("step")[-1]
    # The last step has few samples: the gradient is the mean over them, whatever the workers' parts are.
    mean = sum(used_of(cluster)[report["step"]]) / len(used_of(cluster)[report["step"]])
    assert math.isclose(report["gradient"], mean, rel_tol=1e-5)


def test_checkpoint_has_the_position_in_the_data(cluster: TorchCluster, tmp_path: Path) -> None:
    options: dict[str, Any] = {"holds": False, "checkpoints": str(tmp_path)}
    for name in "ab":
        cluster.start(name, loading_script.main, size=2, total=5, **options)
    for name in "ab":
        cluster.workers[name].wait_for("end")
    cluster.job += "-resumed"
    cluster.start("c", loading_script.main, size=1, total=STEPS, **options)
    cluster.workers["c"].wait_for("end")
    check_epochs(used_of(cluster), range(STEPS))


class TestDatasets:
    def test_shards_are_read_in_order_and_few_are_kept(self) -> None:
        reads: list[int] = []

        def read(shard: int) -> Iterator[torch.Tensor]:
            reads.append(shard)
            return loading_script.read(shard)

        shards = ft.Shards(SHARDS, read)
        assert [int(shards[sample]) for sample in range(len(shards))] == list(range(SAMPLES))
        assert reads == [0, 1, 3]

    def test_shard_of_another_size_is_refused(self) -> None:
        shards = ft.Shards([3], lambda shard: [1, 2])
        with pytest.raises(RequestRefused, match="shard 0 must have 3 samples, got 2"):
            _ = shards[0]

    def test_dataset_that_can_only_be_iterated_over_is_refused(self) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        with pytest.raises(RequestRefused, match="must have __len__ and __getitem__, got Stream"):
            indexed(Stream())

    def test_dataset_that_can_be_indexed_and_iterated_over_is_indexed(self) -> None:
        class Mosaic(IterableDataset[int]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, sample: int) -> int:
                return sample * 2

            def __iter__(self) -> Iterator[int]:
                raise AssertionError("it is iterated over")

        dataset = indexed(Mosaic())
        assert not isinstance(dataset, IterableDataset)
        assert [dataset[sample] for sample in range(len(dataset))] == [0, 2, 4]
