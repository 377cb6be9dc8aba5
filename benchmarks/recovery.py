"""How long a training stands still when a worker is killed, and when one joins.

Four worker processes train; one is killed with -9, and the time from there to the next committed step of the last of
the survivors is taken. Then another one joins, which was started before: the time from its registering to its first
step, and the longest pause between two steps of the others, are taken.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from random import Random

from benchmarks.harness import Figure, main
from forged.client import BlockingClient

WORKERS = 4
KILLS = 50
FAILURE_WINDOW_S = 0.05
RECOVERY_P50_MAX_S = FAILURE_WINDOW_S + 0.1
RECOVERY_P99_MAX_S = 0.5
JOIN_MAX_S = 0.3
PAUSE_MAX_S = 0.05
STABILITY_WINDOW_S = 0.1
PATIENCE_S = 60.0


class Trainee:
    """A worker process, and the steps that it has told of."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self.steps: list[tuple[int, int, float]] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.trainee", endpoint, name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def generation(self) -> int:
        """The world of its latest step; 0 before the first."""
        return self.steps[-1][1] if self.steps else 0

    def first_step_in(self, generation: int) -> float:
        """When it had committed a step in a world after that one."""
        deadline = time.monotonic() + PATIENCE_S
        seen = 0
        while time.monotonic() < deadline:
            steps = self.steps
            while seen < len(steps):
                # The first line in a world tells how far it was before; the second that it goes on.
                if steps[seen][1] > generation and seen and steps[seen - 1][1] == steps[seen][1]:
                    return steps[seen][2]
                seen += 1
            time.sleep(0.001)
        raise RuntimeError(f"{self.name} did not go on after generation {generation}")

    def longest_pause_s(self, since: float, until: float) -> float:
        """Between two of its steps."""
        times = [at for _, _, at in self.steps if since <= at <= until]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def kill(self) -> float:
        """Kill it with -9; returns when."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            step, generation, at = line.split()
            self.steps.append((int(step), int(generation), float(at)))


class Cluster:
    """A daemon and its workers."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._number = 0
        command = [str(Path(sys.executable).parent / "forged"), "run", "--data-dir", f"{directory}/data"]
        command += ["--socket", f"{directory}/s", "--listen", "127.0.0.1:0", "--log-level", "error"]
        self._daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._daemon.stdout is not None
        if "ready" not in self._daemon.stdout.readline():
            raise RuntimeError("the daemon of this benchmark did not start")
        with BlockingClient(f"unix://{directory}/s") as client:
            (self.endpoint,) = client.status().listen
        self.workers = [self.start() for _ in range(WORKERS)]
        self.settle()

    def start(self) -> Trainee:
        """Another worker."""
        self._number += 1
        return Trainee(self.endpoint, f"w{self._number}")

    def settle(self) -> None:
        """Wait until all workers are in one world."""
        deadline = time.monotonic() + PATIENCE_S
        with BlockingClient(f"unix://{self.directory}/s") as client:
            while time.monotonic() < deadline:
                generations = {worker.generation for worker in self.workers}
                if generations != {0} and len(generations) == 1 and self._is_whole(client, *generations):
                    return
                time.sleep(0.005)
        raise RuntimeError("the workers did not find together")

    def _is_whole(self, client: BlockingClient, generation: int) -> bool:
        cluster = client.cluster("benchmark")
        return cluster.generation == generation and cluster.world_size == len(self.workers)

    def close(self) -> None:
        """End everything."""
        for worker in self.workers:
            worker.kill()
        self._daemon.kill()
        self._daemon.communicate()


def _one_kill(cluster: Cluster, random: Random) -> tuple[float, float, float]:
    """The recovery from a kill; the next one's join, its window excluded; how long the others stood still for that."""
    generation = cluster.workers[0].generation
    victim = cluster.workers.pop(random.randrange(WORKERS))
    killed_at = victim.kill()
    recovery_s = max(worker.first_step_in(generation) for worker in cluster.workers) - killed_at
    generation = cluster.workers[0].generation
    newcomer = cluster.start()
    cluster.workers.append(newcomer)
    cluster.settle()
    with BlockingClient(f"unix://{cluster.directory}/s") as client:
        joined_at = client.worker("benchmark", newcomer.name).joined_at - time.time() + time.monotonic()
    first = newcomer.first_step_in(generation)
    pause_s = max(
        worker.longest_pause_s(joined_at, first + PAUSE_MAX_S) for worker in cluster.workers if worker is not newcomer
    )
    return recovery_s, first - joined_at - STABILITY_WINDOW_S, pause_s


def measure(quick: bool) -> list[Figure]:
    """Kill after kill."""
    random = Random(1)
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(directory)
        try:
            rounds = [_one_kill(cluster, random) for _ in range(3 if quick else KILLS)]
        finally:
            cluster.close()
    recoveries, joins, pauses = (sorted(column) for column in zip(*rounds, strict=True))
    p99 = recoveries[min(len(recoveries) - 1, int(0.99 * len(recoveries)))]
    return [
        _bounded("kill to next step of all, p50", statistics.median(recoveries), RECOVERY_P50_MAX_S),
        _bounded("kill to next step of all, p99", p99, RECOVERY_P99_MAX_S),
        _bounded("join to first step, p50, window excluded", statistics.median(joins), JOIN_MAX_S),
        _bounded("survivors stand still for a join, p50", statistics.median(pauses), PAUSE_MAX_S),
    ]


def _bounded(name: str, seconds: float, limit_s: float) -> Figure:
    return Figure(name, "s", seconds, limit_s, aim=1.0, higher_is_better=False)


if __name__ == "__main__":
    main("recovery", measure)
