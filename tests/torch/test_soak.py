"""Workers are killed, drained and started, and the daemon is killed and restarted, while torch scripts train.

`FORGED_TORCH_EVENTS` says how often, `FORGED_SEED` in which order; both are printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest
import torch

from tests.client.daemon_runner import SOON
from tests.processes.daemon import DaemonProcess
from tests.torch import soak_script
from tests.torch.soak_script import BATCH, SAMPLES, SoakScript, undisturbed
from tests.torch.torch_cluster import PATIENCE_S, TorchWorker

EVENTS = int(os.environ.get("FORGED_TORCH_EVENTS", "8"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
HOST = "127.0.0.2"
"""Not 127.0.0.1, from which the clients connect: one that knocks at a free port would in time connect to itself."""
JOB = "soak"
WORKERS_MIN, WORKERS_MAX = 2, 4
STEPS_BETWEEN = 3
COMPARED_MIN = 6
"""Worlds: connections of the one before may still be closing when a worker counts."""
KILL, DRAIN, JOIN, RESTART = "kill", "drain", "join", "daemon restart"


class Soak:
    """A daemon that is restarted, and the workers of a job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._random = Random(SEED)
        self._daemon = DaemonProcess(directory, "--log-level", "error", listen=f"{HOST}:0").__enter__()
        with self._daemon.client() as client:
            (self._endpoint,) = client.status().listen
        self.live: dict[str, TorchWorker] = {}
        self.all: list[TorchWorker] = []

    def start(self) -> None:
        name = f"w{len(self.all)}"
        worker = TorchWorker(SoakScript(self._endpoint, JOB, name), soak_script.main)
        self.live[name] = worker
        self.all.append(worker)

    def disturb(self) -> str:
        """One event; returns what it was."""
        events = [RESTART]
        if len(self.live) > WORKERS_MIN:
            events += [KILL, KILL, DRAIN]
        if len(self.live) < WORKERS_MAX:
            events += [JOIN, JOIN, JOIN]
        event = self._random.choice(events)
        match event:
            case "kill":
                self.live.pop(self._one()).process.kill()
            case "drain":
                name = self._one()
                with self._daemon.client(reconnect=SOON) as client:
                    client.drain_worker(JOB, name)
                self.live.pop(name).wait_for("end")
            case "join":
                self.start()
            case _:
                self._daemon.__exit__(None, None, None)
                listen = self._endpoint.removeprefix("tcp://")
                self._daemon = DaemonProcess(self._directory, "--log-level", "error", listen=listen).__enter__()
        return event

    def _one(self) -> str:
        return self._random.choice(sorted(self.live))

    def settle(self) -> None:
        """Wait until all live workers have trained some steps together from now on."""
        self._drain_all()
        seen = {name: len(worker.all_of("step")) for name, worker in self.live.items()}
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._trains(worker, seen[name]) for name, worker in self.live.items()):
            self._drain_all()
            assert time.monotonic() < deadline, [(one.script, one.reports[-3:]) for one in self.live.values()]
            time.sleep(0.01)

    def _trains(self, worker: TorchWorker, seen: int) -> bool:
        assert worker.process.is_alive(), (worker.script, worker.drained()[-3:])
        steps = worker.all_of("step")[seen:]
        return len(steps) >= STEPS_BETWEEN and all(one["size"] == len(self.live) for one in steps[-STEPS_BETWEEN:])

    def _drain_all(self) -> None:
        """Read all reports, so that no worker waits for its pipe."""
        for worker in self.all:
            worker.drained()

    def finish(self) -> list[dict[str, Any]]:
        """End all workers behind the same step; returns their last reports."""
        next(iter(self.live.values())).tell("end")
        ends = [worker.wait_for("end") for worker in self.live.values()]
        assert [worker.end() for worker in self.live.values()] == [0] * len(ends)
        return ends

    def sizes(self) -> list[int]:
        """The size of the world of each step."""
        found: dict[int, int] = {}
        for worker in self.all:
            for report in worker.all_of("step"):
                assert found.setdefault(report["step"], report["size"]) == report["size"], report
        assert sorted(found) == list(range(len(found)))
        return [found[step] for step in sorted(found)]

    def check_audit(self, steps: int) -> None:
        with self._daemon.client(reconnect=SOON) as client:
            for epoch in range(steps * BATCH // SAMPLES):
                audit = client.audit_data(JOB, epoch)
                assert audit.complete, audit

    def check_leaks(self, ends: list[dict[str, Any]]) -> None:
        """No worker has more sockets and threads in later worlds, and no process is left."""
        assert [end["sockets_left"] for end in ends] == [0] * len(ends)
        for worker in self.all:
            for counts in _counts(worker.all_of("world")):
                half = len(counts) // 2
                assert min(counts[half:]) <= max(counts[:half]), (worker.script, counts)
        pids = {pid for worker in self.all for world in worker.all_of("world") for pid in world["processes"]}
        deadline = time.monotonic() + PATIENCE_S
        while left := [pid for pid in pids if _runs(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        shared = [path.name for path in Path("/dev/shm").iterdir()]
        assert not [name for name in shared if name.startswith(tuple(f"torch_{pid}_" for pid in pids))]

    def close(self) -> None:
        for worker in self.all:
            worker.process.kill()
            worker.process.join()
        self._daemon.__exit__(None, None, None)


def _counts(worlds: list[dict[str, Any]]) -> Iterator[list[int]]:
    """The sockets and the threads of a worker, over the worlds in which it should have equally many of them."""
    alike: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for world in worlds:
        alike.setdefault((world["size"], world["rank"] == 0), []).append(world)
    for same in alike.values():
        if len(same) >= COMPARED_MIN:
            yield from ([world[what] for world in same] for what in ("sockets", "threads"))


def _runs(pid: int) -> bool:
    """Whether a Python process with this number runs: the number may have been given to another program since."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Soak]:
    soak = Soak(tmp_path)
    yield soak
    soak.close()


def test_result_is_that_of_an_undisturbed_run_whatever_happens_to_workers_and_daemon(soak: Soak) -> None:
    print(f"FORGED_TORCH_EVENTS={EVENTS} FORGED_SEED={SEED}")
    for _ in range(WORKERS_MAX - 1):
        soak.start()
    soak.settle()
    for number in range(EVENTS):
        print(number, soak.disturb(), flush=True)
        soak.settle()
    ends = soak.finish()
    sizes = soak.sizes()
    assert [end["end"] for end in ends] == [len(sizes)] * len(ends)
    shared, own = undisturbed(sizes)
    for end in ends:
        assert end["own"] == [one.tolist() for one in own]
        assert end["shared"] == ends[0]["shared"]
        for found, expected in zip(end["shared"], shared, strict=True):
            assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-5, atol=1e-8)
    soak.check_audit(len(sizes))
    soak.check_leaks(ends)
