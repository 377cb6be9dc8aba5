"""What many workers cost one daemon: a rescale, heartbeats, memory, bytes; and how that grows with their number.

Real: the daemon's process and its store on the disk, a TCP connection over loopback and a client of its own for every
worker, each message of the protocol, processes that are killed with -9, and a second client that reports the death as a
worker's pulse does. Not real: most workers share two processes (`benchmarks.simulated_workers`), no worker trains, and
the workers do not connect to each other. So the clients, which would run on as many machines, compete with the daemon
for the cores of this one, and their work is part of the measured rescale.

A worker is killed. Measured is the time until the last survivor has received the commit of the new world, including the
failure window. Half of the survivors are laggards, which answer twice. Heartbeats go on meanwhile. Bytes are those that
the kernel delivered to the workers, from the death to the commit. The limit of the machine is an asyncio server that
has the same number of connections and sends each of them the same number of bytes, once; for heartbeats, one that takes
the same bytes each second and does nothing with them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import Figure, main
from benchmarks.simulated_workers import JOB, incarnation_of
from forged.client import BlockingClient
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import ReportDeath

SIZES = (100, 300, 1000)
SIZES_QUICK = (10, 30)
PROCESSES = 2
KILLS = 5
BEAT_S = 20.0
RESCALE_MAX_S = 2.0
CPU_MAX_PERCENT = 5.0
TENFOLD = 10.0
"""So many times the workers may cost so many times as much."""
CLOCK_PID_SHIFT, CPUCLOCK_SCHED = 3, 2
"""How Linux makes the number of a process' CPU clock out of its pid. /proc counts the same in whole ticks of 10 ms."""


class Process:
    """A process of simulated workers, or the bare server."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "benchmarks.simulated_workers", *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, *words: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def read_event(self, event: str) -> dict[str, Any]:
        """The details of the next event of this name; earlier events are skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == event:
                return told
        raise RuntimeError(f"a process of this benchmark ended before it was {event}")

    def cpu_s(self) -> float:
        """The CPU time that it has used."""
        return _cpu_s(self._process.pid)

    def kill(self) -> None:
        """End it with -9."""
        self._process.kill()
        self._process.communicate()


class Daemon:
    """A daemon with a new data directory."""

    def __init__(self, directory: str) -> None:
        command = [str(Path(sys.executable).parent / "forged"), "run", "--data-dir", f"{directory}/data"]
        command += ["--socket", f"{directory}/s", "--listen", "127.0.0.1:0", "--log-level", "error"]
        self.socket = f"unix://{directory}/s"
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if "ready" not in self._process.stdout.readline():
            raise RuntimeError("the daemon of this benchmark did not start")

    def cpu_s(self) -> float:
        """The CPU time that it has used."""
        return _cpu_s(self._process.pid)

    def resident_bytes(self) -> int:
        """The resident set."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def _cpu_s(pid: int) -> float:
    """What a process has used in user and system mode, with all its threads."""
    return time.clock_gettime(~pid << CLOCK_PID_SHIFT | CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class Load:
    """What a world of this size costs."""

    workers: int
    forming_s: float
    rescale_s: float
    rescale_cpu_s: float
    cpu_percent: float
    bare_cpu_percent: float
    worker_bytes: float
    rescale_bytes: float
    broadcast_s: float


class Run:
    """One daemon and its simulated workers; each worker to be killed has a process of its own."""

    def __init__(self, directory: str, workers: int, kills: int) -> None:
        self._workers = workers
        self._daemon = Daemon(directory)
        self._client = BlockingClient(self._daemon.socket)
        self._worker_processes: list[Process] = []
        self._victims: dict[str, Process] = {}
        self._kills = kills
        self._dead = 0
        self._generation = 0

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._all:
            process.kill()
        self._client.__exit__(None, None, None)
        self._daemon.kill()

    @property
    def _all(self) -> list[Process]:
        return [*self._worker_processes, *self._victims.values()]

    def measure(self, beat_s: float) -> Load:
        """Everything, in the order in which it happens."""
        empty_bytes = self._daemon.resident_bytes()
        forming_s = self._form()
        worker_bytes = (self._daemon.resident_bytes() - empty_bytes) / self._workers
        cpu_percent = self._beat(beat_s)
        bare_cpu_percent = self._bare_beat(beat_s)
        rescales = [self._kill_one(name) for name in list(self._victims)]
        times, cpu_times, counts = (statistics.median(column) for column in zip(*rescales, strict=True))
        survivors = self._workers - self._kills
        broadcast_s = statistics.median(self._broadcast(survivors, counts) for _ in range(self._kills))
        return Load(
            workers=self._workers,
            forming_s=forming_s,
            rescale_s=times,
            rescale_cpu_s=cpu_times,
            cpu_percent=cpu_percent,
            bare_cpu_percent=bare_cpu_percent,
            worker_bytes=worker_bytes,
            rescale_bytes=counts / survivors,
            broadcast_s=broadcast_s,
        )

    def _form(self) -> float:
        """Form the first world of all workers; returns the seconds since the first join."""
        (endpoint,) = self._client.status().listen
        many, following = self._workers - self._kills, 0
        for index in range(PROCESSES):
            share = many * (index + 1) // PROCESSES - following
            self._worker_processes.append(Process(endpoint, following, share))
            following += share
        for number in range(many, self._workers):
            self._victims[f"w{number}"] = Process(endpoint, number, 1)
        for process in self._all:
            process.send("connect")
        for process in self._all:
            process.read_event("connected")
        began_at = time.monotonic()
        for process in self._all:
            process.send("join", self._workers)
        return self._committed_at() - began_at

    def _committed_at(self) -> float:
        """When the last worker has received the commit of the next world, which contains all live workers."""
        self._generation += 1
        told = [process.read_event("committed") for process in self._all]
        cluster = self._client.cluster(JOB)
        found = {cluster.generation, *(committed["generation"] for committed in told)}
        if found != {self._generation} or cluster.world_size != self._workers - self._dead:
            raise RuntimeError(
                f"worlds {found}, the last of {cluster.world_size} workers, are not what is measured here"
            )
        return max(float(committed["at"]) for committed in told)

    def _beat(self, seconds: float) -> float:
        """The daemon's CPU for one heartbeat per worker and second, in per cent of a core.

        A busy machine sends fewer heartbeats than are due; the CPU is therefore divided by those that were sent.
        """
        count, used_s = self._total("beats"), self._daemon.cpu_s()
        time.sleep(seconds)
        count, used_s = self._total("beats") - count, self._daemon.cpu_s() - used_s
        if not count:
            raise RuntimeError(f"no heartbeat of {self._workers} workers in {seconds} s")
        return 100 * used_s * self._workers / count

    def _bare_beat(self, seconds: float) -> float:
        """What it costs a bare server to take as many bytes from as many connections, in per cent of a core."""
        server = Process("--bare", self._workers - len(self._victims), 0)
        try:
            port = server.read_event("listening")["port"]
            for workers_process in self._worker_processes:
                workers_process.send("send_heartbeats", port)
            server.read_event("accepted")
            for workers_process in self._worker_processes:
                workers_process.read_event("heartbeats_started")
            used_s, began_at = server.cpu_s(), time.monotonic()
            time.sleep(seconds)
            return 100 * (server.cpu_s() - used_s) / (time.monotonic() - began_at)
        finally:
            for workers_process in self._worker_processes:
                workers_process.send("rest")
            server.kill()

    def _kill_one(self, name: str) -> tuple[float, float, float]:
        """From a death to the world without the dead: seconds, the daemon's CPU seconds, bytes to the survivors."""
        victim = self._victims.pop(name)
        self._dead += 1
        used_s, count = self._daemon.cpu_s(), self._total("bytes")
        began_at = time.monotonic()
        victim.kill()
        self._client.request(ReportDeath(JOB, name, incarnation_of(name)))
        took_s = self._committed_at() - began_at
        return took_s, self._daemon.cpu_s() - used_s, self._total("bytes") - count

    def _total(self, what: str) -> int:
        """A count, summed over all processes."""
        total = 0
        for process in self._all:
            process.send(what)
            total += int(process.read_event(what)["total"])
        return total

    def _broadcast(self, connections: int, total_bytes: float) -> float:
        """How long a bare server takes to send the same to the same number of connections."""
        length = math.ceil(total_bytes / connections)
        server = Process("--bare", connections, length)
        try:
            port = server.read_event("listening")["port"]
            for workers_process in self._worker_processes:
                workers_process.send("bare", port, length)
            server.read_event("accepted")
            server.send("send")
            began_at = float(server.read_event("sent")["at"])
            return (
                max(float(workers_process.read_event("reached")["at"]) for workers_process in self._worker_processes)
                - began_at
            )
        finally:
            server.kill()


def exponent(loads: Sequence[Load], cost: Callable[[Load], float]) -> float:
    """The power of the number of workers with which a cost grows: the slope of the line through the logarithms."""
    sizes = [math.log(load.workers) for load in loads]
    return statistics.linear_regression(sizes, [math.log(cost(load)) for load in loads]).slope


def measure(quick: bool) -> list[Figure]:
    """Measure worlds of growing size."""
    loads: list[Load] = []
    kills, beat_s = (2, 1.0) if quick else (KILLS, BEAT_S)
    for workers in SIZES_QUICK if quick else SIZES:
        with tempfile.TemporaryDirectory() as directory, Run(directory, workers, kills) as run:
            loads.append(run.measure(beat_s))
    window_s = ElasticTrainingConfig().failure_window_s
    return [
        *(figure for load in loads for figure in _figures(load)),
        _growth("time of a rescale behind the failure window", loads, lambda load: load.rescale_s - window_s),
        _growth("daemon's CPU for a rescale", loads, lambda load: load.rescale_cpu_s),
        _growth("daemon's CPU for heartbeats", loads, lambda load: load.cpu_percent),
        _growth("bytes sent for a rescale", loads, lambda load: load.rescale_bytes * load.workers),
    ]


def _figures(load: Load) -> list[Figure]:
    label = f"{load.workers} workers"
    return [
        Figure(f"{label}: all join, first world committed", "s", load.forming_s),
        _bounded(f"{label}: kill to commit heard by all", "s", load.rescale_s, RESCALE_MAX_S),
        Figure(
            f"{label}: kill to commit, against a bare broadcast of the same bytes",
            *("s", load.rescale_s, load.broadcast_s),
            higher_is_better=False,
        ),
        _bounded(
            f"{label}: daemon's CPU, a heartbeat each per second", "% of a core", load.cpu_percent, CPU_MAX_PERCENT
        ),
        Figure(
            f"{label}: daemon's CPU, against a bare server that takes the same bytes",
            *("% of a core", load.cpu_percent, load.bare_cpu_percent),
            higher_is_better=False,
        ),
        Figure(f"{label}: daemon's memory per worker", "KiB", load.worker_bytes / 1024),
        Figure(f"{label}: sent for a rescale, per worker", "bytes", load.rescale_bytes),
    ]


def _bounded(name: str, unit: str, value: float, limit: float) -> Figure:
    return Figure(name, unit, value, limit, aim=1.0, higher_is_better=False)


def _growth(name: str, loads: Sequence[Load], cost: Callable[[Load], float]) -> Figure:
    return _bounded(f"with ten times the workers: {name}", "times", TENFOLD ** exponent(loads, cost), TENFOLD)


if __name__ == "__main__":
    main("scale", measure)
