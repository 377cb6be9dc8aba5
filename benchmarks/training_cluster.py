"""Clusters of training processes, of forged and of its peers, measured from outside.

Invariants:
- All clusters are measured by the same loop and the same output: each process writes `ready PID` when it can begin,
  waits for a line, and writes `step generation world seconds [rank]` for each committed step.
- A cluster is whole when all its processes step in one world that contains all of them.
- Clusters take turns and never train at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple, Self

from forged.client import BlockingClient

WORKERS = 4
TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.001
LOG_CHARS_MAX = 200
HOST = "127.0.0.1"


class Stepped(NamedTuple):
    """A committed step, in a world, at a time."""

    step: int
    generation: int
    world: int
    at: float
    rank: int = -1


class TrainingProcess:
    """A process that trains, and the steps that it has reported."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.steps: list[Stepped] = []
        self._log = log
        self._is_ready = threading.Event()
        self._pids: list[int] = []
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        threading.Thread(target=self._read_output, daemon=True).start()

    @property
    def generation(self) -> int:
        """The generation of its latest step; 0 before the first."""
        return self.steps[-1].generation if self.steps else 0

    @property
    def world(self) -> int:
        """The size of the world of its latest step."""
        return self.steps[-1].world if self.steps else 0

    @property
    def rank(self) -> int:
        """Its rank in its latest step; -1 if it does not tell."""
        return self.steps[-1].rank if self.steps else -1

    def wait_until_ready(self) -> None:
        """Wait until it can begin."""
        if not self._is_ready.wait(TIMEOUT_S):
            raise self.failure("did not become ready")

    def go(self) -> float:
        """Let it begin; returns the time."""
        assert self._process.stdin is not None
        at = time.monotonic()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return at

    def first_step_in(self, generation: int) -> float:
        """When it committed its first step in a world later than `generation`."""
        deadline = time.monotonic() + TIMEOUT_S
        seen = 1
        while time.monotonic() < deadline:
            while seen < len(self.steps):
                # The first line in a world may report the step before it; the second proves progress.
                before, step = self.steps[seen - 1], self.steps[seen]
                if step.generation > generation and before.generation == step.generation:
                    return step.at
                seen += 1
            time.sleep(LOOK_INTERVAL_S)
        raise self.failure(f"made no step after generation {generation}")

    def longest_pause_s(self, since: float, until: float) -> float:
        """The longest time between two of its steps."""
        times = [step.at for step in self.steps if since <= step.at <= until]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def wait_for_steps(self, count: int) -> None:
        """Wait until it has reported so many steps."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.steps) < count:
            if time.monotonic() > deadline:
                raise self.failure(f"made no {count} steps")
            time.sleep(LOOK_INTERVAL_S)

    def longest_step_s(self, since: float) -> float:
        """The longest of its steps that ended later than `since`."""
        return max(after.at - before.at for before, after in pairwise(self.steps) if after.at > since)

    def median_step_s(self, until: float, count: int) -> float:
        """The median of its last `count` steps before `until`."""
        times = [step.at for step in self.steps if step.at <= until][-count - 1 :]
        return statistics.median(after - before for before, after in pairwise(times))

    def terminate(self) -> float:
        """Tell it by SIGTERM to end, or the agent that started it; returns the time."""
        at = time.monotonic()
        self._process.terminate()
        return at

    def kill(self) -> float:
        """Kill the training process with -9, and the agent that started it if there is one; returns the time."""
        at = time.monotonic()
        _kill({self._process.pid, *self._pids[-1:]})
        self._process.wait()
        return at

    def end(self) -> None:
        """Kill it with all its children."""
        if self._process.poll() is None:
            # /proc lists a child under the thread that started it.
            threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
            _kill({self._process.pid, *(int(child) for one in threads for child in one.read_text().split())})
        self._process.wait()

    def failure(self, what: str) -> RuntimeError:
        """An error with the state of the process."""
        return RuntimeError(f"a training process {what}: {self.progress()}")

    def progress(self) -> str:
        """Its last step, whether it runs, and its last log line."""
        step = self.steps[-1].step if self.steps else "none"
        ended = self._process.poll()
        is_there = "runs" if ended is None else f"ended with {ended}"
        last = self._log.read_text(errors="replace").strip().rpartition("\n")[2][:LOG_CHARS_MAX] or "says nothing"
        return f"step {step} of generation {self.generation} with {self.world}, {is_there}, {last}"

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *rest = line.split()
            if first == "ready":
                self._pids.append(int(rest[0]))
                self._is_ready.set()
            else:
                generation, world, at, *rank = rest
                self.steps.append(Stepped(int(first), int(generation), int(world), float(at), *map(int, rank)))


class TrainingCluster(ABC):
    """A cluster of training processes; a context manager that starts it and waits until it is whole."""

    size = WORKERS
    """How many processes are started first."""
    joins_when_told = True
    """Whether a started process waits for a line before it joins; else it joins at once."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory()
        self.directory = Path(self._place.name)
        self.workers: list[TrainingProcess] = []
        self._started: list[TrainingProcess] = []
        self._services: list[subprocess.Popen[str]] = []
        self._number = 0

    @abstractmethod
    def open(self) -> None:
        """Start the services that the training processes need."""

    @abstractmethod
    def worker_process(self, name: str) -> TrainingProcess:
        """Start one more process, which waits for a line before it trains."""

    def __enter__(self) -> Self:
        try:
            self.open()
            joiners = [self.start() for _ in range(self.size)]
            for joiner in joiners:
                self.start_training(joiner)
            self.wait_until_whole()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> TrainingProcess:
        """Start one more process, which waits."""
        self._number += 1
        self._started.append(self.worker_process(f"w{self._number}"))
        return self._started[-1]

    def start_training(self, joiner: TrainingProcess) -> float:
        """Let a started process join the training; returns the time."""
        joiner.wait_until_ready()
        self.workers.append(joiner)
        return joiner.go()

    def wait_until_whole(self) -> None:
        """Wait until the cluster is whole."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            generations = {worker.generation for worker in self.workers}
            if generations != {0} and len(generations) == 1 and {w.world for w in self.workers} == {len(self.workers)}:
                return
            time.sleep(LOOK_INTERVAL_S)
        raise RuntimeError(
            "the cluster did not become whole: " + "; ".join(worker.progress() for worker in self.workers)
        )

    def kill_one(self, random: Random) -> float:
        """Kill a random process; returns the seconds until every survivor has committed a step without it."""
        return self.kill_member(random.choice(self.workers))

    def kill_member(self, victim: TrainingProcess) -> float:
        """Kill this process; returns the seconds until every survivor has committed a step without it."""
        self.workers.remove(victim)
        generation = self.workers[0].generation
        killed_at = victim.kill()
        return max(worker.first_step_in(generation) for worker in self.workers) - killed_at

    def close(self) -> None:
        for worker_process in self._started:
            worker_process.end()
        for service in self._services:
            service.kill()
            service.communicate()
        self._place.cleanup()

    def _serve(self, *command: str) -> str:
        """Start a service; returns its first line."""
        service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._services.append(service)
        assert service.stdout is not None
        line = service.stdout.readline()
        if not line:
            raise RuntimeError(f"{command[0]} did not start")
        return line


class ForgedCluster(TrainingCluster):
    """A forged daemon and its workers."""

    worker: Sequence[str] = (sys.executable, "-m", "benchmarks.forged_worker")
    """The command of a worker, which gets ENDPOINT and NAME as arguments, and then `arguments`."""
    arguments: Sequence[str] = ()

    def open(self) -> None:
        socket = self.directory / "s"
        command = [str(Path(sys.executable).parent / "forged"), "run", "--data-dir", f"{self.directory}/data"]
        command += ["--socket", str(socket), "--listen", f"{HOST}:0", "--log-level", "error"]
        line = self._serve(*command)
        if "ready" not in line:
            raise RuntimeError(f"the daemon of this benchmark did not start: {line}")
        with BlockingClient(f"unix://{socket}") as client:
            (self.endpoint,) = client.status().listen

    def worker_process(self, name: str) -> TrainingProcess:
        command = [*self.worker, self.endpoint, name, *self.arguments]
        return TrainingProcess(command, self.directory / f"{name}.log")


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
