"""The store of a world as scripts use it."""

from __future__ import annotations

import threading

import pytest

from forged.elastic.model import ClusterTopology
from forged.errors import RequestRefused
from forged.worker.blocking import Training
from forged.worker.errors import StepAborted
from tests.worker.test_blocking import Scripts, at, client, endpoint, scripts
from tests.worker.trainers import PATIENCE_S, config

__all__ = ["client", "endpoint", "scripts"]

TWO = config(max_workers=2, stability_window_ms=60_000)


def test_scripts_meet_by_the_store_when_they_enter_a_world(scripts: Scripts) -> None:
    def script(worker: Training) -> list[bytes]:
        found: list[bytes] = []

        def enter(topology: ClusterTopology) -> None:
            store = worker.world_store
            if worker.rank == 0:
                store.set("port", b"4711")
            found.append(store.get("port"))
            assert store.add("met", 1) in (1, 2)
            while store.get_now("met") != b"2":
                pass

        worker.world_entered.subscribe(enter)
        for _ in worker.steps(2):
            worker.barrier()
        return found

    futures = [scripts.start(name, script, config=TWO) for name in "ab"]
    assert [future.result(PATIENCE_S) for future in futures] == [[b"4711"]] * 2


def test_another_thread_of_the_script_uses_the_store_while_a_collective_waits(scripts: Scripts) -> None:
    def waits(worker: Training) -> None:
        for step in worker.steps(1):
            with step:
                thread = threading.Thread(target=worker.world_store.set, args=("from a thread", b"here"))
                thread.start()
                worker.barrier()
                thread.join(PATIENCE_S)

    def comes_then(worker: Training) -> bytes:
        found = b""
        for step in worker.steps(1):
            with step:
                found = worker.world_store.get("from a thread", PATIENCE_S)
                worker.barrier()
        return found

    one, other = scripts.start("a", waits, config=TWO), scripts.start("b", comes_then, config=TWO)
    assert other.result(PATIENCE_S) == b"here"
    one.result(PATIENCE_S)


def test_values_end_with_their_world_and_the_step_of_a_waiting_rank_is_repeated(scripts: Scripts) -> None:
    def script(worker: Training) -> list[bytes | None]:
        found: list[bytes | None] = []
        for step in worker.steps(2):
            with step:
                if worker.generation == 1:
                    if worker.rank == 0:
                        worker.world_store.set("old", b"value")
                        worker.world_store.get("never")
                    assert worker.world_store.get("old") == b"value"
                    step.abort("once more")
                worker.barrier()
                found.append(worker.world_store.get_now("old"))
        return found

    futures = [scripts.start(name, script, config=TWO) for name in "ab"]
    assert [future.result(PATIENCE_S) for future in futures] == [[None, None]] * 2


def test_store_needs_a_world(endpoint: str) -> None:
    with at(endpoint) as worker:
        with pytest.raises(StepAborted, match="no world"):
            worker.world_store.set("port", b"7")
        next(worker.steps())
        assert worker.world_store.delete("port") is False
        with pytest.raises(RequestRefused, match="at most"):
            worker.world_store.add("sum", 1 << 80)
