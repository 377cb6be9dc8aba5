"""Torch scripts in real processes: what they compute when workers die, hang, fail and join."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.threaded_daemon import ThreadedDaemon
from tests.torch.torch_cluster import TorchCluster
from tests.torch.train_script import undisturbed

TOTAL = 12
PHASES = ["loader", "forward", "backward", "commit", "opt"]


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


def close_to(values: dict[str, Any], others: dict[str, Any]) -> bool:
    flat, other = _flat(values), _flat(others)
    return len(flat) == len(other) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in zip(flat, other, strict=True)
    )


def _flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _flat(value[key])]
    return [number for one in value for number in _flat(one)] if isinstance(value, list) else [value]


def ended(cluster: TorchCluster, names: str, total: int = TOTAL) -> dict[str, Any]:
    """The values with which these workers have ended, all with the same."""
    ends = [cluster.workers[name].wait_for("end") for name in names]
    assert [end["end"] for end in ends] == [total] * len(names)
    assert all(end["values"] == ends[0]["values"] for end in ends)
    assert [cluster.workers[name].end() for name in names] == [0] * len(names)
    values: dict[str, Any] = ends[0]["values"]
    return values


class TestLosses:
    @pytest.mark.parametrize("phase", PHASES)
    def test_killed_worker_costs_no_step(self, phase: str, cluster: TorchCluster) -> None:
        cluster.start_all("abc", victim="b", fails="kill", phase=phase)
        cluster.release()
        assert close_to(ended(cluster, "ac"), undisturbed(TOTAL))
        steps = cluster.workers["a"].all_of("step")
        assert [report["step"] for report in steps if not report["aborted"]] == list(range(TOTAL))
        assert steps[-1]["size"] == 2

    def test_killed_rank_0_costs_no_step(self, cluster: TorchCluster) -> None:
        cluster.start_all("abc")
        for worker in cluster.workers.values():
            worker.wait_for("held")
        victim = cluster.workers.pop(next(name for name, one in cluster.workers.items() if one.rank == 0))
        victim.process.kill()
        cluster.release()
        assert close_to(ended(cluster, "".join(cluster.workers)), undisturbed(TOTAL))
