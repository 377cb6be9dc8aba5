"""A daemon and its workers, each on a simulated host of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from benchmarks.host_worker import JOB, TOKEN
from benchmarks.hosts import Hosts
from forged.auth.model import Role
from forged.client import BlockingClient

DAEMON = "daemon"
PORT = 7433
TIMEOUT_S = 60.0
ELEMENTS = 1024


class Worker:
    """A worker process and its output."""

    def __init__(self, process: subprocess.Popen[str], name: str, moved: threading.Condition) -> None:
        self.name = name
        self.process = process
        self.steps: list[dict[str, Any]] = []
        self.ended = ""
        """The error code with which it ended; empty while it runs."""
        self._moved = moved
        threading.Thread(target=self._read_output, daemon=True).start()

    @property
    def generation(self) -> int:
        """The generation of its latest step; 0 before the first."""
        return int(self.steps[-1]["generation"]) if self.steps else 0

    @property
    def rank(self) -> int:
        return int(self.steps[-1]["rank"]) if self.steps else -1

    def steps_in(self, generation: int) -> list[dict[str, Any]]:
        """Its steps in a world, without the step that was committed before it."""
        return [step for step in self.steps if step["generation"] == generation][1:]

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        try:
            yield from self.process.stdout
        except ValueError:
            # Closed when the cluster ended.
            return

    def _read_output(self) -> None:
        for line in self._lines():
            said = json.loads(line)
            with self._moved:
                if "ended" in said:
                    self.ended = said["ended"]
                else:
                    self.steps.append(said)
                self._moved.notify_all()


class HostCluster:
    """A daemon and some workers."""

    def __init__(self, directory: str, *names: str, elements: int = ELEMENTS) -> None:
        self.hosts = Hosts(DAEMON, *names)
        self.workers: dict[str, Worker] = {}
        self._directory = directory
        self._names = names
        self._elements = elements
        self._moved = threading.Condition()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.hosts)
            self._start_daemon()
            self.client = stack.enter_context(BlockingClient(f"unix://{self._directory}/s"))
            self._token = self.client.create_token("hosts", Role.WORKER, jobs=[JOB])
            for name in self._names:
                self.start(name)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def start(self, name: str) -> None:
        """Start or restart the worker of a host."""
        endpoint = f"tcp://{self.hosts.address(DAEMON)}:{PORT}"
        command = [sys.executable, "-m", "benchmarks.host_worker", endpoint, name, str(self._elements)]
        environment = {TOKEN: self._token, "OMP_NUM_THREADS": "1"}
        process = self.hosts.start(name, command, environment, stdout=subprocess.PIPE)
        self.workers[name] = Worker(process, name, self._moved)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds; checks it whenever a worker writes a line."""
        with self._moved:
            if not self._moved.wait_for(true, TIMEOUT_S):
                said = {worker.name: (worker.steps[-1:], worker.ended) for worker in self.workers.values()}
                raise RuntimeError(f"the condition did not become true: {said}")

    def until_together(self, *names: str, after: int = 0, steps: int = 2) -> int:
        """Wait until these workers train in one world later than `after`; returns its generation."""
        workers = [self.workers[name] for name in names]

        def together() -> bool:
            generations = {worker.generation for worker in workers}
            ranks = {worker.rank for worker in workers}
            return (
                len(generations) == 1
                and min(generations) > after
                and len(ranks) == len(workers) == max(ranks) + 1
                and all(len(worker.steps_in(worker.generation)) >= steps for worker in workers)
            )

        self.until(together)
        return workers[0].generation

    def _start_daemon(self) -> None:
        places = ["--data-dir", f"{self._directory}/data", "--socket", f"{self._directory}/s"]
        command = [sys.executable, "-m", "forged.cli.forged", "run", *places]
        command += ["--listen", f"0.0.0.0:{PORT}", "--log-level", "error"]
        daemon = self.hosts.start(DAEMON, command, stdout=subprocess.PIPE)
        assert daemon.stdout is not None
        if "ready" not in daemon.stdout.readline():
            raise RuntimeError("the daemon did not start")
