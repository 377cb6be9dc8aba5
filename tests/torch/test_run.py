"""Torch scripts in real processes: what they compute when workers die, hang, fail and join."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forged.client import BlockingClient
from forged.elastic.messages import WorkerFailed
from forged.kernel.messages import Record
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


def past(client: BlockingClient, kind: type[Any], job: str) -> list[Any]:
    return [item.fact for item in client.past_facts(kind, jobs=[job]) if isinstance(item, Record)]


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

    def test_hanging_worker_is_named_and_evicted(self, cluster: TorchCluster) -> None:
        cluster.start_all("abc", victim="b", fails="hang", phase="forward")
        cluster.release(evict_stalled=True, stall_timeout_ms=1500)
        assert close_to(ended(cluster, "ac"), undisturbed(TOTAL))
        (failed,) = past(cluster.client, WorkerFailed, cluster.job)
        assert failed.worker_id == "b"
        assert "no progress" in failed.reason

    @pytest.mark.parametrize("phase", PHASES)
    def test_exception_of_one_worker_ends_it_and_the_rest_trains_on(self, phase: str, cluster: TorchCluster) -> None:
        cluster.start_all("abc", victim="b", fails="raise", phase=phase)
        cluster.release()
        assert close_to(ended(cluster, "ac"), undisturbed(TOTAL))
        assert cluster.workers["b"].wait_for("error")["text"] == f"the test fails in {phase}"
        assert cluster.workers["b"].end() == 1

    def test_interrupted_worker_leaves_and_the_rest_trains_on(self, cluster: TorchCluster) -> None:
        cluster.start_all("abc", victim="b", fails="interrupt", phase="backward")
        cluster.release()
        assert close_to(ended(cluster, "ac"), undisturbed(TOTAL))
        assert cluster.workers["b"].wait_for("error")["error"] == "KeyboardInterrupt"

    @pytest.mark.parametrize(
        "options",
        [
            {"accumulates": True, "scales": True},
            {"plain": True, "commits": False},
            {"compiles": True, "has_mesh": True},
        ],
        ids=["accumulated and scaled", "without DDP and vote", "compiled, with a mesh"],
    )
    def test_killed_worker_costs_no_step_of_other_scripts(self, options: Any, cluster: TorchCluster) -> None:
        cluster.start_all("abc", **options)
        for worker in cluster.workers.values():
            worker.wait_for("held")
        cluster.workers.pop("c").process.kill()
        cluster.release()
        assert close_to(ended(cluster, "ab"), undisturbed(TOTAL))


class TestAborts:
    @pytest.mark.parametrize("fails", ["abort", "collective"])
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_repeated_step_changes_no_bit(self, fails: str, phase: str, cluster: TorchCluster) -> None:
        """With BatchNorm and dropout, whose buffers and generators a step changes."""
        values = []
        for how in ("", fails):
            cluster.job += "-again"
            cluster.start_all("ab", victim="b", fails=how, phase=phase, times=3, has_noise=True, holds=False)
            # The statistics of BatchNorm are those of each rank.
            values.append({one.wait_for("end")["rank"]: one.wait_for("end") for one in cluster.workers.values()})
        assert values[0] == values[1]
        steps = [report["step"] for report in cluster.workers["b"].all_of("step")]
        assert steps.count(5) == 4

    def test_step_that_one_worker_always_aborts_ends_that_worker(self, cluster: TorchCluster) -> None:
        cluster.start_all("abc", victim="b", fails="abort", times=99)
        cluster.release()
        ended(cluster, "ac")
        failed = cluster.workers["b"].wait_for("error")
        assert "aborted step 5 5 times with the same 3 members: the test says so" in failed["text"]


class TestJoiners:
    def test_joiner_takes_the_state_and_trains(self, cluster: TorchCluster) -> None:
        cluster.start_all("ab")
        for worker in cluster.workers.values():
            worker.wait_for("held")
        late = cluster.start("c", size=2, holds=False)
        while not cluster.client.cluster(cluster.job).joining:
            assert late.process.is_alive(), late.drained()
        cluster.release_all()
        assert close_to(ended(cluster, "abc"), undisturbed(TOTAL))
        assert cluster.workers["a"].all_of("step")[-1]["size"] == 3

    @pytest.mark.parametrize(
        ("differs", "message"),
        [
            ({"width": 7}, "model.0.weight is float32[7, 6] here and float32[5, 6] in the job"),
            ({"has_noise": True}, "model.2.weight is float32[5] here and float32[1, 5] in the job"),
            ({"torch_version": "2.6.0"}, "the job trains with torch 2.13, and this worker has torch 2.6"),
        ],
        ids=["width", "layers", "torch"],
    )
    def test_joiner_that_differs_is_refused_and_the_rest_trains_on(
        self, differs: Any, message: str, cluster: TorchCluster
    ) -> None:
        cluster.start_all("ab")
        for worker in cluster.workers.values():
            worker.wait_for("held")
        late = cluster.start("c", size=2, holds=False, **differs)
        while not cluster.client.cluster(cluster.job).joining:
            assert late.process.is_alive(), late.drained()
        cluster.release_all()
        assert close_to(ended(cluster, "ab"), undisturbed(TOTAL))
        assert message in late.wait_for("error")["text"]
        assert not [report for report in cluster.workers["a"].all_of("step") if report["aborted"]]


class TestCheckpoints:
    def test_another_job_resumes_with_another_number_of_workers(self, cluster: TorchCluster, tmp_path: Path) -> None:
        cluster.start_all("ab", total=7, holds=False, checkpoints=str(tmp_path))
        ended(cluster, "ab", 7)
        cluster.job += "-resumed"
        cluster.start("c", size=1, holds=False, checkpoints=str(tmp_path))
        assert close_to(ended(cluster, "c"), undisturbed(TOTAL))
        assert [report["step"] for report in cluster.workers["c"].all_of("step")] == list(range(7, TOTAL))

    def test_last_worker_that_drains_saves_its_state(self, cluster: TorchCluster, tmp_path: Path) -> None:
        worker = cluster.start("a", size=1, total=None, checkpoints=str(tmp_path))
        worker.wait_for("held")
        worker.process.terminate()
        worker.go()
        assert worker.wait_for("end")["end"] == 3
        assert [path.name for path in sorted(tmp_path.glob("step-*.json"))][-1] == "step-00000003.metadata.json"


def test_worlds_leave_nothing_behind(cluster: TorchCluster) -> None:
    """A worker with a device mesh that aborts a step in each of 30 worlds."""
    cluster.start_all("ab", total=30, fails="abort", at=-1, phase="backward", has_mesh=True, holds=False)
    ended(cluster, "ab", 30)
    for worker in cluster.workers.values():
        worlds = worker.all_of("world")
        assert len(worlds) >= 30
        settled = worlds[5]
        for key in ("files", "threads", "shared"):
            assert worlds[-1][key] <= settled[key], (key, [world[key] for world in worlds])
